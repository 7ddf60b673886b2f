"""A report on a model as a page: five lines that say it all, what dominates, then every layer."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from x86quant.reporting.beside_float import BesideFloat, NoiseShare, ShownSample
from x86quant.reporting.document import Bar, bars, definitions, document, head_row

if TYPE_CHECKING:
    from x86quant.reporting.facts import LayerFacts, ModelReport

#: Below this many dB a layer is marked: its noise is within a factor of ten of its signal.
LOW_SQNR = 20.0

#: Above this share of clipped values a layer is marked.
HIGH_SATURATION = 0.01

#: Below this share clipped values are not drawn: they would read 0.00 %.
_TOLD_SATURATION = 0.00005

#: A chart shows so many bars; the table has the rest.
_MOST_BARS = 15


def page(report: ModelReport) -> str:
    """The whole document."""
    return document(report.title, _parts(report))


def _parts(report: ModelReport) -> Iterator[str]:
    yield f"<h1>{html.escape(report.title)}</h1>"
    told = [line.partition(": ") for line in report.summary()]
    lines = "".join(f"<li><b>{html.escape(a)}</b>: {html.escape(c)}</li>" for a, _, c in told)
    yield f'<ul class="summary">{lines}</ul>'
    if report.beside is not None:
        yield from beside_parts(report.beside)
    yield from _times(report.layers)
    judged = [layer for layer in report.layers if layer.sqnr_db is not None]
    yield _chart(
        "Signal to quantization noise, dB: the least precise first",
        sorted(judged, key=_sqnr),
        _sqnr,
        "{:.1f} dB",
        lambda layer: _sqnr(layer) < LOW_SQNR,
    )
    clipped = [layer for layer in report.layers if _saturated(layer) >= _TOLD_SATURATION]
    yield _chart(
        "Saturated values",
        sorted(clipped, key=_saturated, reverse=True),
        _saturated,
        "{:.2%}",
        lambda layer: _saturated(layer) > HIGH_SATURATION,
    )
    yield _table(report.layers)
    for heading, text in report.notes:
        yield f"<h2>{html.escape(heading)}</h2><pre>{html.escape(text)}</pre>"
    yield f"<h2>Facts</h2>{definitions(report.facts.items())}"


def _microseconds(layer: LayerFacts) -> float:
    return layer.microseconds or 0.0


def _sqnr(layer: LayerFacts) -> float:
    return layer.sqnr_db or 0.0


def _saturated(layer: LayerFacts) -> float:
    return layer.saturation or 0.0


def _times(layers: Sequence[LayerFacts]) -> Iterator[str]:
    """What takes the time: by kind of step, and the longest steps."""
    timed = [layer for layer in layers if layer.microseconds is not None]
    timed.sort(key=_microseconds, reverse=True)
    kinds: dict[str, list[LayerFacts]] = {}
    for layer in timed:
        kinds.setdefault(layer.op, []).append(layer)
    total = sum(map(_microseconds, timed)) or 1.0
    if len(kinds) > 1:
        sums = {kind: sum(map(_microseconds, found)) for kind, found in kinds.items()}
        drawn = [
            Bar(
                f"{kind} ({len(kinds[kind])})",
                spent,
                f"{spent:.1f} µs · {spent / total:.0%}",
                "poor" if all(layer.in_float for layer in kinds[kind]) else "good",
            )
            for kind, spent in sorted(sums.items(), key=lambda item: -item[1])[:_MOST_BARS]
        ]
        yield f"<section><h2>Time by kind of step</h2>{bars(drawn)}</section>"
    yield _chart(
        "Time: the longest first",
        timed,
        _microseconds,
        "{:.1f} µs",
        lambda layer: layer.in_float,
        "In orange what runs in float." if any(layer.in_float for layer in timed) else "",
    )


def _chart(
    heading: str,
    layers: Sequence[LayerFacts],
    value: Callable[[LayerFacts], float],
    form: str,
    poor: Callable[[LayerFacts], bool],
    caption: str = "",
) -> str:
    if not layers:
        return ""
    shown = layers[:_MOST_BARS]
    drawn = [
        Bar(
            f"{layer.layer}: {layer.op}" if layer.layer else layer.op,
            value(layer),
            form.format(value(layer)),
            "poor" if poor(layer) else "good",
            f"{layer.layer}\n{layer.op}, kernel {layer.kernel}\n{layer.reason}",
        )
        for layer in shown
    ]
    more = len(layers) - len(shown)
    told = " ".join(filter(None, [caption, f"{more} more are in the table." if more else ""]))
    note = f'<p class="soft">{told}</p>' if told else ""
    return f"<section><h2>{html.escape(heading)}</h2>{bars(drawn)}{note}</section>"


_COLUMNS = (
    "step", "layer", "op", "kernel", "rule", "µs", "float µs", "SQNR dB", "low", "high", "saturated"
)  # fmt: skip
_NUMBERS = frozenset((_COLUMNS[0], *_COLUMNS[5:]))


def _table(layers: Sequence[LayerFacts]) -> str:
    body = "".join(_row(number, layer) for number, layer in enumerate(layers, 1))
    return (
        "<h2>Layers</h2>"
        '<p class="soft">In the order they run; a heading sorts. Pointing at a row tells why it '
        "has its kernel; in italics what runs in float.</p>"
        f'<div class="wide"><table>{head_row(_COLUMNS, _NUMBERS)}<tbody>{body}</tbody>'
        "</table></div>"
    )


def _row(number: int, layer: LayerFacts) -> str:
    cells = dict(zip(_COLUMNS, (str(number), *layer.cells()), strict=True))
    values = (
        layer.microseconds, layer.float_us, layer.sqnr_db, layer.low, layer.high, layer.saturation
    )  # fmt: skip
    exact = {"step": number, **dict(zip(_COLUMNS[5:], values, strict=True))}
    marked = {
        "SQNR dB": layer.sqnr_db is not None and layer.sqnr_db < LOW_SQNR,
        "saturated": _saturated(layer) > HIGH_SATURATION,
    }
    inner = "".join(
        f"<td{_attributes(name, exact.get(name), marked.get(name, False))}>{html.escape(text)}</td>"
        for name, text in cells.items()
    )
    title = html.escape(layer.reason)
    return f'<tr{" class=float" if layer.in_float else ""} title="{title}">{inner}</tr>'


def _attributes(name: str, exact: float | None, marked: bool) -> str:
    if name not in _NUMBERS:
        return ""
    value = "" if exact is None else f"{exact:g}"
    return f' class="n{" warn" if marked else ""}" data-value="{value}"'


#: So many layers are drawn.
_MOST = 12


def beside_parts(beside: BesideFloat) -> Iterator[str]:
    """Sections of HTML: speed, outputs, who makes the noise, the samples that differ most."""
    exact, int8 = beside.float_time, beside.int8_time
    if exact is not None and int8 is not None:
        drawn = [
            Bar("int8", int8.median, f"{int8.median * 1e3:.3f} ms", "ours"),
            Bar("float", exact.median, f"{exact.median * 1e3:.3f} ms"),
        ]
        note = (
            f"Medians of {exact.rounds} rounds in turn; at best {int8.minimum * 1e3:.3f} and "
            f"{exact.minimum * 1e3:.3f} ms."
        )
        yield f'<section><h2>A call</h2>{bars(drawn)}<p class="soft">{note}</p></section>'
    if beside.outputs:
        told = "".join(
            f"<li><b>{_name(output.number, len(beside.outputs))}{output.sqnr_db:.1f} dB</b>: "
            f"{html.escape(output.told)}</li>"
            for output in beside.outputs
        )
        yield f"<section><h2>Agreement with float</h2><ul>{told}</ul></section>"
    if beside.noise:
        yield _noise(beside.noise)
    if beside.samples:
        yield _samples(beside.samples)


def _name(number: int, count: int) -> str:
    return f"output {number + 1}: " if count > 1 else ""


def _noise(noise: Sequence[NoiseShare]) -> str:
    drawn = [
        Bar(
            f"{one.layer}: {one.kind}",
            one.share,
            f"{one.share:.0%} · +{one.gain_db:.1f} dB{_cost(one)}",
            "good",
            f"{one.layer}: with it alone in float the result gains about {one.gain_db:.1f} dB",
        )
        for one in noise[:_MOST]
    ]
    return (
        f"<section><h2>Where the noise is made</h2>{bars(drawn, wordy=True)}"
        '<p class="soft">The share of each layer, int8 alone; what the result would gain '
        "with it in float (float_layers), and what that would cost.</p></section>"
    )


def _cost(one: NoiseShare) -> str:
    return "" if one.cost_us is None else f" · {one.cost_us:+.0f} µs"


def _samples(samples: Sequence[ShownSample]) -> str:
    cards = "".join(_card(sample) for sample in samples)
    return f'<section><h2>Samples that differ most</h2><div class="cards">{cards}</div></section>'


def _card(sample: ShownSample) -> str:
    drawn = "".join(
        f'<figure><img src="{url}" alt="{html.escape(what)} of sample {sample.number}">'
        f"<figcaption>{html.escape(what)}</figcaption></figure>"
        for what, url in sample.pictures
    )
    return (
        f'<div class="card"><b>sample {sample.number}: {sample.sqnr_db:.1f} dB</b>'
        f'<div class="pictures">{drawn}</div>'
        f"<p>float {html.escape(sample.exact)}</p><p>int8 {html.escape(sample.actual)}</p></div>"
    )
