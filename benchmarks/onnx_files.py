"""ONNX files: read, held against ONNX Runtime, quantized.

    python -m benchmarks.onnx_files net.onnx [more.onnx ...] [--size NAME=N,C,H,W] [--no-quantize]

Inputs are noise around zero, or with ``--data FILE.npy`` what is in that file; free sizes are as
``--size`` says, else 1 for the first and 64 for others. ``--integer NAME=VALUE`` is for inputs that
are settings, such as a sampling rate. Prints by file: the greatest difference from ONNX Runtime as
a share of the greatest result, the signal to noise of that, and of int8 on inputs that calibration
has not seen.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import x86quant


def sqnr(right: Sequence[Any], found: Sequence[Any]) -> float:
    """The least signal to noise ratio of all results, in dB."""
    least = np.inf
    for a, b in zip(right, found, strict=True):
        signal, noise = np.asarray(a, np.float64), np.asarray(a, np.float64) - np.asarray(b)
        if noise.any():
            least = min(least, 10 * np.log10(max((signal**2).sum(), 1e-300) / (noise**2).sum()))
    return float(least)


def results(module: Any, feed: dict[str, np.ndarray]) -> list[np.ndarray]:
    with torch.no_grad():
        found = module(*(torch.from_numpy(value) for value in feed.values()))
    return [one.numpy() for one in (found if isinstance(found, tuple) else (found,))]


def feeds(session: Any, options: argparse.Namespace, number: int) -> list[dict[str, np.ndarray]]:
    """Inputs by name."""
    generator = np.random.default_rng(0)
    sizes = dict(one.split("=") for one in options.size)
    integers = dict(one.split("=") for one in options.integer)
    data = None if options.data is None else np.load(options.data)
    made = []
    for n in range(number):
        feed = {}
        for place, one in enumerate(session.get_inputs()):
            shape = [s if isinstance(s, int) else 1 if not k else 64
                     for k, s in enumerate(one.shape)]  # fmt: skip
            if one.name in sizes:
                shape = [int(size) for size in sizes[one.name].split(",")]
            dtype = {"tensor(int64)": np.int64, "tensor(int32)": np.int32, "tensor(bool)": bool,
                     "tensor(float16)": np.float16}.get(one.type, np.float32)  # fmt: skip
            if one.name in integers:
                feed[one.name] = np.full(shape, int(integers[one.name]), dtype)
            elif data is not None and place == 0:
                feed[one.name] = data[n % len(data)][None].astype(dtype)
            elif dtype in (np.float32, np.float16):
                feed[one.name] = (generator.standard_normal(shape) * options.scale).astype(dtype)
            else:
                feed[one.name] = generator.integers(0, 2, shape).astype(dtype)
        made.append(feed)
    return made


def report(path: Path, options: argparse.Namespace) -> None:
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path))
    *calibration, test = feeds(session, options, 9)
    right = session.run(None, test)
    begin = time.perf_counter()
    module = x86quant.from_onnx(path)
    seconds = time.perf_counter() - begin
    found = results(module, test)
    share = max(float(np.abs(a - b).max() / max(np.abs(a).max(), 1e-30))
                for a, b in zip(right, found, strict=True))  # fmt: skip
    line = f"{path.name:36} read {seconds:5.2f} s  off by {share:.1e}  {sqnr(right, found):6.1f} dB"
    if options.no_quantize:
        print(line, flush=True)
        return
    begin = time.perf_counter()
    try:
        int8: Any = x86quant.quantize(path, calibration, progress=False)
    except x86quant.X86QuantError as error:
        print(f"{line}  not quantized: {error}", flush=True)
        return
    seconds = time.perf_counter() - begin
    print(f"{line}  int8 {sqnr(right, results(int8, test)):5.1f} dB in {seconds:.0f} s", flush=True)
    if options.summary:
        print(int8.quantization, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--size", action="append", default=[], metavar="NAME=N,C,H,W")
    parser.add_argument("--integer", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--data", type=Path, help="samples of the first input, as .npy")
    parser.add_argument("--scale", type=float, default=0.5, help="of the noise")
    parser.add_argument("--no-quantize", action="store_true")
    parser.add_argument("--summary", action="store_true", help="print what quantize did")
    options = parser.parse_args()
    for path in options.files:
        report(path, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
