"""The frame of every page, and bar charts: HTML that fetches nothing, on any width."""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Iterable, Sequence

_STYLE = """
:root { color-scheme: light dark; --text: #1c2330; --soft: #5c6675; --paper: #fff; --card: #f5f7fa;
  --line: #dfe4ea; --accent: #2563c9; --other: #a9b4c2; --warn: #b94a10; }
@media (prefers-color-scheme: dark) { :root { --text: #e6e9ee; --soft: #a0a9b6; --paper: #14171c;
  --card: #1d2229; --line: #333b46; --accent: #6aa3ff; --other: #5b6675; --warn: #ff9b62; } }
* { box-sizing: border-box; }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--text); background: var(--paper);
  margin: 0 auto; max-width: 1000px; padding: 1.5rem 1rem 3rem; }
h1 { font-size: 1.5rem; margin: 0 0 .3rem; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; overflow-wrap: anywhere; }
p { margin: .4rem 0; } .soft { color: var(--soft); } .lead { font-size: 1.2rem; margin: 1rem 0; }
ul.summary { font-size: 1.02rem; padding-left: 1.2rem; } ul.summary b { color: var(--accent); }
section { background: var(--card); border: 1px solid var(--line); border-radius: 8px;
  padding: .2rem 1rem 1rem; margin: 1rem 0; } section h2 { margin-top: .8rem; }
.chart { margin: .6rem 0; }
.row { display: grid; grid-template-columns: minmax(7rem, 15rem) 1fr 9.5rem; gap: .1rem .7rem;
  align-items: center; padding: .16rem 0; position: relative; }
.wordy .row { grid-template-columns: minmax(7rem, 15rem) 1fr 14rem; }
.name { overflow: hidden; text-overflow: ellipsis; white-space: nowrap; }
.track { position: relative; height: 1.05rem; }
.fill { display: block; height: 100%; min-width: 2px; border-radius: 3px;
  background: var(--other); }
.ours .fill { background: var(--accent); } .ours .name { font-weight: 600; }
.good .fill { background: var(--accent); } .poor .fill { background: var(--warn); }
.marked .track::after { content: ""; position: absolute; left: var(--mark); top: -.25rem;
  bottom: -.25rem; border-left: 2px dashed var(--accent); }
.value { white-space: nowrap; font-variant-numeric: tabular-nums; }
.tip { display: none; position: absolute; z-index: 2; right: 0; top: 100%; max-width: 30rem;
  white-space: pre-line; background: var(--text); color: var(--paper); padding: .4rem .7rem;
  border-radius: 6px; font-size: .85rem; }
.row:hover .tip, .row:focus .tip { display: block; }
.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(14rem, 1fr)); gap: 1rem; }
.card p { overflow-wrap: anywhere; font-size: .85rem; }
.pictures { display: flex; flex-wrap: wrap; gap: .5rem; } figure { margin: .4rem 0; }
figure img { display: block; min-width: 6rem; max-width: 100%; image-rendering: pixelated; }
figcaption { color: var(--soft); font-size: .8rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .85rem; }
th, td { text-align: left; padding: .25rem .5rem; border-bottom: 1px solid var(--line); }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
th[data-sort] { cursor: pointer; white-space: nowrap; } th[data-sort]::after { content: " ↕";
  color: var(--soft); } th[aria-sort=ascending]::after { content: " ↑"; }
th[aria-sort=descending]::after { content: " ↓"; }
td.warn { color: var(--warn); font-weight: 600; } tr.float td { font-style: italic; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1.2rem; }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
summary { cursor: pointer; color: var(--soft); margin-top: .5rem; }
pre { overflow-x: auto; font-size: .85rem; white-space: pre-wrap; overflow-wrap: anywhere; }
@media (max-width: 600px) { .row { grid-template-columns: 1fr 9rem; }
  .row .value { text-align: right; } .wordy .row { grid-template-columns: 1fr 12.5rem; }
  .name { grid-column: 1 / -1; white-space: normal; } dl { grid-template-columns: 1fr; }
  dt { margin-top: .4rem; } section { padding: .2rem .7rem .8rem; } }
"""

# A click on a heading sorts by its column: numbers by size, from the largest down first.
_SORTING = """
for (const head of document.querySelectorAll("th[data-sort]")) {
  head.tabIndex = 0;
  const sort = () => {
    const body = head.closest("table").tBodies[0], column = head.cellIndex;
    const numbers = head.dataset.sort === "number";
    const now = head.getAttribute("aria-sort") ?? (numbers ? "ascending" : "descending");
    const sign = now === "ascending" ? -1 : 1;
    const key = (row) => row.cells[column].dataset.value ?? row.cells[column].textContent;
    const order = numbers
      ? (a, b) => (key(a) === "") - (key(b) === "") || sign * (key(a) - key(b))
      : (a, b) => sign * key(a).localeCompare(key(b), undefined, {numeric: true});
    body.append(...[...body.rows].sort(order));
    for (const other of head.parentNode.cells) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", sign < 0 ? "descending" : "ascending");
  };
  head.addEventListener("click", sort);
  head.addEventListener("keydown", (event) => { if (event.key === "Enter") sort(); });
}
"""


def document(title: str, parts: Iterable[str]) -> str:
    """The whole file; ``parts`` are HTML."""
    body = "".join(parts)
    script = f"<script>{_SORTING}</script>" if "data-sort" in body else ""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head>"
        f"<body>{body}{script}</body></html>\n"
    )


def definitions(facts: Iterable[tuple[str, str]]) -> str:
    """Names and values, one under the other."""
    rows = (f"<dt>{html.escape(name)}</dt><dd>{html.escape(text)}</dd>" for name, text in facts)
    return f"<dl>{''.join(rows)}</dl>"


def head_row(names: Sequence[str], numbers: Sequence[str] | frozenset[str]) -> str:
    """Headings that sort their columns."""
    cells = "".join(
        f'<th class="n" data-sort="number">{html.escape(name)}</th>'
        if name in numbers
        else f'<th data-sort="text">{html.escape(name)}</th>'
        for name in names
    )
    return f"<thead><tr>{cells}</tr></thead>"


@dataclasses.dataclass(frozen=True)
class Bar:
    """One bar.

    Attributes:
        label: before it.
        value: its length.
        text: behind it.
        kind: "ours", which stands out; "good", "poor", or nothing.
        details: lines that show when one points at it.
    """

    label: str
    value: float
    text: str
    kind: str = ""
    details: str = ""


def bars(drawn: Sequence[Bar], mark: float | None = None, *, wordy: bool = False) -> str:
    """One under the other, longest for the largest; a dashed line goes through all at ``mark``.

    What stands behind them gets more room if they are ``wordy``.
    """
    largest = max((bar.value for bar in drawn), default=0.0) or 1.0
    style = "" if mark is None else f' style="--mark:{_share(mark, largest)}"'
    rows = "".join(_row(bar, largest) for bar in drawn)
    kinds = ("" if mark is None else " marked") + (" wordy" if wordy else "")
    return f'<div class="chart{kinds}"{style}>{rows}</div>'


def _row(bar: Bar, largest: float) -> str:
    label, text = html.escape(bar.label), html.escape(bar.text)
    tip = html.escape(bar.details or f"{bar.label}: {bar.text}")
    return (
        f'<div class="row {bar.kind}" tabindex="0"><span class="name">{label}</span>'
        f'<span class="track"><span class="fill" style="width:{_share(bar.value, largest)}">'
        f'</span></span><span class="value">{text}</span><span class="tip">{tip}</span></div>'
    )


def _share(value: float, largest: float) -> str:
    return f"{max(0.0, value) / largest:.2%}"
