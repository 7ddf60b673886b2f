"""Random layers with adversarial weights through every legal kernel: is each within one step?

    python -m benchmarks.overflow_campaign --layers 20000
    X86QUANT_ISA=avx2 python -m benchmarks.overflow_campaign --layers 20000

The overflow proof says which kernels are legal for a layer's weights. Here each of these runs the
layer, behind the stock operators and in a compiled model, on activations that drive sums to their
ends, and is held against the reference. Layer number n of a seed is the same on every CPU, so that
``--first n --layers 1`` repeats it. The exit code is 1 when a kernel was wrong.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import faulthandler
import functools
import random
import sys
from collections.abc import Callable, Iterator

import torch
from torch import Generator, Tensor

import x86quant
from x86quant.hardware.cpu import cpu
from x86quant.kernels.probing.shared_sums import as_weight
from x86quant.kernels.saturation import weight_facts
from x86quant.spec import OpSpec
from x86quant.tuning.candidates import candidates
from x86quant.tuning.cases import supports
from x86quant.tuning.layer_shapes import input_shape, nonsense, with_rows
from x86quant.tuning.measurements import Caller
from x86quant.tuning.operands import (
    NARROW,
    X_SCALE,
    Operands,
    channels_last,
    exact_sums,
    with_expected,
)

CALLERS: tuple[Caller, ...] = ("stock", "graph")

#: Of a layer's sums, what one step of its output stands for at least. Fine enough that one pair
#: which saturates shows, coarse enough that 32-bit floats round to within a step.
_FINEST_STEP = 24


def _integers(low: int, high: int, shape: tuple[int, ...], generator: Generator) -> Tensor:
    return torch.randint(low, high + 1, shape, generator=generator)


def _repeated(*values: int) -> Callable[[int, int, Generator], Tensor]:
    """The same few weights again and again, along K."""

    def make(rows: int, length: int, generator: Generator) -> Tensor:
        times = -(-length // len(values))
        return torch.tensor(values).repeat(times)[:length].expand(rows, -1)

    return make


def _sorted(rows: int, length: int, generator: Generator) -> Tensor:
    return _integers(-128, 127, (rows, length), generator).sort(1).values


def _random(rows: int, length: int, generator: Generator) -> Tensor:
    return _integers(-128, 127, (rows, length), generator)


def _extremes(rows: int, length: int, generator: Generator) -> Tensor:
    return torch.tensor((-128, 0, 127))[_integers(0, 2, (rows, length), generator)]


def _just_safe(rows: int, length: int, generator: Generator) -> Tensor:
    """Neighbours along K add up to 128 or -128: the most that 16 bits hold for any activations."""
    first = _integers(1, 127, (rows, -(-length // 2)), generator)
    pairs = torch.stack((first, 128 - first), 2)
    sign = 2 * _integers(0, 1, (rows, pairs.shape[1], 1), generator) - 1
    return (pairs * sign).flatten(1)[:, :length]


def _just_unsafe(rows: int, length: int, generator: Generator) -> Tensor:
    """As above, but for one pair, which adds up to 129."""
    weights = _just_safe(rows, length, generator)
    start = int(_integers(0, max(0, length - 2), (1,), generator)) // 2 * 2
    weights[:, start : start + 2] = torch.tensor((64, 65))[: length - start]
    return weights


def _narrow(rows: int, length: int, generator: Generator) -> Tensor:
    """No two weights leave 16 bits, whichever they are."""
    return 128 * _integers(0, 1, (rows, length), generator) - 64


def _one_pair(rows: int, length: int, generator: Generator) -> Tensor:
    weights = torch.zeros(rows, length, dtype=torch.long)
    both = _integers(0, length - 1, (rows, 2), generator)
    value = (127, -128)[int(_integers(0, 1, (1,), generator))]
    return weights.scatter(1, both, value)


#: Pattern -> output channels, K and a generator to ``[output channels, K]``.
_WEIGHTS: dict[str, Callable[[int, int, Generator], Tensor]] = {
    "all 127": _repeated(127),
    "all -128": _repeated(-128),
    "alternating": _repeated(127, -128),
    "alternating pairs": _repeated(127, 127, -128, -128),
    "sorted": _sorted,
    "random": _random,
    "extremes": _extremes,
    "just safe": _just_safe,
    "just unsafe": _just_unsafe,
    "narrow": _narrow,
    "one pair": _one_pair,
}

#: Pattern -> a shape and a generator to codes.
_ACTIVATIONS: dict[str, Callable[[tuple[int, ...], Generator], Tensor]] = {
    "all 255": lambda shape, generator: torch.full(shape, 255),
    "0 or 255": lambda shape, generator: 255 * _integers(0, 1, shape, generator),
    "random": lambda shape, generator: _integers(0, 255, shape, generator),
}


@dataclasses.dataclass(frozen=True)
class Layer:
    """One layer: an op, the patterns of its weights and activations, and the seed of both."""

    number: int
    spec: OpSpec
    weights: str
    activations: str
    seed: int

    def operands(self, weights: tuple[int, int]) -> Operands:
        """Its operands; with half the weights where narrow ones are asked for."""
        spec, generator = self.spec, torch.Generator().manual_seed(self.seed)
        length = spec.in_channels // spec.groups
        for side in spec.kernel:
            length *= side
        rows = _WEIGHTS[self.weights](spec.out_channels, length, generator)
        if weights == NARROW:
            rows = torch.div(rows, 2, rounding_mode="trunc")
        weight = as_weight(spec, rows.to(torch.int8))
        codes = _ACTIVATIONS[self.activations](input_shape(spec), generator)
        x = channels_last(codes.to(torch.uint8))
        scales = torch.rand(spec.out_channels if spec.per_channel else 1, generator=generator) + 0.5
        facts = weight_facts(weight, groups=spec.groups, transposed=spec.transposed)
        no_bias = torch.zeros(spec.out_channels)
        raw = Operands(spec.replace(weights=facts), x, weight, scales, no_bias, 1.0, None, ())
        return with_expected(_focused(raw, fine=bool(_integers(0, 1, (1,), generator))))

    def __str__(self) -> str:
        return f"layer {self.number}, {self.spec}, weights {self.weights}, x {self.activations}"


def _focused(operands: Operands, fine: bool) -> Operands:
    """``operands`` whose bias moves each channel's usual sum to where an error either way shows.

    The step is as fine as floats allow, where codes far from the usual are cut off, or such that
    every sum fits into the codes there are.
    """
    sums = exact_sums(operands).movedim(1, 0).flatten(1).double()
    usual = sums.median(1, keepdim=True).values
    widest = 0.0 if fine else float((sums - usual).abs().max()) / 60
    scales = operands.weight_scale.double() * X_SCALE
    y_scale = float(scales.max()) * max(widest, _FINEST_STEP)
    middle = 60 if operands.spec.post_op == "relu" else 0  # codes above the zero point
    bias = (middle * y_scale - usual.squeeze(1) * scales).float()
    return dataclasses.replace(operands, bias=bias, y_scale=y_scale)


def layers(seed: int, first: int, count: int) -> Iterator[Layer]:
    """Layers number ``first`` to ``first + count``."""
    for number in range(first, first + count):
        draw = random.Random(f"{seed}/{number}")
        weights, activations = draw.choice(list(_WEIGHTS)), draw.choice(list(_ACTIVATIONS))
        yield Layer(number, _spec(draw), weights, activations, draw.randrange(2**31))


def _spec(draw: random.Random) -> OpSpec:
    """A small layer; around the shapes for which libraries have kernels of their own."""
    if draw.random() < 0.2:
        inputs, outputs = draw.choice((1, 7, 16, 37, 64, 130, 256)), draw.choice((1, 8, 16, 33, 64))
        return OpSpec(
            "linear", inputs, outputs, per_channel=draw.random() < 0.5, dynamic=False,
            rows=draw.choice((1, 1, 1, 1, 7, 16)), threads=1, post_op=draw.choice((None, "relu")),
        )  # fmt: skip
    while True:
        spec = _convolution(draw)
        if nonsense(spec) is None and 0 < (with_rows(spec).multiply_adds or 0) < 2**21:
            return with_rows(spec)


def _convolution(draw: random.Random) -> OpSpec:
    dims = draw.choice((1, 2, 2, 2, 2, 3))
    transposed = draw.random() < 0.1
    if draw.random() < 0.5:
        groups, per_group = draw.choice(((8, 1), (16, 1), (32, 1), (40, 1), (7, 1), (5, 3),
                                         (8, 2), (16, 2), (8, 4), (16, 4), (2, 4),
                                         (4, 8), (8, 8), (2, 16), (4, 16), (3, 6)))  # fmt: skip
        outputs = per_group * draw.choice((1, 1, 1, 2))
    else:
        groups, per_group = 1, draw.choice((1, 3, 4, 5, 8, 16, 17, 32, 48, 64))
        outputs = draw.choice((1, 8, 13, 16, 32, 64))
    side = draw.choice((1, 3, 3, 3, 3, 5, 7))
    # Most layers of networks are as square as their padding is "same".
    regular = draw.random() < 0.8

    def each(usual: int, *others: int) -> tuple[int, ...]:
        if regular:
            return (usual,) * dims
        return tuple(draw.choice((usual, *others)) for _ in range(dims))

    return OpSpec(
        ("conv1d", "conv2d", "conv3d")[dims - 1],  # type: ignore[arg-type]
        groups * per_group,
        groups * outputs,
        groups,
        each(side, 1, 2, 3),
        each(draw.choice((1, 1, 2)), 1, 2, 3),
        each((side - 1) // 2, 0, 1),
        each(1, 2),
        (0,) * dims,
        transposed=transposed,
        per_channel=not transposed,
        dynamic=False,
        batch=draw.choice((1,) * 7 + (2,)),
        spatial=tuple(draw.randint(3, (20, 14, 6)[dims - 1]) for _ in range(dims)),
        threads=1,
        post_op=None if transposed else draw.choice((None, "relu")),
    )


@dataclasses.dataclass
class Outcome:
    """How often each kernel ran, and where one was wrong."""

    layers: int = 0
    runs: collections.Counter[tuple[Caller, str]] = dataclasses.field(
        default_factory=collections.Counter
    )
    wrong: list[str] = dataclasses.field(default_factory=list)

    def __str__(self) -> str:
        counts = ", ".join(
            f"{caller} {name} {n}" for (caller, name), n in sorted(self.runs.items())
        )
        return (
            f"{cpu().isa}: {self.layers} layers, {self.runs.total()} runs, "
            f"{len(self.wrong)} wrong ({counts})"
        )


def check(layer: Layer, outcome: Outcome) -> None:
    """Run ``layer`` by every legal kernel, and note which is wrong."""
    outcome.layers += 1
    operands = functools.cache(layer.operands)
    for caller in CALLERS:
        if not supports(caller, layer.spec):
            continue
        for candidate in candidates(caller, operands):
            if candidate.make is None:
                continue
            outcome.runs[caller, candidate.name] += 1
            assert candidate.operands is not None
            difference = candidate.operands.difference(candidate.make().result())
            if difference is not None:
                narrow = ", halved weights" if candidate.narrow else ""
                outcome.wrong.append(f"{layer}{narrow}: {caller} {candidate.name} is {difference}")


def main() -> int:
    """Run the campaign on this CPU, at the level that X86QUANT_ISA allows, and print the counts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--layers", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="number of the first layer")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    faulthandler.enable()  # a kernel that ends the process: the last line says which thousand
    outcome = Outcome()
    x86quant.use_rules(
        "pytorch-2.0"
    )  # every kernel is asked for by name; few rules are read faster
    for layer in layers(options.seed, options.first, options.layers):
        known = len(outcome.wrong)
        check(layer, outcome)
        print("\n".join(outcome.wrong[known:]), end="\n" if outcome.wrong[known:] else "")
        if outcome.layers % 1000 == 0:
            print(f"layers to {layer.number}: {outcome}", file=sys.stderr, flush=True)
    print(outcome)
    return 1 if outcome.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
