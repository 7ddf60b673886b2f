"""Results as Markdown that also reads well in a terminal, and as a table for other programs."""

from __future__ import annotations

import collections
import csv
import dataclasses
import io
import json
from collections.abc import Iterator, Sequence

from x86quant.bench.backends import IGNORE_ISA, backend
from x86quant.bench.comparison import SpeedVerdict
from x86quant.bench.results import OURS, BenchResults, ModelRun
from x86quant.terminal.text_table import text_table

#: A median above so many times the least time was disturbed.
_QUIET = 1.5
#: The columns of ``cells``.
HEADS = ("back end", "ms (least)", "a second", f"× {OURS}", "SQNR dB", "start s", "MB")


def title_of(name: str) -> str:
    """A back end's name for people; the name itself for one of another version."""
    try:
        return backend(name).title
    except KeyError:
        return name


def markdown(results: BenchResults) -> str:
    """Everything, the answer first."""
    parts = [*headlines(results), *(f"{name}: {value}" for name, value in _about(results))]
    for run in results.runs:
        parts += [f"## {run.model}: {run.setting}", f"{run.inputs}; weights: {run.weights}"]
        parts += [run.error and f"FAILED: {run.error}"] if run.error else [_run_table(run)]
        parts += ["\n".join(f"- {note}" for note in notes(run))]
    return "\n\n".join(part for part in parts if part) + "\n"


def headlines(results: BenchResults) -> list[str]:
    """How ours compares with the fastest other one, with stock int8 and with fp32: a line each."""
    means = {name: results.mean_ratio(name) for name in results.backends if name != OURS}
    found = sorted((mean, name) for name, mean in means.items() if mean is not None)
    told = [pair for i, pair in enumerate(found) if i == 0 or pair[1] in ("x86", "fp32")]
    return [f"{_compared(mean, title_of(name))}{_over(count)}" for (mean, count), name in told]


def _compared(ratio: float, title: str) -> str:
    """The faster one is told first."""
    if 0.98 <= ratio <= 1.02:
        return f"{OURS} is as fast as {title}"
    if ratio > 1:
        return f"{OURS} is {ratio:.2f} times as fast as {title}"
    return f"{title} is {1 / ratio:.2f} times as fast as {OURS}"


def _over(count: int) -> str:
    return "" if count == 1 else f" (geometric mean of {count} measurements)"


def digits(value: float) -> str:
    """Three digits that count."""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def speed_of(run: ModelRun, name: str) -> str:
    """What counts: the time of a call, or what several instances do together."""
    if run.setting.instances > 1:
        return f"{digits(run.throughput(name) or 0.0)}/s"
    return f"{digits(run.results[name].median * 1e3)} ms"


def _about(results: BenchResults) -> Iterator[tuple[str, str]]:
    wanted = ("cpu", "date", "command")
    yield from ((name, results.environment[name]) for name in wanted if name in results.environment)
    versions = dict.fromkeys(
        value for name, value in results.environment.items() if name.startswith("version of")
    )
    yield "versions", "; ".join(versions)


def _run_table(run: ModelRun) -> str:
    rows = [list(HEADS), *(cells(run, name) for name in run.fastest_first())]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]

    def line(row: Sequence[str]) -> str:
        first, *rest = zip(row, widths, strict=True)
        return "| " + " | ".join([first[0].ljust(first[1]), *(t.rjust(w) for t, w in rest)]) + " |"

    rule = "|" + "|".join("-" * (w + 1) + (":" if i else "-") for i, w in enumerate(widths)) + "|"
    return "\n".join([line(rows[0]), rule, *map(line, rows[1:])])


def cells(run: ModelRun, name: str) -> list[str]:
    """Title, times, throughput, ratio, SQNR, cold start, memory of a back end that ran."""
    result, ratio = run.results[name], run.ratio(name)
    starred = f"{title_of(name)}*" if run.setting.isa and name in IGNORE_ISA else title_of(name)
    return [
        starred,
        f"{result.median * 1e3:.2f} ({result.minimum * 1e3:.2f})",
        digits(run.throughput(name) or 0.0),
        "" if ratio is None else f"{ratio:.2f}",
        "" if result.sqnr_db is None else f"{result.sqnr_db:.1f}",
        "" if result.cold_start_seconds is None else f"{result.cold_start_seconds:.2f}",
        "" if result.peak_bytes is None else f"{result.peak_bytes / 1e6:.0f}",
    ]


def notes(run: ModelRun) -> list[str]:
    """Who is missing, and why; and whether the machine was quiet."""
    timed = [run.results[name] for name in run.fastest_first()]
    spread = max((result.median / result.minimum for result in timed), default=1.0)
    found = []
    if spread > _QUIET:
        told = f"medians are up to {spread:.1f} times the least times"
        found.append(f"The machine was not quiet: {told}")
    found += [
        f"{title_of(name)} {result.status}: {result.reason}"
        for name, result in run.results.items()
        if result.status != "ok"
    ]
    found += [
        f"{title_of(name)}: no cold start and memory: {result.alone_reason}"
        for name, result in run.results.items()
        if result.status == "ok" and result.alone_reason
    ]
    if run.setting.isa:
        found += [
            f"*{title_of(name)} cannot be held to {run.setting.isa}: it uses all the CPU has"
            for name in IGNORE_ISA
            if name in run.results
        ]
    return found


def as_csv(results: BenchResults) -> str:
    """One row a model, setting and back end."""
    rows = [
        {
            "model": run.model,
            "batch": run.setting.batch,
            "threads": run.setting.threads,
            "instances": run.setting.instances,
            "backend": name,
            "status": result.status,
            "median_ms": result.median * 1e3 if result.seconds else None,
            "minimum_ms": result.minimum * 1e3 if result.seconds else None,
            "samples_per_second": run.throughput(name),
            "ratio_median": run.ratio(name),
            "ratio_minimum": run.ratio(name, statistic="minimum"),
            "sqnr_db": result.sqnr_db,
            "prepare_s": result.prepare_seconds,
            "cold_start_s": result.cold_start_seconds,
            "peak_bytes": result.peak_bytes,
            "reason": result.reason or run.error,
        }
        for run in results.runs
        for name, result in run.results.items()
    ]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def as_text(verdicts: Sequence[SpeedVerdict], changes: Sequence[str]) -> str:
    """Counts, a table, and what else changed."""
    counts = collections.Counter(verdict.outcome for verdict in verdicts)
    header = ("model", "setting", "back end", "verdict")
    rows = [(v.model, str(v.setting), title_of(v.backend), str(v)) for v in verdicts]
    parts = [
        ", ".join(f"{number} {outcome}" for outcome, number in counts.items()),
        text_table(header, rows),
        "\n".join(["changed besides:", *changes]) if changes else "",
    ]
    return "\n\n".join(part for part in parts if part)


def as_json(verdicts: Sequence[SpeedVerdict], changes: Sequence[str]) -> str:
    """The same as data."""
    data = [{**dataclasses.asdict(verdict), "text": str(verdict)} for verdict in verdicts]
    return json.dumps({"verdicts": data, "changed": list(changes)}, indent=1)
