"""All that a folder of results gets; the page: the answer, a chart for each model, then details."""

from __future__ import annotations

import html
import importlib.util
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from x86quant.bench.results import OURS, RESULTS_FILE, BenchResults, ModelRun
from x86quant.bench.summary_text import (
    HEADS,
    as_csv,
    cells,
    digits,
    headlines,
    markdown,
    notes,
    speed_of,
    title_of,
)
from x86quant.files import write_aside
from x86quant.reporting.document import Bar, bars, definitions, document, head_row


def write_pages(results: BenchResults, folder: Path) -> None:
    """``results.json``, ``.csv``, ``report.html``, ``.md``, ``plot.png``: each as a whole."""
    write_aside(folder / RESULTS_FILE, results.to_json())
    write_aside(folder / "report.html", results_page(results))
    write_aside(folder / "report.md", markdown(results))
    write_aside(folder / "results.csv", as_csv(results))
    if (drawn := plot_png(results)) is not None:
        write_aside(folder / "plot.png", drawn)


_TITLE = "x86quant bench"
_NUMBERS = frozenset(HEADS[1:])


def results_page(results: BenchResults) -> str:
    """The whole file."""
    return document(_TITLE, _parts(results))


def _parts(results: BenchResults) -> Iterator[str]:
    cpu, date = (results.environment.get(name, "") for name in ("cpu", "date"))
    yield f"<h1>{_TITLE}: int8 inference on a CPU</h1>"
    yield f'<p class="soft">{html.escape(cpu)} · {html.escape(date[:10])}</p>'
    if told := headlines(results):
        items = "".join(f"<li>{_bold(text)}</li>" for text in told)
        yield f'<ul class="summary">{items}</ul>'
    if sum(not run.error for run in results.runs) > 1:
        yield _overview(results)
    yield from map(_run, results.runs)
    yield _reading(results)
    yield f"<h2>How it was measured</h2>{definitions(results.environment.items())}"


def _bold(sentence: str) -> str:
    """The figure in it stands out."""
    who, is_, rest = sentence.partition(" is ")
    figure, as_fast, whom = rest.partition(" as fast as ")
    if not as_fast:
        return html.escape(sentence)
    return f"{html.escape(who + is_)}<b>{html.escape(figure)}</b>{html.escape(as_fast + whom)}"


def _overview(results: BenchResults) -> str:
    means = {name: mean for name in results.backends if (mean := results.mean_ratio(name))}
    if len(means) < 2:
        return ""
    drawn = [
        Bar(
            title_of(name),
            mean,
            "1" if name == OURS else f"{digits(mean)} times",
            "ours" if name == OURS else "",
            f"{title_of(name)}\ngeometric mean of {count} measurements",
        )
        for name, (mean, count) in sorted(means.items(), key=lambda item: item[1])
    ]
    return (
        f"<section><h2>All together: time relative to {OURS}</h2>"
        f'<p class="soft">Shorter is faster. Geometric means.</p>{bars(drawn, mark=1.0)}</section>'
    )


def _run(run: ModelRun) -> str:
    head = f"<section><h2>{html.escape(run.model)}</h2>" + (
        f'<p class="soft">{html.escape(str(run.setting))} · input {html.escape(run.inputs)}</p>'
    )
    if run.error:
        return f'{head}<p class="poor">Not measured: {html.escape(run.error)}</p></section>'
    names = run.fastest_first()
    ours = run.measured(OURS)
    chart = bars([_bar(run, name) for name in names], ours.median if ours else None)
    many = " while all instances run; behind it, samples a second of all"
    caption = (
        f"Time of a call{many if run.setting.instances > 1 else ''}: shorter is faster. "
        "With ×: how many times ours."
    )
    left_out = "".join(f"<li>{html.escape(note)}</li>" for note in notes(run))
    return (
        f'{head}{chart}<p class="soft">{caption if names else "Nothing ran."}</p>'
        f"{_details(run, names)}<ul class=soft>{left_out}</ul></section>"
    )


def _bar(run: ModelRun, name: str) -> Bar:
    result, ratio = run.results[name], run.ratio(name)
    value = speed_of(run, name)
    if ratio is not None and name != OURS:
        value += f" · {digits(ratio)}×"
    told = [
        f"{title_of(name)}{f' ({result.method})' if result.method else ''}",
        f"median {digits(result.median * 1e3)} ms, least {digits(result.minimum * 1e3)} ms",
        f"{digits(run.throughput(name) or 0.0)} samples a second",
    ]
    if result.sqnr_db is not None:
        told.append(f"{result.sqnr_db:.1f} dB signal to noise against float")
    if result.cold_start_seconds is not None:
        told.append(f"first answer after {result.cold_start_seconds:.2f} s")
    if result.peak_bytes is not None:
        told.append(f"{result.peak_bytes / 1e6:.0f} MB at most")
    kind = "ours" if name == OURS else ""
    return Bar(title_of(name), result.median, value, kind, "\n".join(told))


def _details(run: ModelRun, names: Sequence[str]) -> str:
    if not names:
        return ""
    rows = "".join(_row(cells(run, name)) for name in names)
    return (
        f'<details><summary>All figures</summary><div class="wide"><table>'
        f"{head_row(HEADS, _NUMBERS)}<tbody>{rows}</tbody></table></div></details>"
    )


def _row(texts: Sequence[str]) -> str:
    first, *rest = map(html.escape, texts)
    numbers = "".join(
        f'<td class="n" data-value="{text.partition(" ")[0]}">{text}</td>' for text in rest
    )
    return f"<tr><td>{first}</td>{numbers}</tr>"


def _reading(results: BenchResults) -> str:
    return f"""<h2>How to read it</h2><ul>
<li>Back ends take turns in one process, {results.rounds} rounds, so all of them meet the same
moments of the machine. Times are medians; the least time is in the tables.</li>
<li>SQNR is the signal over the noise that a back end adds to the float model's result, in
decibels: 20 dB are one part in ten, 40 dB one in a hundred.</li>
<li>Start: seconds from an empty Python process to the first answer. MB: the most memory that
process used, libraries included.</li></ul>"""


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
