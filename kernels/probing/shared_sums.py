"""Which products share a 16-bit sum? Asks FBGEMM, oneDNN and QNNPACK.

A layer whose activations are all 255 gets one weight of 127, or -128, and others of half of that.
Where two such products are added in 16 bits, the sum saturates, or wraps, and the output is wrong;
otherwise it is exact. Every output channel holds another question. Where even a layer of nothing
but extreme weights is right, no two of its products share a sum.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Iterator
from typing import Literal

import torch
from torch import Tensor

from x86quant.hardware.cpu import Cpu
from x86quant.spec import OpSpec

from .. import fbgemm, reference, saturation
from .libraries import LIBRARIES
from .stock_run import run

Pair = tuple[int, int]
#: Whether a kernel is to be asked of a layer at all.
Legal = Callable[[OpSpec], bool]

Y_ZERO_POINT = 120
_EXTREMES = (127, -128)
# 255 makes padding as large as the activations, and every exact sum 0.
_ZERO_POINTS = (0, 255)


def _conv(
    op: Literal["conv1d", "conv2d", "conv3d"],
    channels: int,
    out: int | None = None,
    *,
    groups: int = 1,
    k: int = 3,
    stride: int = 1,
    transposed: bool = False,
) -> OpSpec:
    n = int(op[4])
    return OpSpec(
        op,
        channels,
        out or channels,
        groups,
        (k,) * n,
        (stride,) * n,
        (k // 2,) * n,
        (1,) * n,
        transposed=transposed,
        per_channel=False,
        bias=False,
    )


def _linear(channels: int, out: int) -> OpSpec:
    return OpSpec("linear", channels, out, per_channel=False, bias=False)


LINEARS = (_linear(9, 4), _linear(37, 16), _linear(64, 33), _linear(96, 64))
DENSE = (
    _conv("conv2d", 9, k=1),
    _conv("conv2d", 64, k=1),
    _conv("conv2d", 64, k=1, stride=2),
    _conv("conv2d", 5, 8),
    _conv("conv2d", 8, 16, stride=2),
    _conv("conv2d", 16, 33),
    _conv("conv1d", 5, 16),
    _conv("conv1d", 16),
    _conv("conv3d", 3, 8),
)
TRANSPOSED = (
    _conv("conv2d", 5, transposed=True),
    _conv("conv2d", 8, transposed=True),
    _conv("conv2d", 16, stride=2, transposed=True),
    _conv("conv1d", 16, transposed=True),
)
GROUPED = (
    _conv("conv2d", 10, groups=2),
    _conv("conv2d", 24, 48, groups=4),
    _conv("conv2d", 7, groups=7),
    _conv("conv2d", 8, 24, groups=8),
    _conv("conv1d", 16, groups=2),
    *(
        _conv("conv2d", channels, groups=groups, stride=stride)
        for channels, groups in ((16, 8), (32, 8), (32, 4), (64, 4))
        for stride in (1, 2)
    ),
    _conv("conv3d", 16, groups=8),
    _conv("conv3d", 32, groups=8),
    _conv("conv3d", 16, groups=2),
    _conv("conv3d", 32, groups=2),
)
DEPTHWISE = (
    _conv("conv2d", 8, groups=8),
    _conv("conv2d", 16, groups=16, stride=2),
    _conv("conv2d", 32, groups=32),
    _conv("conv2d", 40, groups=40),
    _conv("conv2d", 8, 16, groups=8),
    _conv("conv2d", 16, 32, groups=16),
    _conv("conv2d", 16, groups=16, k=5),
    _conv("conv2d", 16, groups=16, k=7),
    _conv("conv1d", 16, groups=16),
    _conv("conv1d", 32, groups=32, k=7),
    _conv("conv3d", 8, groups=8),
    _conv("conv3d", 32, groups=32),
)
SHAPES = (*LINEARS, *DENSE, *TRANSPOSED, *GROUPED, *DEPTHWISE)


@dataclasses.dataclass(frozen=True)
class Answer:
    """What the layers of one family showed."""

    kernel: str
    family: str
    instructions: str
    layout: str
    layers: int
    pairs_asked: int
    pairs_shared: int

    def __str__(self) -> str:
        return (
            f"{self.kernel:8} {self.family:10} {self.instructions:12} {self.layout:5} "
            f"{self.layers} layers, {self.pairs_shared} of {self.pairs_asked} pairs share a sum"
        )


def family(kernel: str, spec: OpSpec) -> str:
    """The family ``spec`` is recorded under: FBGEMM's path, or the kind of layer."""
    return fbgemm.path(spec) if kernel == "fbgemm" else saturation.kind(spec)


def instructions(kernel: str, name: str, here: Cpu) -> str:
    """What ``kernel`` computes the family ``name`` with on this CPU, as recorded."""
    return fbgemm.instructions(name, here) if kernel == "fbgemm" else here.isa  # type: ignore[arg-type]


def probe(here: Cpu, only: Collection[str] = ()) -> Iterator[Answer]:
    """Every family of every kernel that can be asked on this CPU; or those of ``only``."""
    for kernel in LIBRARIES:
        for name, specs in families(kernel, here).items():
            if not only or {kernel, f"{kernel}/{name}"}.intersection(only):
                yield _probe_family(kernel, name, specs, here)


def families(kernel: str, here: Cpu) -> dict[str, list[OpSpec]]:
    """The layers that ``kernel`` is asked about on this CPU, by family."""
    found: dict[str, list[OpSpec]] = {}
    for spec in SHAPES:
        found.setdefault(family(kernel, spec), []).append(spec)
    return {
        name: specs
        for name, specs in found.items()
        if instructions(kernel, name, here) != fbgemm.CAPPED
    }


