"""What a plan is: tensors in an arena and steps on them, as plain values that print."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from x86quant.errors import UnsupportedError
from x86quant.routing.routes import Choice
from x86quant.routing.sizes import Sizes
from x86quant.runtime import layout


class NoNativeFormError(UnsupportedError):
    """A node that a segment cannot run on inputs of these shapes; torch can."""

    def __init__(self, node: str, reason: str) -> None:
        super().__init__(f"{node} cannot run natively: {reason}")
        self.node = node
        self.reason = reason


@dataclasses.dataclass(eq=False, slots=True)
class Buffer:
    """A stretch of memory that several tensors may share.

    Attributes:
        name: the node it was made for.
        nbytes: its size.
        first, last: the steps that write it first and use it last.
        base: 0 for the arena, 1… for inputs, then outputs.
        offset: bytes from the base, set by the memory planner for buffers of the arena.
        starts: for the rows of tokens that are present, which come first, where each sentence
            begins and where the last one ends, int64; None: all rows count.
    """

    name: str
    nbytes: int
    first: int
    last: int
    base: int = 0
    offset: int = 0
    starts: Value | None = None


@dataclasses.dataclass(eq=False, slots=True)  # frozen ones take three times as long to make
class Value:
    """A tensor: a buffer, and how its elements lie in it.

    ``meta`` is a tensor without data whose shape, strides and storage offset say so, and to which
    views can be applied.
    """

    buffer: Buffer
    meta: torch.Tensor
    _image: tuple[layout.Words, layout.Words] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Its logical shape."""
        return tuple(self.meta.shape)

    @property
    def image(self) -> tuple[layout.Words, layout.Words]:
        """Sizes and strides as of a tensor [N, C, *spatial]; what writes and what reads it asks."""
        if self._image is None:  # functools.cached_property takes a lock for it
            self._image = layout.image(self.meta)
        return self._image

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return self.meta.numel() * self.meta.element_size()

    def __str__(self) -> str:
        size = "×".join(map(str, self.shape))
        return f"{self.buffer.name}[{size}]"


@dataclasses.dataclass(eq=False)
class Step:
    """One thing a segment does.

    Attributes:
        name: the node of the graph.
        layer: the module of the model it came from.
        op: "conv", "linear", "add", "copy", …
        inputs: what it reads.
        output, others: what it writes; most steps have one output.
        answer: for convolutions and linears, what the router chose for inputs of such sizes.
        sizes: the sizes of this one's input.
        multiply_adds: products of the op, for its share of the roofline.
        weight_bytes: bytes of weights it streams.
    """

    name: str
    layer: str
    op: str
    inputs: tuple[Value, ...]
    output: Value
    others: tuple[Value, ...] = ()
    answer: Choice | None = None
    sizes: Sizes | None = None
    multiply_adds: int = 0
    weight_bytes: int = 0

    @property
    def kernel(self) -> str:
        """The kernel that runs it."""
        return "native" if self.answer is None else self.answer.kernel

    @functools.cached_property
    def choice(self) -> Choice | None:
        """For convolutions and linears, the kernel and why."""
        if self.answer is None or self.sizes is None:
            return None
        return dataclasses.replace(self.answer, spec=self.sizes.of(self.answer.spec))

    @property
    def moved_bytes(self) -> int:
        """Bytes read and written once."""
        tensors = (*self.inputs, self.output, *self.others)
        return self.weight_bytes + sum(value.nbytes for value in tensors)

    def __str__(self) -> str:
        inputs = ", ".join(map(str, self.inputs))
        return f"{self.op:<18} {self.output} ← {inputs}  [{self.kernel}]"


@dataclasses.dataclass(frozen=True)
class BatchStage:
    """Steps that run one after another for each part of a batch.

    Attributes:
        end: the number of the first step behind it.
        images: of a part.
        parts: how many.
    """

    end: int
    images: int
    parts: int


