"""What each step of the accuracy kit gains trained networks.

    python -m benchmarks.trained.steps [--networks depthwise detector]

Signal to noise in dB on data that calibration has not seen: with the step, less without it; and
on how many networks that is more than 0.3 dB, and on how many it is a loss of as much. "One layer
in float" is the most that any of the three layers gains that make most noise alone: 16-bit codes
for it would gain no more.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch

import x86quant
from benchmarks.environment import print_environment
from benchmarks.trained.__main__ import NETWORKS, decibels, silence
from benchmarks.trained.network import Trained
from benchmarks.trained.peers import of_torch, ours
from x86quant.quantization import outcome
from x86quant.quantization.kit import accuracy_kit, learning

#: Less than this is chance.
_CLEARLY = 0.3
_Context = Callable[[], contextlib.AbstractContextManager[Any]]


_ONE_LAYER = "one layer in float"
#: So many of the layers that make most noise are tried.
_LAYERS = 3


def _codes_stay() -> contextlib.AbstractContextManager[Any]:
    steps = tuple(step for step in accuracy_kit.STEPS if step is not accuracy_kit.feed_back)
    return mock.patch.object(accuracy_kit, "STEPS", steps)


def _cheap_layers_stay() -> contextlib.AbstractContextManager[Any]:
    return mock.patch.object(outcome, "where_float_is_cheap", lambda *both: both)


#: What is compared: a step, the arguments that have it, those that lack it, and a block that does.
STEPS: dict[str, tuple[dict[str, Any], dict[str, Any], _Context]] = {
    "rounding of weights": ({}, {}, _codes_stay),
    "bias correction": ({}, {"bias_correction": False}, contextlib.nullcontext),
    "equalization": ({}, {"equalize": False}, contextlib.nullcontext),
    "SmoothQuant": ({}, {"smooth_quant": False}, contextlib.nullcontext),
    "best: other observers": (
        {"effort": "best"},
        {"effort": "best"},
        lambda: mock.patch.object(accuracy_kit, "_OTHER_OBSERVERS", ()),
    ),
    "best: learned ranges and biases": (
        {"effort": "best"},
        {"effort": "best"},
        lambda: mock.patch.object(learning, "_ROUNDS", 0),
    ),
    "best: weights rounded by what is learned": (
        {"effort": "best"},
        {"effort": "best"},
        lambda: mock.patch.object(accuracy_kit, "_WITH_WEIGHTS", (False,)),
    ),
    "best: cheap layers in float": ({"effort": "best"}, {"effort": "best"}, _cheap_layers_stay),
    "best: all of it": ({"effort": "best"}, {}, contextlib.nullcontext),
    _ONE_LAYER: ({}, {}, contextlib.nullcontext),
}


def _level(network: Trained, exact: torch.Tensor, arguments: dict[str, Any]) -> float:
    """Signal to noise of the model made with ``arguments``."""
    with silence():
        run = ours(**arguments)(network)
    with torch.no_grad():
        return decibels(exact, torch.cat([run(call) for call in network.test]))


def _levels_of_layers(network: Trained, exact: torch.Tensor) -> list[float]:
    """Signal to noise with one layer in float, for each of those that make most noise alone."""
    with silence():
        worst = [*x86quant.sensitivity(network.model, network.calibration)][:_LAYERS]
    return [_level(network, exact, {"float_layers": [one.name]}) for one in worst]


def gains(network: Trained, steps: Sequence[str]) -> dict[str, float]:
    """By step, what it gains."""
    run = of_torch(network.model)
    with torch.no_grad():
        exact = torch.cat([run(call) for call in network.test])
    known: dict[str, float] = {}
    found = {}
    for step in steps:
        arguments, without, block = STEPS[step]
        key = str(arguments)
        if key not in known:
            known[key] = _level(network, exact, arguments)
        if step == _ONE_LAYER:
            found[step] = max(_levels_of_layers(network, exact)) - known[key]
            continue
        with block():
            found[step] = known[key] - _level(network, exact, without)
    return found


def main() -> None:
    """Print the table, a row for each network."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--networks", nargs="*", default=list(NETWORKS), choices=list(NETWORKS))
    parser.add_argument("--steps", nargs="*", default=list(STEPS), choices=list(STEPS))
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    print_environment()
    steps = options.steps
    print(f"\n| network | {' | '.join(steps)} |\n|{'---|' * (len(steps) + 1)}")
    rows = []
    for name in options.networks:
        with silence():
            network = NETWORKS[name]()
        rows.append(gains(network, steps))
        print(
            f"| {name} | " + " | ".join(f"{x:+.1f}" for x in rows[-1].values()) + " |", flush=True
        )
    for word, sign in (("gain", 1), ("loss", -1)):
        counts = [sum(sign * row[step] > _CLEARLY for row in rows) for step in steps]
        print(f"| {word} on | " + " | ".join(map(str, counts)) + " |")


if __name__ == "__main__":
    main()
