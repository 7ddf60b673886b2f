"""The part of a page about the float model beside the int8 one."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence

from x86quant.reporting.beside_float import BesideFloat, NoiseShare, ShownSample
from x86quant.reporting.charts import Bar, bars

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
