"""Where buffers lie in the arena."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from x86quant.runtime.plan import Buffer

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
