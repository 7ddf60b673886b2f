"""Layers drawn at random, run by a library and held against the reference.

Activations and weights are such that no two products overflow 16 bits, whatever the layout: that
question is asked by ``shared_sums``.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator

import torch
from torch import Tensor

from x86quant.spec import OpSpec

from .. import reference
from ..base import Kernel
from . import shared_sums
from .stock_run import run

#: Of each family of each op.
LAYERS = 64
_SEED = 20

#: Half of what int8 holds: two products of 255 and 64 fit into 16 bits.
_LARGEST_WEIGHT = 64


@dataclasses.dataclass(frozen=True)
class Wrong:
    """A layer that a kernel computed wrongly."""

    steps: int
    spec: OpSpec

    def __str__(self) -> str:
        return f"{self.steps} steps off on {self.spec}"


def drawn(op: str, count: int, numbers: random.Random) -> Iterator[OpSpec]:
    """``count`` layers of ``op`` with sizes as networks have them, and odd ones."""
    for _ in range(count):
        yield _linear(numbers) if op == "linear" else _conv(op, numbers)


def _linear(numbers: random.Random) -> OpSpec:
    inputs, outputs = (numbers.choice((1, 3, 8, 17, 32, 64, 100, 256)) for _ in range(2))
    return OpSpec("linear", inputs, outputs, per_channel=False, bias=False)


def _conv(op: str, numbers: random.Random) -> OpSpec:
    dims = int(op[4])
    groups = numbers.choice((1, 1, 1, 2, 4, 8, 16, 24))
    in_group = numbers.choice((1, 1, 2, 3, 4, 8, 16) if groups > 1 else (1, 3, 5, 8, 16, 32, 50))
    out_group = numbers.choice((1, 2, 4, 5) if groups > 1 else (1, 5, 8, 16, 33, 64))
    if groups > 1 and numbers.random() < 0.7:
        out_group = in_group
    k = numbers.choice((1, 3, 3, 5, 7) if dims < 3 else (1, 3, 3))
    stride = numbers.choice((1, 1, 2, 3))
    transposed = numbers.random() < 0.2
    padding = numbers.choice(((k - 1) // 2, (k - 1) // 2, 0))
    dilation = numbers.choice((1, 1, 1, 2))
    return OpSpec(
        op,  # type: ignore[arg-type]
        groups * in_group,
        groups * out_group,
        groups,
        (k,) * dims,
        (stride,) * dims,
        (padding,) * dims,
        (dilation,) * dims,
        transposed=transposed,
        per_channel=False,
        bias=False,
        spatial=tuple(k * dilation + numbers.randrange(1, 9) for _ in range(dims)),
        batch=numbers.choice((1, 1, 2)),
    )


def families(kernel: Kernel, legal: shared_sums.Legal) -> Iterator[tuple[str, str, list[OpSpec]]]:
    """Layers for each op and family of it that ``kernel`` has and that are ``legal``."""
    numbers = random.Random(_SEED)
    for op in ("linear", "conv1d", "conv2d", "conv3d"):
        of_family: dict[str, list[OpSpec]] = {}
        for spec in drawn(op, LAYERS * 12, numbers):
            kept = of_family.setdefault(shared_sums.family(kernel.name, spec), [])
            if len(kept) < LAYERS and legal(spec):
                kept.append(spec)
        for family, specs in of_family.items():
            yield op, family, specs


def first_wrong(kernel: str, specs: list[OpSpec]) -> Wrong | None:
    """The first of ``specs`` that ``kernel`` computes wrongly."""
    generator = torch.Generator().manual_seed(_SEED)
    for spec in specs:
        steps = _steps_off(kernel, spec, generator)
        if steps > 1:
            return Wrong(steps, spec)
    return None


def _steps_off(kernel: str, spec: OpSpec, generator: torch.Generator) -> int:
    x = _random(0, 256, (spec.batch or 5, spec.in_channels, *(spec.spatial or ())), generator)
    x = x.to(torch.uint8)
    rows = _random(
        -_LARGEST_WEIGHT,
        _LARGEST_WEIGHT,
        (spec.out_channels, shared_sums.length_of(spec)),
        generator,
    )
    weight = shared_sums.as_weight(spec, rows.to(torch.int8))
    zero_point = int(_random(0, 256, (1,), generator))
    sums = shared_sums.exact_sums(spec, x, zero_point, weight)
    scale = max(float(sums.abs().max()), 1.0) / 100
    want = reference.requantize(sums, 1 / scale, None, shared_sums.Y_ZERO_POINT, channel_axis=1)
    found = run(kernel, spec, x, weight, zero_point, scale, shared_sums.Y_ZERO_POINT)
    return int((found.int() - want.int()).abs().max())


def _random(low: int, high: int, size: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randint(low, high, size, generator=generator)
