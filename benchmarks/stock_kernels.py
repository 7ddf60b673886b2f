"""Time the stock int8 engines against one another, op by op: what rules/default.toml rests on.

    python benchmarks/stock_kernels.py                    # every suite, at this CPU's own level
    python benchmarks/stock_kernels.py linear depthwise --isa avx512_vnni
    python benchmarks/stock_kernels.py conv --csv rules/measurements/stock_kernels.csv

Every engine's result is compared with float arithmetic first; one that is WRONG is not timed.
The engines are timed in turn, round by round, so that a noisy neighbour hits all of them; each
case gets its own packed weights, since oneDNN lays a pack out for the first input shape it
meets. ``gain`` is the time of the engine that PyTorch's own "x86" picks on a CPU with
AVX512-VNNI, divided by the best time.
"""

from __future__ import annotations

import argparse
import csv
import math
import os
import platform
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from x86quant.spec import OpSpec

if TYPE_CHECKING:
    import torch

# What keeps both libraries at or below a level. Read by them when torch loads.
CAPS = {
    "avx2": {"ONEDNN_MAX_CPU_ISA": "AVX2", "FBGEMM_ENABLE_INSTRUCTIONS": "AVX2"},
    "avx_vnni": {"ONEDNN_MAX_CPU_ISA": "AVX2_VNNI", "FBGEMM_ENABLE_INSTRUCTIONS": "AVX2"},
    "avx512": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE", "FBGEMM_ENABLE_INSTRUCTIONS": "AVX512"},
    "avx512_vnni": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_VNNI"},
    "amx_int8": {},
}


def linear(inputs: int, outputs: int, rows: int, dynamic: bool = False) -> OpSpec:
    return OpSpec("linear", inputs, outputs, rows=rows, dynamic=dynamic, batch=rows)


