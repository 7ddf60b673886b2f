"""Quantize a float model after calibration on data, and save it.

    x86quant quantize mine:net --data mine:batches --out net.x86q
    x86quant quantize net.onnx --data images.npy --out net.x86q
    x86quant quantize mine:net --data images.npy --out net.x86q --metric mine:score --max-drop 0.5

``--data`` is a callable that returns batches (or a DataLoader, or such a value itself), or a file:
.npy with samples along the first dimension, or .pt with a tensor or a list of batches, of which
only tensors and plain containers are read. A metric is a callable of a model that returns a number,
higher is better. If the metric was not held, the exit status is 1, and the best model is saved.
"""

from __future__ import annotations

import argparse
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

from x86quant.cli import loading
from x86quant.errors import InvalidInputError
from x86quant.files import check_target, write_aside

HELP = "quantize a float model and save it"

_SWITCHES: dict[str, Any] = {"auto": "auto", "on": True, "off": False}


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="module:name or file.py:name, a callable without arguments that returns a float "
        "nn.Module, or such a module; or a folder that transformers saved one to; or an ONNX model",
    )
    parser.add_argument(
        "--data",
        metavar="MODULE:FUNCTION|FILE",
        help="calibration data; only dynamic and weight_only can do without",
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="the file to write; NAME.onnx as ONNX"
    )
    parser.add_argument(
        "--mode", choices=("auto", "static", "dynamic", "weight_only"), default="auto"
    )
    parser.add_argument(
        "--effort",
        choices=("fast", "default", "best"),
        default="default",
        help="how much time to spend on accuracy",
    )
    parser.add_argument(
        "--observer",
        choices=("auto", "minmax", "histogram", "percentile", "mse", "kl"),
        default="auto",
        help="how activation ranges are chosen",
    )
    parser.add_argument(
        "--weight-bits",
        type=_bits,
        choices=(8, 4, "auto"),
        default=8,
        help="of linears: 8 (the default), 4, or auto: 4, and 8 where it helps most for its bytes",
    )
    parser.add_argument(
        "--weight-budget",
        type=int,
        metavar="BYTES",
        help="that the linears' weights may take, with --weight-bits auto",
    )
    for name in ("equalize", "bias-correction", "smooth-quant"):
        parser.add_argument(f"--{name}", choices=tuple(_SWITCHES), default="auto")
    parser.add_argument(
        "--float-layer",
        action="append",
        default=[],
        metavar="NAME",
        help="a layer, or what contains it, to keep in float; may be repeated",
    )
    parser.add_argument(
        "--no-speed-check",
        action="store_true",
        help="keep in int8 what is slower than in float on this machine",
    )
    parser.add_argument("--metric", metavar="MODULE:FUNCTION", help="hold this metric")
    parser.add_argument("--max-drop", type=float, help="how far it may fall (default: 0.01)")
    parser.add_argument("--threads", type=loading.thread_count, help="threads (default: torch's)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def _bits(text: str) -> int | str:
    """``"4"`` as 4, for argparse; what is no number as it is, for its choices to tell."""
    return int(text) if text.isdecimal() else text


def run(options: argparse.Namespace) -> int:
    """Quantize, save, and print what was done."""
    import torch

    import x86quant
    from x86quant.artifacts.writer import to_bytes
    from x86quant.profiling.roofline import using_threads

    check_target(options.out, "--out")  # now, not after calibration
    is_onnx = options.model.endswith(".onnx")  # then its batches have the names of the file
    model = options.model if is_onnx else loading.load_model(options.model)
    metric = None if options.metric is None else _metric(options.metric)
    with using_threads(options.threads or torch.get_num_threads()):
        result: Any = x86quant.quantize(
            model,
            load_data(options.data),
            mode=options.mode,
            effort=options.effort,
            observer=options.observer,
            equalize=_SWITCHES[options.equalize],
            bias_correction=_SWITCHES[options.bias_correction],
            smooth_quant=_SWITCHES[options.smooth_quant],
            weight_bits=options.weight_bits,
            weight_budget=options.weight_budget,
            float_layers=options.float_layer,
            metric=metric,
            max_drop=options.max_drop,
            speed_check=not options.no_speed_check,
        )
    if options.out.suffix == ".onnx":
        x86quant.export_onnx(result, options.out)
    else:
        write_aside(options.out, to_bytes(result))
    size = options.out.stat().st_size
    loading.tell(f"wrote {options.out}, {size / 1e6:.2f} MB")
    summary = result.quantization
    if options.json:
        print(json.dumps({**summary.to_dict(), "path": str(options.out), "bytes": size}, indent=2))
    else:
        print(summary)
    return 0 if summary.search is None or summary.search.met else 1


def load_data(source: str | None) -> Any:
    """What ``--data`` names, as ``quantize`` takes it.

    Raises:
        InvalidInputError: there is no such file or object, it fails, or holds no data.
    """
    if source is None:
        return None
    if source.endswith((".npy", ".pt", ".pth")):
        return _load_file(Path(source))
    found = loading.load_object(source)
    return loading.called(f"--data {source}", found) if callable(found) else found


def _load_file(path: Path) -> Any:
    import numpy as np
    import torch

    try:
        if path.suffix == ".npy":
            return torch.from_numpy(np.load(path, allow_pickle=False))
        return torch.load(path, map_location="cpu", weights_only=True)
    except (ValueError, TypeError, EOFError, RuntimeError, pickle.UnpicklingError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise InvalidInputError(f"--data: cannot read {path}: {lines[0]}") from error


def _metric(name: str) -> Callable[[Any], float]:
    """The metric ``name``; what it raises, or returns that is no number, is told in its name."""
    metric = loading.load_object(name)

    def scored(model: Any) -> float:
        found = loading.called(f"--metric {name}", metric, model)
        try:
            return float(found)
        except (TypeError, ValueError):
            raise InvalidInputError(
                f"--metric {name} returned {type(found).__name__}, not a number"
            ) from None

    return scored
