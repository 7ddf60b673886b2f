"""Tables, targets and the plot of a set of results."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
import os
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.peers import IGNORE_ISA, OURS, STOCK_ENGINES
from benchmarks.peers.results import NetworkResult, Settings
from x86quant.files import write_aside

# SQNRs are averages over a few images; they agree to this many dB.
SQNR_TOLERANCE = 0.1


@dataclasses.dataclass(frozen=True)
class Target:
    """One aim and what came of it; ``met`` is None where nothing could be judged."""

    aim: str
    found: str
    met: bool | None

    def __str__(self) -> str:
        verdict = {True: "met", False: "MISSED", None: "not judged"}[self.met]
        return f"{verdict}: {self.aim}: {self.found}"


def geometric_mean(values: Sequence[float]) -> float:
    """Of at least one value."""
    return math.exp(sum(map(math.log, values)) / len(values))


def targets(results: Sequence[NetworkResult], settings: Settings) -> list[Target]:
    """What the runtime aims at, at the CPU's own level or at a lower one."""
    if settings.isa is None:
        speed = [
            _mean_target(results, "openvino", 1.3),
            _slower_target(results, "OpenVINO", ("openvino",)),
            _mean_target(results, "x86", 3.0),
        ]
    else:
        speed = [_slower_target(results, "the best stock engine", STOCK_ENGINES)]
    return [*speed, _sqnr_target(results)]


def _mean_target(results: Sequence[NetworkResult], peer: str, wanted: float) -> Target:
    aim = f"geometric mean at least {wanted:g} times the speed of {peer}"
    ratios = [ratio for r in results if (ratio := r.ratio(peer, OURS)) is not None]
    if not ratios:
        return Target(aim, "no network ran on both", None)
    mean = geometric_mean(ratios)
    return Target(aim, f"{mean:.2f} times{_coverage(results, ratios)}", mean >= wanted)


def _slower_target(results: Sequence[NetworkResult], title: str, among: Sequence[str]) -> Target:
    aim = f"no network slower than {title}"
    judged, slower = [], []
    for result in results:
        rivals = [name for name in among if result.measured(name) is not None]
        if not rivals:
            continue
        judged.append(result)
        if result.measured(OURS) is None:
            slower.append(f"{result.network} (did not run)")
            continue
        # Slower only if median and minimum agree: either alone may be noise.
        ratios = [max(_both(result, name)) for name in rivals]
        if min(ratios) < 1:
            slower.append(f"{result.network} ({min(ratios):.2f} times its speed)")
    if not judged:
        return Target(aim, "no network ran on both", None)
    found = f"slower on {', '.join(slower)}" if slower else "none"
    return Target(aim, found + _coverage(results, judged), not slower)


def _both(result: NetworkResult, peer: str) -> tuple[float, float]:
    by_median, by_minimum = (result.ratio(peer, OURS, s) for s in ("median", "minimum"))
    assert by_median is not None
    assert by_minimum is not None
    return by_median, by_minimum


def _sqnr_target(results: Sequence[NetworkResult]) -> Target:
    aim = "SQNR on no network below the stock x86 engine's"
    judged, worse = [], []
    for result in results:
        ours, stock = result.measured(OURS), result.measured("x86")
        if ours is None or stock is None or ours.sqnr is None or stock.sqnr is None:
            continue
        judged.append(result)
        if ours.sqnr < stock.sqnr - SQNR_TOLERANCE:
            worse.append(f"{result.network} ({ours.sqnr:.1f} dB against {stock.sqnr:.1f})")
    if not judged:
        return Target(aim, "no network ran on both", None)
    found = f"below on {', '.join(worse)}" if worse else "none"
    return Target(aim, found + _coverage(results, judged), not worse)


def _coverage(results: Sequence[NetworkResult], judged: Sequence[object]) -> str:
    return "" if len(judged) == len(results) else f", over {len(judged)} of {len(results)} networks"


def markdown(results: Sequence[NetworkResult], settings: Settings) -> str:
    """Everything as Markdown that also reads well in a terminal."""
    parts = [f"# Against peers: {settings.title}", *_environment(results)]
    parts += ["## Milliseconds, median (minimum)", _table(results, settings, _milliseconds)]
    parts += [
        f"## Time over {OURS}, by median (by minimum); above 1, {OURS} is faster",
        _table(results, settings, _ratios, last=_means(results, settings)),
    ]
    parts += ["## SQNR against fp32 on held-out inputs, dB", _table(results, settings, _sqnr)]
    parts += ["## Targets", "\n".join(f"- {target}" for target in targets(results, settings))]
    if notes := _notes(results, settings):
        parts += ["## Notes", "\n".join(f"- {note}" for note in notes)]
    return "\n\n".join(parts) + "\n"


def _environment(results: Sequence[NetworkResult]) -> list[str]:
    """CPU and versions, once if all networks agree on them."""
    # A date is each network's own.
    distinct = {
        tuple((k, v) for k, v in result.environment.items() if k != "date"): result
        for result in results
    }
    blocks = []
    for result in distinct.values():
        versions = dict(result.environment)
        cpu, date = versions.pop("cpu", ""), versions.pop("date", "")
        listed = ", ".join(f"{name}: {version}" for name, version in versions.items())
        blocks.append(f"{cpu}\n\n{listed} ({date[:10]})".strip())
    return blocks


def _milliseconds(result: NetworkResult, name: str) -> str:
    peer = result.measured(name)
    return f"{peer.median * 1e3:.2f} ({peer.minimum * 1e3:.2f})" if peer else _absence(result, name)


