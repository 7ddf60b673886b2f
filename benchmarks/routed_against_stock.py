"""Stock x86 engine against the routed one, shape by shape, interleaved in one process.

python -m benchmarks.routed_against_stock             # the stock engine's slow shapes
python -m benchmarks.routed_against_stock --layers    # every shape of rules/layers.csv
python -m benchmarks.routed_against_stock --networks  # whole networks (needs torchvision)
"""

from __future__ import annotations

import argparse
import csv
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

import torch
from torch import nn

import x86quant
from benchmarks.environment import print_environment
from benchmarks.networks import NETWORKS
from x86quant.profiling.timing import interleaved

Q = torch.ops.quantized
ENGINES = ("x86", "fbgemm", "onednn")
# layers.csv gives no rows for linears; a sentence of this many tokens is usual.
LINEAR_ROWS = 128
PREPACK = {1: Q.conv1d_prepack, 2: Q.conv2d_prepack, 3: Q.conv3d_prepack}
RUN = {1: Q.conv1d, 2: Q.conv2d, 3: Q.conv3d}


@dataclass(frozen=True)
class Conv:
    """A convolution and the size of its input."""

    name: str
    in_channels: int
    out_channels: int
    kernel: tuple[int, ...]
    spatial: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int = 1

    def pack(self) -> Any:
        shape = (self.out_channels, self.in_channels // self.groups, *self.kernel)
        return PREPACK[len(self.kernel)](
            _weight(*shape),
            None,
            list(self.stride),
            list(self.padding),
            list(self.dilation),
            self.groups,
        )

    def runner(self, pack: Any, batch: int) -> Callable[[], torch.Tensor]:
        x = _activation(batch, self.in_channels, *self.spatial)
        if len(self.spatial) == 2:
            x = x.contiguous(memory_format=torch.channels_last)
        if len(self.spatial) == 3:
            x = x.contiguous(memory_format=torch.channels_last_3d)
        run = RUN[len(self.kernel)]
        return lambda: run(x, pack, 1.0, 100)


@dataclass(frozen=True)
class Linear:
    """A linear layer and its number of rows."""

    name: str
    in_channels: int
    out_channels: int
    rows: int

    def pack(self) -> Any:
        return Q.linear_prepack(_weight(self.out_channels, self.in_channels), None)

    def runner(self, pack: Any, batch: int) -> Callable[[], torch.Tensor]:
        x = _activation(self.rows * batch, self.in_channels)
        return lambda: Q.linear(x, pack, 1.0, 100)


def _weight(*shape: int) -> torch.Tensor:
    # Bell-shaped, as trained weights are: the saturation proof looks at them.
    codes = (torch.randn(shape) * 32).round().clamp(-127, 127).to(torch.int8)
    scales = torch.full((shape[0],), 0.005, dtype=torch.double)
    zero_points = torch.zeros(shape[0], dtype=torch.long)
    return torch._make_per_channel_quantized_tensor(codes, scales, zero_points, 0)


def _activation(*shape: int) -> torch.Tensor:
    codes = torch.randint(0, 256, shape, dtype=torch.uint8)
    return torch._make_per_tensor_quantized_tensor(codes, 0.05, 128)


def square(name: str, channels: int, kernel: int, size: int, **other: int) -> Conv:
    """A 2d convolution with everything alike in both directions, padded to keep its size."""
    dilation = other.get("dilation", 1)
    return Conv(
        name,
        channels,
        channels * other.get("multiplier", 1),
        (kernel, kernel),
        (size, size),
        (1, 1),
        (dilation * (kernel - 1) // 2,) * 2,
        (dilation, dilation),
        other.get("groups", channels),
    )


SLOW_SHAPES = (
    square("depthwise 3×3, 128 groups, dilation 2", 128, 3, 28, dilation=2),
    square("depthwise 3×3, 132 groups", 132, 3, 28),
    Conv("depthwise conv1d 1×31, 256 groups", 256, 256, (31,), (400,), (1,), (15,), (1,), 256),
    square("depthwise 9×9, 128 groups", 128, 9, 28),
    square("depth multiplier 2, 128 groups", 128, 3, 28, multiplier=2),
    square("32 groups × 4 channels", 128, 3, 56, groups=32),
)


def layers(path: str | None) -> Iterator[Conv | Linear]:
    """Every distinct shape of a layers file."""
    text = (
        open(path).read()  # noqa: SIM115
        if path
        else (resources.files("x86quant.rules") / "layers.csv").read_text()
    )
    seen = set()
    for row in csv.DictReader(text.splitlines()):
        key = tuple(value for field, value in row.items() if field not in ("net", "layer"))
        if key not in seen:
            seen.add(key)
            yield _from_row(row)


def _from_row(row: dict[str, str]) -> Conv | Linear:
    def sizes(prefix: str) -> tuple[int, ...]:
        return tuple(int(row[prefix + axis]) for axis in "dhw" if row[prefix + axis])

    if row["op"] == "linear":
        return Linear(row["layer"], int(row["ic"]), int(row["oc"]), LINEAR_ROWS)
    return Conv(
        row["layer"],
        int(row["ic"]),
        int(row["oc"]),
        sizes("k"),
        sizes("i"),
        sizes("s"),
        sizes("p"),
        sizes("d"),
        int(row["groups"] or 1),
    )


def compare(shapes: Iterable[Conv | Linear], rounds: int, batch: int) -> None:
    """Print one line a shape, then the geometric mean and the worst ratio."""
    print(
        f"{'shape':48} {'stock':>9} {'routed':>9} {'stock µs':>10} {'routed µs':>10} "
        f"{'median':>7} {'minimum':>7}"
    )
    ratios = []
    for shape in shapes:
        stock = shape.pack()
        with x86quant.enable():
            routed = shape.pack()
        kind = "linear" if isinstance(shape, Linear) else _pack_kind(shape)
        # Throw-away packs: oneDNN lays a pack out for the first input it meets.
        times = interleaved(
            {"stock": shape.runner(stock, batch), "routed": shape.runner(routed, batch)},
            rounds=rounds,
        )
        by_median = times["stock"].median / times["routed"].median
        by_minimum = times["stock"].minimum / times["routed"].minimum
        ratios.append((by_median, by_minimum, shape.name))
        names = [x86quant.explain_pack(kind, pack)[-1].kernel for pack in (stock, routed)]
        print(
            f"{shape.name[:48]:48} {names[0]:>9} {names[1]:>9} {times['stock'].median * 1e6:10.1f} "
            f"{times['routed'].median * 1e6:10.1f} {by_median:6.2f}× {by_minimum:6.2f}×",
            flush=True,
        )
    mean = math.exp(sum(math.log(r[0]) for r in ratios) / len(ratios))
    # A shape is slower only if median and minimum agree that it is.
    worst = min(ratios, key=lambda r: max(r[0], r[1]))
    print(
        f"\n{len(ratios)} shapes: geometric mean {mean:.2f}× faster than stock x86; worst "
        f"{max(worst[0], worst[1]):.2f}× ({worst[2]})"
    )


def _pack_kind(shape: Conv) -> str:
    return "conv3d" if len(shape.kernel) == 3 else "conv2d"


def networks(names: Sequence[str], rounds: int, batch: int) -> None:
    """Whole networks through the stock FX workflow: each engine alone, and routed."""
    from benchmarks.networks import torchvision_model

    print(
        f"{'network':20} {'x86 ms':>8} {'fbgemm':>8} {'onednn':>8} {'routed':>8} {'best':>7} "
        "best stock / routed, by median and minimum"
    )
    ratios = []
    for name in names:
        model = torchvision_model(name)
        x = torch.randn(batch, 3, 224, 224).contiguous(memory_format=torch.channels_last)
        runs = {engine: _under(engine, _converted(model, x, engine), x) for engine in ENGINES}
        with x86quant.enable():
            runs["routed"] = _under("x86", _converted(model, x, "x86"), x)
        times = interleaved(runs, rounds=rounds)
        best = min(ENGINES, key=lambda engine: times[engine].median)
        by_median = times[best].median / times["routed"].median
        by_minimum = min(times[e].minimum for e in ENGINES) / times["routed"].minimum
        ratios.append((by_median, by_minimum, name))
        columns = " ".join(f"{times[run].median * 1e3:8.2f}" for run in (*ENGINES, "routed"))
        print(f"{name:20} {columns} {best:>7} {by_median:6.2f}× {by_minimum:6.2f}×", flush=True)
    mean = math.exp(sum(math.log(r[0]) for r in ratios) / len(ratios))
    worst = min(ratios, key=lambda r: max(r[0], r[1]))
    print(
        f"\n{len(ratios)} networks: geometric mean {mean:.2f}× the speed of the best stock engine "
        f"of each; worst {max(worst[0], worst[1]):.2f}× ({worst[2]})"
    )


def _converted(model: nn.Module, x: torch.Tensor, engine: str) -> nn.Module:
    """``model`` by the stock FX workflow, with the same qconfigs for every engine."""
    from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx

    torch.backends.quantized.engine = engine
    prepared = prepare_fx(model, x86quant.get_default_qconfig_mapping(), (x,))
    prepared(x)
    converted: nn.Module = convert_fx(prepared)
    return converted


def _under(engine: str, model: nn.Module, x: torch.Tensor) -> Callable[[], torch.Tensor]:
    def run() -> torch.Tensor:
        # Some ops ask for the engine when they run; setting it costs under 1 µs.
        torch.backends.quantized.engine = engine
        result: torch.Tensor = model(x)
        return result

    return run


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--layers", action="store_true", help="every shape of rules/layers.csv")
    parser.add_argument(
        "--networks",
        nargs="*",
        metavar="NAME",
        help="whole networks (default: the ten of against_peers)",
    )
    parser.add_argument("--file", help="another CSV of layer shapes")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    torch.backends.quantized.engine = "x86"
    print_environment()
    with torch.no_grad():
        if arguments.networks is not None:
            networks(arguments.networks or NETWORKS, arguments.rounds, arguments.batch)
        elif arguments.layers or arguments.file:
            compare(layers(arguments.file), arguments.rounds, arguments.batch)
        else:
            compare(SLOW_SHAPES, arguments.rounds, arguments.batch)


if __name__ == "__main__":
    main()