def conv(
    channels: int,
    outputs: int,
    kernel: tuple[int, ...],
    size: int,
    *,
    groups: int = 1,
    stride: int = 1,
    dilation: int = 1,
    padding: int | None = None,
    transposed: bool = False,
    output_padding: int = 0,
    batch: int = 1,
) -> OpSpec:
    n = len(kernel)
    same = tuple(dilation * (k - 1) // 2 for k in kernel)
    return OpSpec(
        f"conv{n}d",  # type: ignore[arg-type]
        channels,
        outputs,
        groups,
        kernel,
        (stride,) * n,
        same if padding is None else (padding,) * n,
        (dilation,) * n,
        (output_padding,) * n,
        transposed=transposed,
        per_channel=not transposed,  # stock transposed packs take per-tensor weights only
        batch=batch,
        spatial=(size,) * n,
    )


def linear_cases() -> Iterator[OpSpec]:
    shapes = [(64, 64), (256, 256), (512, 1000), (768, 768), (768, 3072), (3072, 768)]
    shapes += [(1024, 1024), (2048, 1000), (4096, 4096)]
    for inputs, outputs in shapes:
        for rows in (1, 2, 4, 8, 16, 32, 64, 256):
            yield linear(inputs, outputs, rows)


def dynamic_cases() -> Iterator[OpSpec]:
    for inputs, outputs in ((64, 64), (256, 256), (768, 768), (768, 3072), (2048, 1000)):
        for rows in (1, 4, 8, 16, 32, 64, 256):
            yield linear(inputs, outputs, rows, dynamic=True)


def depthwise_cases() -> Iterator[OpSpec]:
    for k in (3, 5, 7):
        for channels, size in ((32, 56), (96, 56), (128, 28), (144, 56), (512, 14), (960, 7)):
            yield conv(channels, channels, (k, k), size, groups=channels)
    for channels, size in ((96, 112), (144, 56), (576, 14)):
        yield conv(channels, channels, (3, 3), size, groups=channels, stride=2)
    for channels, size in ((240, 28), (672, 14)):
        yield conv(channels, channels, (5, 5), size, groups=channels, stride=2)
    yield conv(144, 144, (3, 3), 56, groups=144, batch=8)


def few_cases() -> Iterator[OpSpec]:
    """One to eight channels a group, around FBGEMM's fast paths."""
    for k, stride in ((3, 1), (3, 2), (5, 1), (7, 1)):
        for groups, size in ((32, 28), (64, 28), (36, 28), (256, 14)):
            yield conv(groups, 2 * groups, (k, k), size, groups=groups, stride=stride)
    yield conv(64, 256, (3, 3), 28, groups=64)
    yield conv(64, 192, (3, 3), 28, groups=64)
    for per in (2, 3, 4, 8):
        for groups, size in ((8, 28), (16, 28), (20, 28), (64, 14), (128, 14)):
            for stride in (1, 2):
                channels = per * groups
                yield conv(channels, channels, (3, 3), size, groups=groups, stride=stride)
    for k in (5, 7):
        for channels, size in ((384, 14), (768, 7), (768, 14), (1152, 7), (1024, 14)):
            yield conv(channels, channels, (k, k), size, groups=channels)


def trap_cases() -> Iterator[OpSpec]:
    """Depthwise shapes off FBGEMM's fast path."""
    yield conv(128, 128, (3, 3), 28, groups=128, dilation=2)
    yield conv(128, 128, (3, 3), 28, groups=128, padding=0)
    yield conv(132, 132, (3, 3), 28, groups=132)
    yield conv(58, 58, (3, 3), 28, groups=58)
    yield conv(116, 116, (3, 3), 14, groups=116)
    yield conv(232, 232, (3, 3), 7, groups=232)
    yield conv(256, 256, (31,), 200, groups=256)
    yield conv(256, 256, (3,), 200, groups=256)
    yield conv(128, 128, (9, 9), 28, groups=128)
    yield conv(128, 256, (3, 3), 28, groups=128)
    yield conv(64, 128, (3, 3), 28, groups=64)
    yield conv(128, 128, (3, 5), 28, groups=128)
    yield conv(128, 128, (3, 3), 28, groups=128, stride=4)
    yield conv(128, 128, (1, 1), 28, groups=128)
    yield conv(128, 128, (3, 3, 3), 14, groups=128)
    yield conv(128, 128, (2, 2), 28, groups=128, stride=2, padding=0)


def grouped_cases() -> Iterator[OpSpec]:
    """Several channels a group: ResNeXt, RegNet, ShuffleNet and further."""
    for per, groups, size in ((4, 32, 56), (8, 32, 28), (16, 32, 14), (32, 32, 7)):
        yield conv(per * groups, per * groups, (3, 3), size, groups=groups)
    for per, groups, size in ((4, 16, 28), (4, 8, 28), (8, 16, 28), (16, 8, 28), (16, 16, 28)):
        yield conv(per * groups, per * groups, (3, 3), size, groups=groups)
    for stride, dilation in ((2, 1), (1, 2)):
        yield conv(128, 128, (3, 3), 56, groups=32, stride=stride, dilation=dilation)
        yield conv(256, 256, (3, 3), 56, groups=32, stride=stride, dilation=dilation)
    yield conv(128, 128, (5, 5), 28, groups=32)
    yield conv(128, 128, (3, 3), 28, groups=32, padding=0)
    yield conv(128, 256, (3, 3), 28, groups=32)
    yield conv(128, 128, (1, 1), 28, groups=32)
    yield conv(256, 256, (1, 1), 28, groups=32)
    yield conv(240, 240, (1, 1), 28, groups=3)
    yield conv(128, 128, (3,), 200, groups=32)
    yield conv(256, 256, (31,), 200, groups=64)
    yield conv(128, 128, (3, 3, 3), 14, groups=32)
    yield conv(512, 512, (3, 3), 14, groups=128)
    yield conv(1024, 1024, (3, 3), 14, groups=128)
    yield conv(256, 256, (3, 3), 14, groups=128)
    yield conv(24, 24, (3, 3), 56, groups=3)
    yield conv(48, 48, (3, 3), 28, groups=3)
    yield conv(128, 128, (3, 3), 56, groups=32, batch=8)


def conv_cases() -> Iterator[OpSpec]:
    """Without groups."""
    yield conv(3, 64, (7, 7), 224, stride=2)
    yield conv(3, 32, (3, 3), 224, stride=2)
    for inputs, outputs, size in ((64, 64, 56), (128, 128, 28), (512, 512, 7)):
        yield conv(inputs, outputs, (3, 3), size)
    for inputs, outputs, size in ((64, 256, 56), (32, 16, 112), (160, 960, 7), (1024, 256, 14)):
        yield conv(inputs, outputs, (1, 1), size)
    for inputs, outputs in ((960, 240), (240, 960), (96, 24), (24, 96), (16, 8), (1280, 1000)):
        yield conv(inputs, outputs, (1, 1), 1)
    yield conv(8, 8, (3, 3), 28)
    yield conv(8, 8, (1, 1), 7)
    yield conv(64, 64, (3,), 200)
    yield conv(256, 256, (1,), 200)
    yield conv(3, 64, (3, 3, 3), 32)
    yield conv(64, 64, (3, 3, 3), 14)
    yield conv(128, 128, (1, 1, 1), 14)


def transposed_cases() -> Iterator[OpSpec]:
    for inputs, outputs, size in ((64, 32, 28), (256, 128, 14), (16, 16, 28)):
        yield conv(inputs, outputs, (2, 2), size, stride=2, padding=0, transposed=True)
        yield conv(inputs, outputs, (3, 3), size, stride=2, padding=1, transposed=True)
    yield conv(64, 32, (3, 3), 28, stride=2, padding=1, output_padding=1, transposed=True)
    yield conv(128, 128, (4, 4), 14, stride=2, padding=1, transposed=True, groups=128)
    yield conv(64, 64, (4,), 100, stride=2, padding=1, transposed=True)


SUITES: dict[str, Callable[[], Iterator[OpSpec]]] = {
    "linear": linear_cases,
    "dynamic": dynamic_cases,
    "depthwise": depthwise_cases,
    "few": few_cases,
    "traps": trap_cases,
    "grouped": grouped_cases,
    "conv": conv_cases,
    "transposed": transposed_cases,
}


def quantized_weight(spec: OpSpec, generator: torch.Generator) -> torch.Tensor:
    import torch

    if spec.op == "linear":
        shape: tuple[int, ...] = (spec.out_channels, spec.in_channels)
    elif spec.transposed:
        shape = (spec.in_channels, spec.out_channels // spec.groups, *spec.kernel)
    else:
        shape = (spec.out_channels, spec.in_channels // spec.groups, *spec.kernel)
    # Small weights and 7-bit inputs: no engine can saturate, so all must give the same answer.
    weight = torch.randint(-60, 61, shape, generator=generator).float()
    if not spec.per_channel:
        return torch.quantize_per_tensor(weight, 1.0, 0, torch.qint8)
    n = spec.out_channels
    zeros = torch.zeros(n, dtype=torch.int64)
    return torch.quantize_per_channel(weight, torch.ones(n), zeros, 0, torch.qint8)


def quantized_input(spec: OpSpec, generator: torch.Generator) -> torch.Tensor:
    import torch

    if spec.op == "linear":
        x = torch.randint(0, 128, (spec.rows or 1, spec.in_channels), generator=generator)
    else:
        shape = (spec.batch or 1, spec.in_channels, *(spec.spatial or ()))
        x = torch.randint(0, 128, shape, generator=generator)
    x = x.float()
    if spec.dynamic:
        return x / 128
    formats = {2: torch.channels_last, 3: torch.channels_last_3d}
    if spec.dims in formats:
        x = x.contiguous(memory_format=formats[spec.dims])
    return torch.quantize_per_tensor(x, 1.0, 7, torch.quint8)


def pack(spec: OpSpec, engine: str, weight: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """The op on ``weight``, packed by ``engine``; the engine in force is put back."""
    import torch

    ops = torch.ops.quantized
    before = torch.backends.quantized.engine
    torch.backends.quantized.engine = engine
    try:
        if spec.op == "linear":
            packed = ops.linear_prepack(weight, None)
        elif spec.transposed:
            prepack = getattr(ops, f"conv_transpose{spec.dims}d_prepack")
            packed = prepack(
                weight,
                None,
                spec.stride,
                spec.padding,
                spec.output_padding,
                spec.dilation,
                spec.groups,
            )
        else:
            prepack = getattr(ops, f"{spec.op}_prepack")
            packed = prepack(weight, None, spec.stride, spec.padding, spec.dilation, spec.groups)
    finally:
        torch.backends.quantized.engine = before
    if spec.dynamic:
        return lambda x: ops.linear_dynamic(x, packed)
    fan_in = weight.numel() // spec.out_channels
    scale = math.sqrt(fan_in) * 75 * 35 / 30
    name = "linear" if spec.op == "linear" else spec.op
    run = getattr(ops, name.replace("conv", "conv_transpose") if spec.transposed else name)
    return lambda x: run(x, packed, scale, 128)


def reference(spec: OpSpec, weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """What the op should give, in float, before it is quantized."""
    import torch

    functional = torch.nn.functional
    if spec.dynamic:
        return functional.linear(x, weight.dequantize())
    x, w = x.dequantize(), weight.dequantize()
    if spec.op == "linear":
        return functional.linear(x, w)
    if spec.transposed:
        run = getattr(functional, spec.op.replace("conv", "conv_transpose"))
        rest = (spec.output_padding, spec.groups, spec.dilation)
        return run(x, w, None, spec.stride, spec.padding, *rest)
    run = getattr(functional, spec.op)
    return run(x, w, None, spec.stride, spec.padding, spec.dilation, spec.groups)


def right(result: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Within one step of the output scale; dynamic results are float, within 2% of the largest."""
    import torch

    if not result.is_quantized:
        return bool((result - wanted).abs().max() <= 0.02 * wanted.abs().max())
    codes = torch.quantize_per_tensor(wanted, result.q_scale(), result.q_zero_point(), result.dtype)
    return bool((result.int_repr().int() - codes.int_repr().int()).abs().max() <= 1)


def attempt(
    spec: OpSpec, engine: str, weight: torch.Tensor, x: torch.Tensor, wanted: torch.Tensor
) -> Callable[[], torch.Tensor] | str:
    """The call to time, or why there is none."""
    try:
        run = pack(spec, engine, weight)
        result = run(x)
    except RuntimeError:
        return "refused"
    return (lambda: run(x)) if right(result, wanted) else "WRONG"


def time_in_turn(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Microseconds a call, ``rounds`` figures each; a round lasts about half a millisecond."""
    loops = {}
    for name, call in calls.items():
        for _ in range(3):
            call()
        start = time.perf_counter()
        call()
        loops[name] = max(1, min(200, int(5e-4 / (time.perf_counter() - start))))
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            for _ in range(loops[name]):
                call()
            times[name].append((time.perf_counter() - start) / loops[name] * 1e6)
    return times


def stock_engine(spec: OpSpec) -> str:
    """PyTorch's own choice under "x86", on a CPU with AVX512-VNNI and symmetric weights."""
    if spec.op == "linear" or spec.groups > 100 or any(spec.output_padding):
        return "fbgemm"
    return "onednn"


def describe() -> str:
    import torch

    from x86quant.hardware.cpuid import identity

    cpu = identity()
    caps = {name: os.environ[name] for name in CAPS["avx2"] if name in os.environ}
    return (
        f"{cpu['brand_raw'] if cpu else platform.processor()}, torch {torch.__version__}, "
        f"{torch.get_num_threads()} thread(s), caps {caps or 'none'}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("suites", nargs="*", help=f"of {', '.join(SUITES)}; all if none given")
    parser.add_argument("--engines", default="fbgemm,onednn")
    parser.add_argument("--isa", choices=CAPS, help="keep both libraries at or below this level")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--csv", help="also append the figures to this file")
    args = parser.parse_args()
    unknown = set(args.suites) - set(SUITES)
    if unknown:
        parser.error(f"unknown suite {sorted(unknown)}; choose from {', '.join(SUITES)}")
    os.environ.update(CAPS.get(args.isa, {}))
    import torch

    warnings.filterwarnings("ignore", category=UserWarning)
    torch.set_num_threads(args.threads)
    engines = args.engines.split(",")
    print(describe())
    table = []
    for suite in args.suites or SUITES:
        print(f"\n{suite:<44}" + "".join(f"{e + ' µs':>12}{'min':>9}" for e in engines) + "  gain")
        for spec in SUITES[suite]():
            generator = torch.Generator().manual_seed(0)
            weight, x = quantized_weight(spec, generator), quantized_input(spec, generator)
            wanted = reference(spec, weight, x)
            tried = {e: attempt(spec, e, weight, x, wanted) for e in engines}
            times = time_in_turn({e: c for e, c in tried.items() if callable(c)}, args.rounds)
            median = {e: statistics.median(t) for e, t in times.items()}
            gain = median.get(stock_engine(spec), math.nan) / min(median.values(), default=math.nan)
            label = str(spec) + ("" if spec.spatial is None else f" @{spec.spatial[0]}")
            label += f" n{spec.batch}" if spec.spatial and spec.batch != 1 else ""
            figures = "".join(
                f"{median[e]:12.1f}{min(times[e]):9.1f}" if e in times else f"{tried[e]:>21}"
                for e in engines
            )
            print(f"{label:<44}{figures}{gain:6.2f}{' *' if gain > 1.15 else ''}", flush=True)
            level = args.isa or "own"
            table += [
                [level, args.threads, label, e, f"{median[e]:.1f}", f"{min(times[e]):.1f}"]
                for e in median
            ]
    if args.csv:
        new = not os.path.exists(args.csv)
        with open(args.csv, "a", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            if new:
                writer.writerow(["isa", "threads", "case", "engine", "median_us", "min_us"])
            writer.writerows(table)


if __name__ == "__main__":
    main()