def _ratios(result: NetworkResult, name: str) -> str:
    if result.measured(name) is None or result.measured(OURS) is None:
        return _absence(result, name)
    return "{:.2f} ({:.2f})".format(*_both(result, name))


def _sqnr(result: NetworkResult, name: str) -> str:
    peer = result.measured(name)
    if peer is None:
        return _absence(result, name)
    return "" if peer.sqnr is None else f"{peer.sqnr:.1f}"


def _absence(result: NetworkResult, name: str) -> str:
    peer = result.peers.get(name)
    return "" if peer is None or peer.status == "ok" else peer.status


def _means(results: Sequence[NetworkResult], settings: Settings) -> list[str]:
    cells = ["geometric mean"]
    for name in settings.peers:
        both = [_both(r, name) for r in results if r.ratio(name, OURS) is not None]
        means = [geometric_mean(values) for values in zip(*both, strict=True)]
        cells.append("{:.2f} ({:.2f})".format(*means) if means else "")
    return cells


def _table(
    results: Sequence[NetworkResult],
    settings: Settings,
    cell: Callable[[NetworkResult, str], str],
    last: list[str] | None = None,
) -> str:
    heads = [f"{n}*" if settings.isa and n in IGNORE_ISA else n for n in settings.peers]
    rows = [["network", *heads]]
    rows += [[r.network, *(cell(r, name) for name in settings.peers)] for r in results]
    rows += [last] if last else []
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]

    def line(row: Sequence[str]) -> str:
        first, *rest = (
            text.ljust(w) if i == 0 else text.rjust(w)
            for i, (text, w) in enumerate(zip(row, widths, strict=True))
        )
        return "| " + " | ".join([first, *rest]) + " |"

    rule = "|" + "|".join("-" * (w + 1) + (":" if i else "-") for i, w in enumerate(widths)) + "|"
    return "\n".join([line(rows[0]), rule, *map(line, rows[1:])])


def _notes(results: Sequence[NetworkResult], settings: Settings) -> list[str]:
    notes = []
    if settings.isa:
        notes += [
            f"*{name} cannot be held to {settings.isa}: it uses all the CPU has"
            for name in IGNORE_ISA
            if name in settings.peers
        ]
    reasons: dict[tuple[str, str, str], list[str]] = {}
    for result in results:
        for name, peer in result.peers.items():
            if peer.status != "ok":
                key = (name, peer.status, peer.reason)
                reasons.setdefault(key, []).append(result.network)
    notes += [
        f"{name} {status} on {', '.join(networks)}: {reason}"
        for (name, status, reason), networks in reasons.items()
    ]
    return notes


def rows(results: Sequence[NetworkResult]) -> list[dict[str, object]]:
    """One row a network and peer, for the CSV file."""
    table: list[dict[str, object]] = []
    for result in results:
        for name, peer in result.peers.items():
            ran = peer.status == "ok"
            table.append(
                {
                    "network": result.network,
                    "peer": name,
                    "status": peer.status,
                    "median_ms": peer.median * 1e3 if ran else None,
                    "minimum_ms": peer.minimum * 1e3 if ran else None,
                    "ratio_median": result.ratio(name, OURS),
                    "ratio_minimum": result.ratio(name, OURS, "minimum"),
                    "sqnr_db": peer.sqnr,
                    "prepare_s": peer.prepare_seconds,
                    "reason": peer.reason,
                }
            )
    return table


def as_json(results: Sequence[NetworkResult], settings: Settings) -> str:
    """Settings, results with every timed call, and targets."""
    data = {
        "settings": dataclasses.asdict(settings),
        "networks": [json.loads(result.to_json()) for result in results],
        "targets": [dataclasses.asdict(target) for target in targets(results, settings)],
    }
    return json.dumps(data, indent=1) + "\n"


def write(results: Sequence[NetworkResult], settings: Settings, folder: Path) -> None:
    """``report.md``, ``results.csv`` and ``results.json``, each replaced as a whole."""
    write_aside(folder / "report.md", markdown(results, settings))
    write_aside(folder / "results.json", as_json(results, settings))
    text = io.StringIO()
    table = rows(results)
    writer = csv.DictWriter(text, list(table[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(table)
    write_aside(folder / "results.csv", text.getvalue())


def plot(results: Sequence[NetworkResult], settings: Settings, path: Path) -> None:
    """One line a network, one mark a peer: how many times as long as ours it takes.

    Nothing is drawn where nothing ran beside ours.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    marks = {
        name: points
        for name in settings.peers
        if name != OURS and (points := _points(results, name))
    }
    if not marks:
        return
    figure, axes = pyplot.subplots(figsize=(9, 1.6 + 0.42 * len(results)), layout="constrained")
    for (name, points), marker in zip(marks.items(), "Ds^v<>o", strict=False):
        ratios, lines = zip(*points, strict=True)
        axes.scatter(ratios, lines, marker=marker, label=name, s=45)
    axes.axvline(1, color="black", linewidth=1)
    axes.set_xscale("log")
    ticks = [t for t in (0.5, 1, 1.3, 2, 3, 5, 10, 20, 50, 100) if t <= max(axes.get_xlim())]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_yticks(range(len(results)), [result.network for result in results])
    axes.invert_yaxis()
    axes.grid(axis="x", alpha=0.3)
    axes.set_xlabel(f"median time over {OURS} (right of 1, {OURS} is faster)")
    axes.set_title(settings.title)
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        figure.savefig(temporary, format="png", dpi=130)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
        pyplot.close(figure)


def _points(results: Sequence[NetworkResult], name: str) -> list[tuple[float, int]]:
    return [
        (ratio, line)
        for line, result in enumerate(results)
        if (ratio := result.ratio(name, OURS)) is not None
    ]
