"""Bar charts as inline SVG: nothing to load, nothing to run."""

from __future__ import annotations

import html
from collections.abc import Sequence

_ROW, _BAR, _LABEL, _VALUE, _WIDTH = 18, 12, 260, 90, 900


def bars(
    labels: Sequence[str],
    values: Sequence[float],
    texts: Sequence[str],
    classes: Sequence[str] | None = None,
) -> str:
    """A horizontal bar a value, longest for the largest; ``texts`` stand behind the bars."""
    largest = max(values, default=0.0) or 1.0
    room = _WIDTH - _LABEL - _VALUE
    rows = []
    for i, (label, value, text) in enumerate(zip(labels, values, texts, strict=True)):
        y, length = i * _ROW, max(0.0, value) / largest * room
        style = html.escape(classes[i]) if classes else "bar"
        name = html.escape(_short(label))
        rows.append(
            f"<g><title>{html.escape(f'{label}: {text}')}</title>"
            f'<text x="{_LABEL - 8}" y="{y + 12}" text-anchor="end">{name}</text>'
            f'<rect class="{style}" x="{_LABEL}" y="{y + 3}" width="{length:.1f}" height="{_BAR}"/>'
            f'<text x="{_LABEL + length + 6:.1f}" y="{y + 12}">{html.escape(text)}</text></g>'
        )
    height = max(1, len(rows)) * _ROW
    return f'<svg viewBox="0 0 {_WIDTH} {height}" role="img">{"".join(rows)}</svg>'


def _short(label: str, most: int = 38) -> str:
    """The end of a long name says more than its start."""
    return label if len(label) <= most else "…" + label[1 - most :]
