"""Two checkouts of x86quant against each other: whether a change made networks slower or faster.

    git worktree add ../before <commit>          # then install it in ../before/.venv
    python -m benchmarks.before_after --before ../before
    python -m benchmarks.before_after --before ../before --networks resnet50 --batch 8 --threads 2

Each checkout compiles the same networks in a process of its own. The processes take turns, so that
both meet the same moments of the machine; the one that waits has no thread that runs. Printed are
the medians and minima of both, and before over after: above 1, the change made it faster.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import warnings
from pathlib import Path

#: Seconds of one turn, and the fewest calls in it.
TURN_SECONDS = 0.15
LEAST_CALLS = 5


class Checkout:
    """A process that runs networks with the x86quant of one checkout."""

    def __init__(self, folder: Path, batch: int, threads: int) -> None:
        python = folder / ".venv" / "bin" / "python"
        if not python.exists():
            raise SystemExit(f"{folder}: no .venv/bin/python; install x86quant there first")
        self._process = subprocess.Popen(
            [
                str(python.absolute()),
                str(Path(__file__).resolve()),
                "--worker",
                *("--batch", str(batch), "--threads", str(threads)),
            ],
            cwd=folder,
            env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, **request: object) -> list[float]:
        """The answer to one request; the other checkout waits meanwhile."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("{"):
                return list(json.loads(line)["seconds"])
        raise SystemExit(f"the process of {self._process.args!r} ended; see its message above")


def work(batch: int, threads: int) -> None:
    """Answer requests: make a network, or time some calls of it."""
    # By its file: this runs with the x86quant of another checkout, and with its working folder.
    from networks import torchvision_model  # type: ignore[import-not-found]

    warnings.simplefilter("ignore")
    import torch
    from torch.ao.quantization.quantize_fx import convert_to_reference_fx, prepare_fx

    import x86quant

    torch.set_num_threads(threads)
    x = torch.randn(batch, 3, 224, 224)
    compiled = None
    for line in sys.stdin:
        request = json.loads(line)
        seconds: list[float] = []
        with torch.no_grad():
            if "network" in request:
                config = x86quant.get_backend_config()
                model = torchvision_model(request["network"])
                mapping = x86quant.get_default_qconfig_mapping()
                prepared = prepare_fx(model, mapping, (x,), backend_config=config)
                prepared(torch.randn(1, 3, 224, 224))
                converted = convert_to_reference_fx(prepared, backend_config=config)
                compiled = x86quant.compile(converted, (x,))
                for _ in range(LEAST_CALLS):
                    compiled(x)
            else:
                seconds = turn(compiled, x)
        print(json.dumps({"seconds": seconds}), flush=True)


def turn(model: object, x: object) -> list[float]:
    """Seconds of each call, after one that is not counted."""
    from time import perf_counter

    assert callable(model)
    model(x)
    seconds: list[float] = []
    while len(seconds) < LEAST_CALLS or sum(seconds) < TURN_SECONDS:
        start = perf_counter()
        model(x)
        seconds.append(perf_counter() - start)
    return seconds


def compare(before: Checkout, after: Checkout, network: str, rounds: int) -> tuple[float, float]:
    """Print one row; returns before over after, by median and by minimum."""
    sides = {"before": before, "after": after}
    times: dict[str, list[float]] = {name: [] for name in sides}
    for side in sides.values():
        side.ask(network=network)
    for number in range(rounds):
        order = list(sides) if number % 2 else list(reversed(sides))
        for name in order:
            times[name] += sides[name].ask()
    median = {name: statistics.median(values) * 1e3 for name, values in times.items()}
    least = {name: min(values) * 1e3 for name, values in times.items()}
    ratios = median["before"] / median["after"], least["before"] / least["after"]
    print(
        f"{network:20} {median['before']:9.3f} {median['after']:9.3f} {ratios[0]:7.3f}"
        f" {least['before']:9.3f} {least['after']:9.3f} {ratios[1]:7.3f}",
        flush=True,
    )
    return ratios


def main() -> None:
    """Compare and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--before", type=Path, help="the other checkout, with a .venv in it")
    parser.add_argument("--networks", nargs="+", metavar="NAME")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.batch, options.threads)
        return
    if options.before is None:
        parser.error("--before names the checkout to compare with")
    from benchmarks.environment import print_environment
    from benchmarks.networks import NETWORKS

    print_environment()
    print(f"batch {options.batch}, {options.threads} thread(s), {options.rounds} rounds in turn\n")
    print(f"{'':20} {'median, ms':^19} {'before/':>7} {'minimum, ms':^19} {'before/':>7}")
    names = f"{'before':>9} {'after':>9} {'after':>7}"
    print(f"{'network':20} {names} {names}")
    before = Checkout(options.before, options.batch, options.threads)
    after = Checkout(Path.cwd(), options.batch, options.threads)
    ratios = [compare(before, after, name, options.rounds) for name in options.networks or NETWORKS]
    means = [statistics.geometric_mean(column) for column in zip(*ratios, strict=True)]
    print(f"{'geometric mean':20} {'':19} {means[0]:7.3f} {'':19} {means[1]:7.3f}")


if __name__ == "__main__":
    main()
