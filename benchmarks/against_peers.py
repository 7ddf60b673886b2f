"""Whole int8 networks: x86quant's runtime against every other way to run them on a CPU.

    pip install --no-build-isolation -e '.[benchmarks]'
    python -m benchmarks.against_peers --out results             # batch 1, one thread
    python -m benchmarks.against_peers --out results2 --batch 8 --threads 2
    python -m benchmarks.against_peers --out results3 --isa avx2 # as on a lesser CPU

For each network a process of its own quantizes and compiles it with every peer from the same
calibration images, checks the results, and times the peers in turn, round after round. Progress
goes to stderr, the report to stdout; ``--out`` gets report.md, results.csv, results.json and
plot.png, brought up to date after each network. Interrupted, the same command goes on.

Weights are random, batch norms settled on noise with the spectrum of photographs: good for speed,
and for the noise that int8 adds (SQNR), not for accuracy on real images.

All peers get the same contiguous NCHW float tensor and --threads threads. With more than one,
each turn first waits for the threads of the one before to go idle, since thread pools spin for a
while after their work and would take each other's cores.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.networks import NETWORKS
from benchmarks.peers import OURS, PEERS, report
from benchmarks.peers.results import NetworkResult, Settings, SettingsDifferError, Store
from benchmarks.peers.worker import STAGE_BYTES, Stage
from x86quant.hardware import isa

WORKER = (sys.executable, "-m", "benchmarks.peers.worker")
HEARTBEAT_SECONDS = 15


class WorkerError(Exception):
    """The measuring process failed, and not by the fault of a peer."""


def environment(settings: Settings) -> dict[str, str]:
    """The measuring process's: libraries read these before or when they load."""
    variables = dict(os.environ)
    variables["OMP_NUM_THREADS"] = str(settings.threads)
    if settings.isa is not None:
        variables[isa.VARIABLE] = settings.isa
        variables.update(isa.LEVELS[settings.isa].environment)
        # The older name, for a library with an older oneDNN in it.
        variables["DNNL_MAX_CPU_ISA"] = variables["ONEDNN_MAX_CPU_ISA"]
    return variables


def measure_network(
    network: str,
    *,
    settings: Settings,
    longest: float,
    worker: Sequence[str] = WORKER,
) -> NetworkResult:
    """Measure one network, as often as peers take the process down, each time without those.

    Args:
        network: its name in torchvision.
        settings: what to measure.
        longest: seconds one peer may prepare.
        worker: the command to start; REQUEST, RESULT and STAGE are appended.

    Raises:
        WorkerError: the process failed outside any peer.
    """
    excluded: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="against-peers-") as folder:
        request, result, stage = (Path(folder) / name for name in ("request", "result", "stage"))
        while True:
            request.write_text(
                json.dumps(
                    {
                        "network": network,
                        "settings": dataclasses.asdict(settings),
                        "excluded": excluded,
                    }
                )
            )
            stage.write_bytes(b" " * STAGE_BYTES)
            command = [*worker, str(request), str(result), str(stage)]
            ending = _run_worker(command, environment(settings), stage, longest)
            if result.exists():
                return NetworkResult.from_json(result.read_text())
            what, peer = Stage.read(stage)
            if peer not in settings.peers or peer in excluded:
                raise WorkerError(f"{network}: the measuring process {ending} while {what} {peer}")
            excluded[peer] = f"the process {ending} while {what}"
            print(f"  {peer}: FAILED {excluded[peer]}; starting again without", file=sys.stderr)


def _run_worker(
    command: Sequence[str], variables: dict[str, str], stage: Path, longest: float
) -> str:
    """Run it to its end, saying now and then where it is; returns how it ended."""
    # A session of its own: compilers it has started die with it.
    process = subprocess.Popen(command, env=variables, start_new_session=True)
    try:
        now, since, said = ("", ""), time.monotonic(), time.monotonic()
        while True:
            try:
                code = process.wait(timeout=0.2)
            except subprocess.TimeoutExpired:
                pass
            else:
                return f"died of {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
            if (stage_now := Stage.read(stage)) != now:
                now, since = stage_now, time.monotonic()
            lasted = time.monotonic() - since
            if now[0] == "preparing" and lasted > longest:
                return f"took longer than {longest:.0f} s"
            if time.monotonic() - said > HEARTBEAT_SECONDS:
                said = time.monotonic()
                what, peer = now
                print(f"  ... {peer}: {what}, {lasted:.0f} s", file=sys.stderr, flush=True)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def run(
    networks: Sequence[str],
    store: Store,
    measure: Callable[[str], NetworkResult],
    *,
    json_output: bool = False,
) -> int:
    """Measure what is not there yet, reporting after each network; returns the exit status."""
    results = store.load()
    for number, network in enumerate(networks, 1):
        if (kept := results.get(network)) is not None:
            date = kept.environment.get("date", "earlier")
            print(f"[{number}/{len(networks)}] {network}: kept from {date}", file=sys.stderr)
            continue
        print(f"[{number}/{len(networks)}] {network}", file=sys.stderr, flush=True)
        results[network] = measure(network)
        store.keep(results[network])
        _write_report(_ordered(results), store)
    chosen = [results[network] for network in networks]
    _write_report(_ordered(results), store)
    output = report.as_json if json_output else report.markdown
    print(output(chosen, store.settings), end="")
    return int(any(OURS in r.peers and r.measured(OURS) is None for r in chosen))


def _ordered(results: dict[str, NetworkResult]) -> list[NetworkResult]:
    """Known networks in their usual order, then any others."""
    order = [*NETWORKS, *results]
    return sorted(results.values(), key=lambda result: order.index(result.network))


def _write_report(results: Sequence[NetworkResult], store: Store) -> None:
    report.write(results, store.settings, store.folder)
    try:
        report.plot(results, store.settings, store.folder / "plot.png")
    except ImportError:
        print("  no plot: pip install matplotlib", file=sys.stderr)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Command line."""
    summary, _, details = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.against_peers",
        description=summary,
        epilog=details,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--models", nargs="+", default=NETWORKS, metavar="NAME", help="torchvision networks"
    )
    parser.add_argument(
        "--peers",
        nargs="+",
        default=tuple(PEERS),
        choices=PEERS,
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
    settings = Settings(
        tuple(name for name in PEERS if name in options.peers or name == OURS),
        options.batch,
        options.threads,
        options.rounds,
        options.isa,
        options.size,
    )
    store = Store(options.out, settings, fresh=options.fresh)
    measure = functools.partial(measure_network, settings=settings, longest=options.prepare_seconds)
    try:
        return run(options.models, store, measure, json_output=options.json)
    except (SettingsDifferError, WorkerError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nstopped; the same command goes on from here", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
