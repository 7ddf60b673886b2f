"""Whole int8 networks: x86quant's runtime against every other way to run them on a CPU.

    pip install --no-build-isolation -e '.[benchmarks]'
    python -m benchmarks.against_peers --out results             # batch 1, one thread
    python -m benchmarks.against_peers --out results2 --batch 8 --threads 2
    python -m benchmarks.against_peers --out results3 --isa avx2 # as on a lesser CPU

This is ``x86quant bench`` on ten networks of torchvision, and whether what x86quant aims at was
met. Weights are random, batch norms settled on noise with the spectrum of photographs: good for
speed, and for the noise that int8 adds (SQNR), not for accuracy on real images.

All peers get the same contiguous NCHW float tensor and --threads threads. With more than one,
each turn first waits for the threads of the one before to go idle, since thread pools spin for a
while after their work and would take each other's cores.

Progress goes to stderr, the report to stdout; ``--out`` gets report.html, report.md, results.json,
results.csv and plot.png, brought up to date after each network. Interrupted, the same command goes
on.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.networks import NETWORKS
from x86quant.bench.backends import BACKENDS
from x86quant.bench.campaign import Measure, check_folder, measure_apart, run_campaign
from x86quant.bench.one_model import BenchRequest
from x86quant.bench.results import (
    OURS,
    RESULTS_FILE,
    BenchResults,
    ModelRun,
    RunSetting,
    geometric_mean,
)
from x86quant.bench.summary_page import write_pages
from x86quant.bench.summary_text import markdown, title_of
from x86quant.errors import X86QuantError
from x86quant.given_model import InputShape
from x86quant.hardware import isa

STOCK_ENGINES = ("x86", "fbgemm", "onednn")
PEERS = (OURS, "openvino", "onnxruntime", "pt2e", *STOCK_ENGINES, "fp32")
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


def targets(runs: Sequence[ModelRun], level: str | None = None) -> list[Target]:
    """What the runtime aims at, at the CPU's own level or at a lower one."""
    if level is None:
        speed = [
            _mean_target(runs, "openvino", 1.3),
            _slower_target(runs, title_of("openvino"), ("openvino",)),
            _mean_target(runs, "x86", 3.0),
        ]
    else:
        speed = [_slower_target(runs, "the best stock engine", STOCK_ENGINES)]
    return [*speed, _sqnr_target(runs)]


def _mean_target(runs: Sequence[ModelRun], peer: str, wanted: float) -> Target:
    aim = f"geometric mean at least {wanted:g} times the speed of {title_of(peer)}"
    ratios = [ratio for run in runs if (ratio := run.ratio(peer)) is not None]
    if not ratios:
        return Target(aim, "no network ran on both", None)
    mean = geometric_mean(ratios)
    return Target(aim, f"{mean:.2f} times{_coverage(runs, ratios)}", mean >= wanted)


def _slower_target(runs: Sequence[ModelRun], title: str, among: Sequence[str]) -> Target:
    aim = f"no network slower than {title}"
    judged, slower = [], []
    for run in runs:
        rivals = [name for name in among if run.measured(name) is not None]
        if not rivals:
            continue
        judged.append(run)
        if run.measured(OURS) is None:
            slower.append(f"{run.model} (did not run)")
            continue
        # Slower only if median and minimum agree: either alone may be noise.
        ratios = [
            max(run.ratio(name, OURS, s) or 0.0 for s in ("median", "minimum")) for name in rivals
        ]
        if min(ratios) < 1:
            slower.append(f"{run.model} ({min(ratios):.2f} times its speed)")
    if not judged:
        return Target(aim, "no network ran on both", None)
    found = f"slower on {', '.join(slower)}" if slower else "none"
    return Target(aim, found + _coverage(runs, judged), not slower)


