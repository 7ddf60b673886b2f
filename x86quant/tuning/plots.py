"""Pictures of a fit: regret by network, and one kernel against another by shape.

Needs matplotlib: ``pip install x86quant[plots]``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from x86quant.errors import UnsupportedError
from x86quant.tuning.layer_shapes import bytes_touched
from x86quant.tuning.regret import Score
from x86quant.tuning.samples import Sample

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Bars beyond this regret are cut: one kernel that is 30 times slower would flatten the rest.
_MOST_REGRET = 1.0
_MARKERS = {"linear": "o", "conv1d": "v", "conv2d": "s", "conv3d": "^", "embedding_bag": "D"}


def draw(samples: Sequence[Sample], scores: Sequence[Score], folder: Path) -> list[Path]:
    """Write every picture into ``folder``; returns the files.

    Raises:
        UnsupportedError: matplotlib is not installed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    for caller in dict.fromkeys(score.caller for score in scores):
        figures = {f"regret_{caller}": _regret([s for s in scores if s.caller == caller])}
        some = [s for s in samples if s.case.caller == caller and s.decided]
        for one, other in itertools.combinations(sorted({k for s in some for k in s.times}), 2):
            both = [s for s in some if {one, other} <= s.times.keys()]
            if both:
                figures[f"{caller}_{one}_against_{other}"] = _against(both, one, other)
        for name, figure in figures.items():
            written.append(folder / f"{name}.png")
            figure.savefig(written[-1], dpi=120)
    return written


def _figure(width: float, height: float) -> tuple[Figure, Any]:
    try:
        # Not pyplot: nothing here is shown, and no display is needed.
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UnsupportedError(
            f"plots need matplotlib ({error}); install it: pip install matplotlib"
        ) from error
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.add_subplot()


def _regret(scores: Sequence[Score]) -> Figure:
    """Bars: what each network loses, table by table."""
    networks = sorted({net for score in scores for net in score.networks})
    figure, axes = _figure(max(6.0, 0.5 * len(networks) + 3), 5)
    width = 0.8 / len(scores)
    for number, score in enumerate(scores):
        heights = [min(score.networks.get(net, 0.0), _MOST_REGRET) for net in networks]
        places = [place + number * width for place in range(len(networks))]
        axes.bar(places, heights, width, label=score.table)
    middle = [place + 0.4 - width / 2 for place in range(len(networks))]
    axes.set_xticks(middle, [net or "(none)" for net in networks], rotation=60, ha="right")
    axes.set_ylabel(f"time lost over the best kernels (cut at {_MOST_REGRET:.0%})")
    axes.set_title(f"Regret by network, {scores[0].caller} operators")
    figure.legend(fontsize="small", loc="outside lower center", ncols=len(scores))
    return figure


def _against(samples: Sequence[Sample], one: str, other: str) -> Figure:
    """Points: how many times faster ``one`` is, over the work of the op."""
    figure, axes = _figure(8, 5)
    for op, marker in _MARKERS.items():
        some = [s for s in samples if s.spec.op == op]
        if some:
            work = [s.case.spec.multiply_adds or bytes_touched(s.case.spec) for s in some]
            ratio = [s.times[other] / s.times[one] for s in some]
            colour = [math.log2(s.spec.groups) for s in some]
            points = axes.scatter(
                work, ratio, s=14, c=colour, marker=marker, label=op, alpha=0.7, vmin=0, vmax=10
            )
    figure.colorbar(points, label="log2(groups)")
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("multiply-adds; of lookups, bytes")
    axes.set_ylabel(f"time of {other} / time of {one}")
    axes.set_title(f"{one} against {other}: above the line {one} is faster")
    axes.legend(fontsize="small")
    return figure
