"""A report as one page of HTML that needs nothing else."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from x86quant.reporting.charts import bars

if TYPE_CHECKING:
    from x86quant.reporting.facts import LayerFacts, ModelReport

#: Below this many dB a layer is marked: its noise is within a factor of ten of its signal.
LOW_SQNR = 20.0

#: Above this share of clipped values a layer is marked.
HIGH_SATURATION = 0.01

_STYLE = """
:root { color-scheme: light dark; --accent: #2f6fde; --warn: #d9662b; --line: #8884; }
body { font: 14px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 1100px;
  padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1.2rem; }
dt { opacity: .7; } dd { margin: 0; }
table { border-collapse: collapse; width: 100%; font-size: 12.5px; }
th, td { text-align: left; padding: .2rem .5rem; border-bottom: 1px solid var(--line); }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; }
th { position: sticky; top: 0; background: Canvas; cursor: default; }
td.warn { color: var(--warn); font-weight: 600; } tr.float td { font-style: italic; }
svg { width: 100%; font: 11px system-ui, sans-serif; } svg text { fill: currentColor; }
.bar { fill: var(--accent); } .warn { fill: var(--warn); } pre { overflow-x: auto; }
"""


def page(report: ModelReport) -> str:
    """The whole document."""
    title = html.escape(report.title)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{_STYLE}</style></head><body><h1>{title}</h1>"
        + "".join(_sections(report))
        + "</body></html>\n"
    )


def _sections(report: ModelReport) -> Iterator[str]:
    yield _facts(report)
    timed = [layer for layer in report.layers if layer.microseconds is not None]
    if timed:
        yield _chart("Time, µs", timed, [layer.microseconds or 0.0 for layer in timed], "{:.1f}")
    judged = [layer for layer in report.layers if layer.sqnr_db is not None]
    if judged:
        values = [layer.sqnr_db or 0.0 for layer in judged]
        low = [value < LOW_SQNR for value in values]
        yield _chart("Signal to quantization noise, dB", judged, values, "{:.1f}", low)
    clipped = [layer for layer in report.layers if layer.saturation]
    if clipped:
        shares = [100 * (layer.saturation or 0.0) for layer in clipped]
        high = [share > 100 * HIGH_SATURATION for share in shares]
        yield _chart("Saturated values, %", clipped, shares, "{:.2f}", high)
    yield _table(report.layers)
    for heading, text in report.notes:
        yield f"<h2>{html.escape(heading)}</h2><pre>{html.escape(text)}</pre>"


def _facts(report: ModelReport) -> str:
    rows = "".join(
        f"<dt>{html.escape(name)}</dt><dd>{html.escape(value)}</dd>"
        for name, value in report.facts.items()
    )
    return f"<dl>{rows}</dl>"


def _chart(
    heading: str,
    layers: Sequence[LayerFacts],
    values: Sequence[float],
    form: str,
    marked: Sequence[bool] | None = None,
) -> str:
    classes = ["warn" if mark else "bar" for mark in marked] if marked else None
    labels = [layer.layer for layer in layers]
    drawn = bars(labels, values, [form.format(value) for value in values], classes)
    return f"<h2>{html.escape(heading)}</h2>{drawn}"


_COLUMNS = ("layer", "op", "kernel", "rule", "µs", "SQNR dB", "low", "high", "saturated")
_NUMBERS = frozenset(_COLUMNS[4:])


def _table(layers: Sequence[LayerFacts]) -> str:
    head = "".join(f"<th{_align(name)}>{html.escape(name)}</th>" for name in _COLUMNS)
    body = "".join(map(_row, layers))
    return f"<h2>Layers</h2><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _row(layer: LayerFacts) -> str:
    cells = dict(zip(_COLUMNS, layer.cells(), strict=True))
    marked = {
        "SQNR dB": layer.sqnr_db is not None and layer.sqnr_db < LOW_SQNR,
        "saturated": (layer.saturation or 0.0) > HIGH_SATURATION,
    }
    inner = "".join(
        f"<td{_align(name, marked.get(name, False))}>{html.escape(text)}</td>"
        for name, text in cells.items()
    )
    title = html.escape(layer.reason)
    return f'<tr{" class=float" if layer.in_float else ""} title="{title}">{inner}</tr>'


def _align(name: str, marked: bool = False) -> str:
    classes = [*(["n"] if name in _NUMBERS else []), *(["warn"] if marked else [])]
    return f' class="{" ".join(classes)}"' if classes else ""
