"""Bar charts of plain HTML: they bend to the width of the screen, and details show on hover."""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Sequence


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