def _sqnr_target(runs: Sequence[ModelRun]) -> Target:
    aim = "SQNR on no network below the stock x86 engine's"
    judged, worse = [], []
    for run in runs:
        ours, stock = run.measured(OURS), run.measured("x86")
        if ours is None or stock is None or ours.sqnr_db is None or stock.sqnr_db is None:
            continue
        judged.append(run)
        if ours.sqnr_db < stock.sqnr_db - SQNR_TOLERANCE:
            worse.append(f"{run.model} ({ours.sqnr_db:.1f} dB against {stock.sqnr_db:.1f})")
    if not judged:
        return Target(aim, "no network ran on both", None)
    found = f"below on {', '.join(worse)}" if worse else "none"
    return Target(aim, found + _coverage(runs, judged), not worse)


def _coverage(runs: Sequence[ModelRun], judged: Sequence[object]) -> str:
    return "" if len(judged) == len(runs) else f", over {len(judged)} of {len(runs)} networks"


def run(
    requests: Sequence[BenchRequest], measure: Measure, out: Path, *, fresh: bool, as_json: bool
) -> int:
    """Measure what is not there yet, and judge; returns the exit status."""
    check_folder(out)
    if fresh:
        (out / RESULTS_FILE).unlink(missing_ok=True)
    done = functools.partial(write_pages, folder=out)
    results = run_campaign(requests, measure, folder=out, resume=True, done=done)
    asked = [(request.name, request.setting) for request in requests]
    runs = [run for run in results.runs if (run.model, run.setting) in asked]
    chosen = dataclasses.replace(results, runs=tuple(runs))
    judged = targets(runs, requests[0].setting.isa)
    print(_json(chosen, judged) if as_json else _text(chosen, judged))
    done(results)
    return int(any(run.measured(OURS) is None for run in runs))


def _text(results: BenchResults, judged: Sequence[Target]) -> str:
    return f"{markdown(results)}\n## Targets\n\n" + "\n".join(f"- {target}" for target in judged)


def _json(results: BenchResults, judged: Sequence[Target]) -> str:
    told = [dataclasses.asdict(target) for target in judged]
    return json.dumps({**json.loads(results.to_json()), "targets": told}, indent=1)


def parser_of(module: str, text: str | None) -> argparse.ArgumentParser:
    """The parser of ``python -m module``, whose help is the module's ``text``."""
    summary, _, details = (text or "").partition("\n\n")
    return argparse.ArgumentParser(
        prog=f"python -m {module}",
        description=summary,
        epilog=details,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Command line."""
    parser = parser_of("benchmarks.against_peers", __doc__)
    parser.add_argument(
        "--models", nargs="+", default=NETWORKS, metavar="NAME", help="torchvision networks"
    )
    parser.add_argument(
        "--peers",
        nargs="+",
        default=PEERS,
        choices=BACKENDS,
        metavar="PEER",
        help="whom to measure; ours always",
    )
    parser.add_argument("--batch", type=_positive, default=1)
    parser.add_argument("--threads", type=_positive, default=1)
    parser.add_argument("--rounds", type=_positive, default=30)
    parser.add_argument("--size", type=_positive, default=224, help="height and width of images")
    parser.add_argument("--isa", choices=isa.LEVELS, help="hold all peers that obey to this level")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--fresh", action="store_true", help="forget the results in --out")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument(
        "--prepare-seconds",
        type=_positive,
        default=900,
        metavar="S",
        help="give a peer up that takes longer to quantize and compile a network (900)",
    )
    return parser.parse_args(arguments)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return number


def main() -> int:
    """Run the command line; returns the exit status."""
    options = parse()
    peers = tuple(name for name in BACKENDS if name in options.peers or name == OURS)
    setting = RunSetting(options.batch, options.threads, isa=options.isa)
    picture = InputShape((options.batch, 3, options.size, options.size))
    requests = [
        BenchRequest(name, (picture,), setting, options.rounds, peers, alone=False)
        for name in options.models
    ]
    measure = functools.partial(measure_apart, longest=options.prepare_seconds)
    try:
        return run(requests, measure, options.out, fresh=options.fresh, as_json=options.json)
    except X86QuantError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nstopped; the same command goes on from here", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
