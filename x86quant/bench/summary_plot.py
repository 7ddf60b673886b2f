"""The summary as one picture, drawn by matplotlib where that is installed."""

from __future__ import annotations

import importlib.util
import io
from typing import Any

from x86quant.bench.results import OURS, BenchResults, ModelRun
from x86quant.bench.summary_text import digits, headlines, speed_of, title_of

_OURS, _OTHER = "#2563c9", "#a9b4c2"


def plot_png(results: BenchResults) -> bytes | None:
    """A group of bars a run, fastest first, each with its ratio to ours; None if nothing ran.

    Without matplotlib there is no picture either: None.
    """
    runs = [run for run in results.runs if run.fastest_first()]
    if not runs or importlib.util.find_spec("matplotlib") is None:
        return None
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    heights = [len(run.fastest_first()) + 1.2 for run in runs]
    figure = Figure(figsize=(9, 1.4 + 0.26 * sum(heights)), layout="constrained")
    FigureCanvasAgg(figure)  # which it draws with, whatever back end the user prefers
    axes = figure.subplots(len(runs), 1, squeeze=False, height_ratios=heights)[:, 0]
    for run, one in zip(runs, axes, strict=True):
        _draw(run, one)
    cpu = results.environment.get("cpu", "")
    best = headlines(results)
    figure.suptitle("\n".join([*best, cpu]), fontsize=10)
    axes[-1].set_xlabel("milliseconds a call: shorter is faster", fontsize=9)
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=130)
    return file.getvalue()


def _draw(run: ModelRun, axes: Any) -> None:
    names = run.fastest_first()
    times = [run.results[name].median * 1e3 for name in names]
    colors = [_OURS if name == OURS else _OTHER for name in names]
    drawn = axes.barh(range(len(names)), times, color=colors, height=0.7)
    labels = []
    for name in names:
        ratio = run.ratio(name)
        told = "" if ratio is None or name == OURS else f"  ({digits(ratio)}×)"
        labels.append(f"{speed_of(run, name)}{told}")
    axes.bar_label(drawn, labels, padding=4, fontsize=8)
    axes.set_yticks(range(len(names)), [title_of(name) for name in names], fontsize=8)
    axes.set_xlim(0, max(times) * 1.25)
    axes.invert_yaxis()
    axes.tick_params(axis="x", labelsize=8)
    axes.set_title(f"{run.model}: {run.setting}", loc="left", fontsize=9)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