def _probe_family(kernel: str, name: str, specs: list[OpSpec], here: Cpu) -> Answer:
    layouts, asked, shared = [], 0, 0
    for spec in specs:
        pairs = shared_pairs(kernel, spec)
        layouts.append(layout_of(kernel, pairs))
        asked += math.comb(length_of(spec), 2)
        shared += len(pairs)
    layout = max(layouts, key=saturation.LAYOUTS.index)
    how = instructions(kernel, name, here)
    return Answer(kernel, name, how, layout, len(specs), asked, shared)


def layout_of(kernel: str, pairs: set[Pair]) -> str:
    """The narrowest layout that covers ``pairs``."""
    if not pairs:
        return saturation.NONE
    neighbours = all(left % 2 == 0 and right == left + 1 for left, right in pairs)
    # oneDNN's layout is chosen by sizes that are unknown when weights are packed, and another
    # size may have another one.
    return saturation.TAPS if neighbours and kernel != "onednn" else saturation.ANY


def shared_pairs(kernel: str, spec: OpSpec) -> set[Pair]:
    """Pairs of weights, counted along K as ``saturation.TAPS`` has it, whose products share a sum.

    Raises:
        ValueError: the kernel is wrong even where one weight stands alone, or more than two
            products share one sum, which no layout describes.
    """
    length = length_of(spec)
    alone = torch.eye(length, dtype=torch.bool)
    nobody = torch.zeros_like(alone)
    if _wrong(kernel, spec, alone, nobody).any():
        raise ValueError(f"{kernel} computes {spec} wrongly whatever its weights")
    if not _wrong(kernel, spec, ~nobody[:1], nobody[:1]).any():
        return set()
    if _wrong(kernel, spec, nobody[:1], ~nobody[:1]).any():
        raise ValueError(f"{kernel} adds more than two products of {spec} in 16 bits")
    # So a weight has one partner at most. One question tells whether, and one more for each
    # binary digit of its number which.
    has_partner = _wrong(kernel, spec, alone, ~alone)
    partner = torch.zeros(length, dtype=torch.long)
    for digit in range(length.bit_length()):
        those = (torch.arange(length) >> digit & 1).bool()
        partner += _wrong(kernel, spec, alone, those & ~alone).long() << digit
    found = {(i, int(partner[i])) for i in range(length) if has_partner[i]}
    if any((right, left) not in found for left, right in found):
        raise ValueError(f"{kernel} answered with pairs of {spec} that contradict one another")
    return {(left, right) for left, right in found if left < right}


def length_of(spec: OpSpec) -> int:
    """The products of one output."""
    return spec.in_channels // spec.groups * math.prod(spec.kernel)


def _wrong(kernel: str, spec: OpSpec, extreme: Tensor, half: Tensor) -> Tensor:
    """For each row of K weights, whether a channel of such weights comes out wrong.

    Weights are at their extreme, at half of it, or 0. Two halves fit into 16 bits, an extreme and
    a half do not.
    """
    wrong = torch.zeros(len(extreme), dtype=torch.bool)
    for value in _EXTREMES:
        weights = extreme.to(torch.int8) * value + half.to(torch.int8) * int(value / 2 + 0.5)
        for start in range(0, len(weights), spec.out_channels):
            some = weights[start : start + spec.out_channels]
            # A single row is asked of every channel.
            rows = some.expand(spec.out_channels, -1) if len(weights) == 1 else some
            filled = torch.zeros(spec.out_channels, weights.shape[1], dtype=torch.int8)
            filled[: len(rows)] = rows
            weight = as_weight(spec, filled)
            for zero_point in _ZERO_POINTS:
                off = _wrong_channels(kernel, spec, weight, zero_point)
                if len(weights) == 1:
                    wrong |= off.any()
                else:
                    wrong[start : start + len(some)] |= off[: len(some)]
    return wrong


def as_weight(spec: OpSpec, rows: Tensor) -> Tensor:
    """``[output channels, K]`` as the weight of ``spec``: the inverse of the proof's order."""
    if spec.op == "linear":
        return rows
    in_group, out_group = spec.in_channels // spec.groups, spec.out_channels // spec.groups
    weight = rows.view(spec.out_channels, -1, in_group).transpose(1, 2)
    if spec.transposed:
        weight = weight.reshape(spec.groups, out_group, in_group, -1).transpose(1, 2)
        weight = weight.reshape(spec.in_channels, out_group, -1)
    return weight.reshape(*weight.shape[:2], *spec.kernel).contiguous()


def exact_sums(spec: OpSpec, x: Tensor, zero_point: int, weight: Tensor) -> Tensor:
    """The accumulators of ``spec`` as the reference has them."""
    if spec.op == "linear":
        return reference.accumulate_linear(x, zero_point, weight)
    return reference.accumulate_conv(
        x,
        zero_point,
        weight,
        stride=spec.stride,
        padding=spec.padding,
        dilation=spec.dilation,
        groups=spec.groups,
        transposed=spec.transposed,
        output_padding=(0,) * spec.dims,
    )


def _wrong_channels(kernel: str, spec: OpSpec, weight: Tensor, zero_point: int) -> Tensor:
    x = torch.full((2, spec.in_channels, *(k + 3 for k in spec.kernel)), 255, dtype=torch.uint8)
    sums = exact_sums(spec, x, zero_point, weight)
    # A code is at most a hundredth of the largest sum, and the largest error more than half of it.
    scale = max(float(sums.abs().max()), 65024.0) / 100
    want = (sums.double() / scale).round() + Y_ZERO_POINT
    found = run(kernel, spec, x, weight, zero_point, scale, Y_ZERO_POINT).double()
    off = (found - want.clamp(0, 255)).abs() > 1
    channels: Tensor = off.movedim(1, 0).flatten(1).any(1)
    return channels