def stretches(stages: Sequence[BatchStage]) -> list[tuple[int, BatchStage]]:
    """Each stage with the number of its first step."""
    return list(zip([0, *(stage.end for stage in stages)], stages, strict=False))


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a segment runs for inputs of one shape.

    Attributes:
        steps: in order; each as it runs for one part of its stage.
        peak_bytes: the size of the arena; with stages, of one part.
        naive_bytes: what all tensors of the batch take side by side.
        numbers: for each output, None for a tensor, or a 1-tuple with a number.
        program: the compiled form, an object of the extension.
        stages: where the batch runs in parts: of how many images, and from where to where.
        kept_bytes: what one stage leaves to another, of the whole batch.
        drafts: where the steps of the stages come from; kept, so that plans for other batches need
            not draft them again.
    """

    steps: tuple[Step, ...]
    peak_bytes: int
    naive_bytes: int
    numbers: tuple[tuple[Any] | None, ...]
    program: Any
    stages: tuple[BatchStage, ...] = ()
    kept_bytes: int = 0
    drafts: tuple[Any, ...] = dataclasses.field(default=(), repr=False, compare=False)

    @property
    def parts(self) -> int:
        """The most parts of the batch that run one after or beside another."""
        return max((stage.parts for stage in self.stages), default=1)

    def parts_of_steps(self) -> list[int]:
        """For how many parts each step runs."""
        if not self.stages:
            return [1] * len(self.steps)
        return [
            stage.parts for start, stage in stretches(self.stages) for _ in range(start, stage.end)
        ]

    def run_bytes(self, threads: int) -> int:
        """The memory that a run works on: an arena for each thread with parts, what is kept."""
        return self.peak_bytes * min(self.parts, threads) + self.kept_bytes

    def of_parts(self, times: int) -> Plan:
        """The same for a batch whose first stage has so many parts; steps are shared."""
        before = self.stages[0].parts
        return dataclasses.replace(
            self,
            naive_bytes=self.naive_bytes * times // before,
            program=self.program.of_parts(times),
            stages=tuple(
                dataclasses.replace(stage, parts=stage.parts * times // before)
                for stage in self.stages
            ),
            kept_bytes=self.kept_bytes * times // before,
        )

    def gather(self, tensors: list[torch.Tensor]) -> list[Any]:
        """All outputs: ``tensors`` that the program returned, and numbers, in their order."""
        if not any(self.numbers):
            return list(tensors)
        remaining = iter(tensors)
        return [next(remaining) if n is None else n[0] for n in self.numbers]

    def __str__(self) -> str:
        saved = self.naive_bytes / max(self.run_bytes(1), 1)
        kept = f" and {self.kept_bytes / 1024:.0f} KiB between stages" if self.kept_bytes else ""
        head = (
            f"{len(self.steps)} steps, arena {self.peak_bytes / 1024:.0f} KiB{kept} "
            f"({saved:.1f} times less than {self.naive_bytes / 1024:.0f} KiB side by side)"
        )
        lines = [*map(str, self.steps)]
        for start, stage in reversed(stretches(self.stages)):
            lines.insert(start, f"in {stage.parts} parts of {stage.images}:")
        return "\n".join([head, *lines])


def multiply_adds(output: tuple[int, ...], weight: tuple[int, ...], spatial_of_input: int) -> int:
    """Products of a convolution with ``weight`` (out, in / groups, *kernel) and this output.

    ``spatial_of_input`` is 0, or for a transposed convolution the pixels of one input image.
    """
    pixels = spatial_of_input or math.prod(output[2:])
    return output[0] * pixels * math.prod(weight)


#: A cache line: kernels are up to a third slower on tensors that start off one.
ALIGNMENT = 64


def assign_offsets(buffers: Sequence[Buffer]) -> int:
    """Give each buffer an offset such that those in use at the same step do not overlap.

    The largest come first, each at the lowest place that is free during its life. Returns the
    size of the arena.
    """
    in_use: list[list[Buffer]] = [[] for _ in range(max((b.last for b in buffers), default=0) + 1)]
    for buffer in sorted(buffers, key=lambda b: (-b.nbytes, b.first)):
        steps = in_use[buffer.first : buffer.last + 1]  # few: all other buffers would be many
        neighbours = {id(other): other for others in steps for other in others}
        buffer.offset = _lowest_gap(neighbours.values(), aligned(buffer.nbytes))
        for others in steps:
            others.append(buffer)
    return max((b.offset + aligned(b.nbytes) for b in buffers), default=0)


def aligned(nbytes: int) -> int:
    """``nbytes`` rounded up to whole cache lines."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _lowest_gap(neighbours: Iterable[Buffer], nbytes: int) -> int:
    end = 0
    for other in sorted(neighbours, key=lambda b: b.offset):
        if other.offset - end >= nbytes:
            break
        end = max(end, other.offset + aligned(other.nbytes))
    return end
