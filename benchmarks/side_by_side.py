"""Any ways to run one model, taking turns in one process, and how they are printed."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from benchmarks.dynamic_linear import decibels
from x86quant.bench.backends import Bind, Task, backend, first_tensor, missing
from x86quant.bench.turns import measure_in_turn, wait_for_idle_threads
from x86quant.errors import first_line
from x86quant.given_model import Arguments

PEERS = ("openvino", "onnxruntime", "openvino-fp32", "onnxruntime-fp32")

Call = tuple[torch.Tensor, ...]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the commands that use this have in common."""
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--peers", nargs="*", default=PEERS, choices=PEERS)


def peers(
    names: Iterable[str], model: nn.Module, calibration: list[Call], example: Call, threads: int
) -> dict[str, Bind]:
    """What runs ``model`` by the back ends called ``names``; says why one cannot."""
    found: dict[str, Bind] = {}
    calls = [Arguments(one) for one in calibration]
    task = Task(model, "float", calls, Arguments(example), threads)
    for name in names:
        one = backend(name)
        why = missing(one)
        if why is None:
            try:
                found[f"{one.title} ({one.version()})"] = one.prepare(task).bind
            except Exception as error:  # converters raise whatever they like
                why = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
        if why is not None:
            print(f"  {one.title} left out: {why}"[:160])
    return found


def bound(model: Callable[..., Any]) -> Bind:
    """A torch module as a back end binds it."""
    return lambda given: lambda: model(*given.args, **given.kwargs)


def compare(title: str, binds: Mapping[str, Bind], call: Call, rounds: int) -> None:
    """Print times of each of ``binds`` on ``call``, over those of the first; the last is exact."""
    print(title)
    runs = {}
    for name, bind in binds.items():
        run = bind(Arguments(call))
        try:
            run()
        except Exception as error:  # of another runtime
            print(f"  {name:<36} fails: {first_line(error)}"[:160])
            continue
        runs[name] = run
    results = {name: first_tensor(run()).clone() for name, run in runs.items()}
    seconds = measure_in_turn(runs, rounds, settle=wait_for_idle_threads)
    times = {name: (statistics.median(taken), min(taken)) for name, taken in seconds.items()}
    ours, exact = next(iter(times.values())), list(results)[-1]
    for name, (median, best) in times.items():
        quality = "" if name == exact else f"{decibels(results[name], results[exact]):7.1f} dB"
        print(
            f"  {name:<40}{median * 1e3:9.3f} ms {median / ours[0]:6.2f} x, at best "
            f"{best * 1e3:9.3f} ms {best / ours[1]:6.2f} x {quality}",
            flush=True,
        )
