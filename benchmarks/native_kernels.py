"""Times the native convolutions against the stock engines, layer by layer, in one process.

    python -m benchmarks.native_kernels --net resnet_50 --isa amx_int8 --isa avx512_vnni

Every candidate runs in turn for several rounds on one thread; minima are compared, since whatever
else the machine does only ever adds time. Results are checked against the stock op before timing.
"""

from __future__ import annotations

import argparse
import csv
import ctypes
import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

from tests.native import capi
from tests.native.build import build

LAYERS = Path(__file__).resolve().parent.parent / "rules" / "layers.csv"
ENGINES = ("onednn", "fbgemm")
#: µs of a call that is timed once: after it a busy machine gives the others its worse moments.
LONG = 100_000


class Layer:
    """One row of layers.csv with random weights and input."""

    def __init__(self, row: dict[str, str], batch: int) -> None:
        self.name, self.net = row["layer"], row["net"]
        number = {k: int(v) for k, v in row.items() if k not in ("op", "net", "layer") and v}
        self.groups, self.ic, self.oc = number["groups"], number["ic"], number["oc"]
        get = number.get
        self.size = (get("id", 1), get("ih", 1), get("iw", 1))
        self.kernel = (get("kd", 1), get("kh", 1), get("kw", 1))
        self.stride = (get("sd", 1), get("sh", 1), get("sw", 1))
        self.padding = (get("pd", 0), get("ph", 0), get("pw", 0))
        self.dilation = (get("dd", 1), get("dh", 1), get("dw", 1))
        rng = np.random.default_rng(0)
        self.weight = rng.integers(
            -50, 51, (self.oc, self.ic // self.groups, *self.kernel), np.int8
        )
        self.x = rng.integers(0, 256, (batch, *self.size, self.ic), np.uint8)
        self.scale = 1 / (self.ic // self.groups * math.prod(self.kernel)) ** 0.5 / 60

    @property
    def kind(self) -> str:
        """The class of layer that it is counted in."""
        if self.groups > 1:
            return "depthwise" if self.groups == self.ic == self.oc else "grouped"
        if self.ic < 8:
            return "first"
        strided = "/s" if max(self.stride) > 1 else ""
        return ("1x1" if max(self.kernel) == 1 else "kxk") + strided

    def gops(self, out: tuple[int, ...]) -> float:
        """Billions of operations."""
        return 2.0 * math.prod(out) * int(self.weight[0].size) / 1e9


def native(lib: capi.Library, layer: Layer, isa: str) -> tuple[Callable[[], None], capi.Bytes]:
    """A call of the native kernel and the tensor it fills."""
    spec = capi.ConvSpec(
        layer.weight,
        np.full(layer.oc, layer.scale, np.float32),
        groups=layer.groups,
        stride=layer.stride,
        padding=layer.padding,
        dilation=layer.dilation,
        in_zp=128,
        out_zp=128,
    )
    packed = lib.pack(spec, isa)
    # Aligned to cache lines, as torch's allocator does and a runtime's arena will.
    x = capi.aligned(layer.x.size).reshape(layer.x.shape)
    x[...] = layer.x
    shape = (x.shape[0], *spec.out_size(x.shape[1:4]), layer.oc)
    out = capi.aligned(math.prod(shape)).reshape(shape)
    call = capi.ConvCall(
        packed.ctypes.data, capi.Tensor.of(x), capi.Tensor.of(out), capi.Tensor(), 1
    )
    scratch = capi.aligned(lib.lib.xq_conv_scratch(ctypes.byref(call)))
    items = lib.lib.xq_conv_items(ctypes.byref(call))
    pointer, keep = ctypes.byref(call), (packed, scratch, x, out)
    run = lib.lib.xq_conv_run

    def go() -> None:
        run(pointer, 0, items, keep[1].ctypes.data)

    return go, out


def stock(layer: Layer, engine: str) -> Callable[[], torch.Tensor]:
    """A call of the stock op on one engine: of images as such, which have kernels of their own."""
    flat = layer.size[0] == layer.kernel[0] == 1
    prepack = torch.ops.quantized.conv2d_prepack if flat else torch.ops.quantized.conv3d_prepack
    conv = torch.ops.quantized.conv2d if flat else torch.ops.quantized.conv3d
    x = torch.from_numpy(layer.x).permute(0, 4, 1, 2, 3)
    w = torch.from_numpy(layer.weight)
    if flat:
        x, w = x[:, :, 0], w[:, :, 0]
    qx = torch._make_per_tensor_quantized_tensor(x, 1.0, 128)
    scales, zeros = torch.full((layer.oc,), layer.scale), torch.zeros(layer.oc, dtype=torch.long)
    qw = torch._make_per_channel_quantized_tensor(w, scales.double(), zeros, 0)
    before = torch.backends.quantized.engine
    torch.backends.quantized.engine = engine
    try:
        sides = (s[1:] if flat else s for s in (layer.stride, layer.padding, layer.dilation))
        pack = prepack(qw, None, *sides, layer.groups)
    finally:
        torch.backends.quantized.engine = before
    return lambda: conv(qx, pack, 1.0, 128)


def layers(nets: list[str], batch: int) -> Iterator[Layer]:
    """The layers of images and of videos of some networks."""
    with LAYERS.open() as file:
        for row in csv.DictReader(file):
            if row["op"] in ("conv2d", "conv3d") and (not nets or row["net"] in nets):
                yield Layer(row, batch)


def best_times(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Least µs of each call, run in turn."""
    best = dict.fromkeys(calls, math.inf)
    for call in calls.values():
        call()
    for _ in range(rounds):
        for name, call in calls.items():
            if LONG < best[name] < math.inf:
                continue
            call()
            start = time.perf_counter()
            call()
            call()
            best[name] = min(best[name], (time.perf_counter() - start) / 2 * 1e6)
    return best


def main() -> None:
    """Print a line a layer and the median ratio of each kind of layer."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--net", action="append", default=[])
    parser.add_argument("--isa", action="append", default=[])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--quiet", action="store_true", help="only the summary")
    args = parser.parse_args()
    isas = args.isa or ["amx_int8", "avx512_vnni"]
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    lib = capi.Library(build())
    lib.enable_amx()
    ratios: dict[tuple[str, str], list[float]] = {}
    for layer in layers(args.net, args.batch):
        calls: dict[str, Callable[[], object]] = {}
        for engine in ENGINES:
            calls[engine] = stock(layer, engine)
        stock_result = calls["onednn"]().int_repr()  # type: ignore[attr-defined]
        want = torch.movedim(stock_result, 1, -1).numpy()
        for isa in isas:
            calls[isa], out = native(lib, layer, isa)
            calls[isa]()
            off = np.abs(out.reshape(want.shape).astype(int) - want).max()
            if off > 1:
                print(f"{layer.name} on {isa} is {off} steps off the stock result")
        times = best_times(calls, args.rounds)
        known = min(times[engine] for engine in ENGINES)
        for isa in isas:
            ratios.setdefault((layer.kind, isa), []).append(known / times[isa])
        if not args.quiet:
            gops = layer.gops(want.shape)
            kernel, stride = "x".join(map(str, layer.kernel)), max(layer.stride)
            shape = f"{layer.ic}->{layer.oc} k{kernel} s{stride} g{layer.groups}"
            cells = "  ".join(f"{n} {t:7.1f}" for n, t in times.items())
            speed = gops / min(times[i] for i in isas) * 1e3
            print(f"{shape:36s} {layer.size!s:10s} {cells}  {speed:5.2f} TOPS", flush=True)
    for (kind, isa), values in sorted(ratios.items()):
        low, mid = min(values), statistics.median(values)
        print(
            f"{kind:10s} {isa:12s} n={len(values):3d} best stock / native: {mid:.2f}  min {low:.2f}"
        )


if __name__ == "__main__":
    main()
