"""In parts of how many images each stretch of a network runs a batch.

Early layers have large activations and few weights: one image by itself stays in a core's second-
level cache from layer to layer. Late ones have many weights, which every part loads again. So a
batch may run in *stages*: all of its parts go through some steps, then larger parts through the
rest. What is weighed is the bytes that come from beyond that cache.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from x86quant.runtime.plan import BatchStage, Buffer, Step, stretches


@dataclasses.dataclass(frozen=True, slots=True)
class StepBytes:
    """What a step touches.

    Attributes:
        weights: bytes of weights.
        activations: bytes of inputs and outputs, for one image.
        alive: bytes that steps before it leave to it or to later ones, for one image.
    """

    weights: int
    activations: int
    alive: int


def bytes_of_steps(steps: Sequence[Step], buffers: Sequence[Buffer], batch: int) -> list[StepBytes]:
    """Of the steps of a whole batch, for one image."""
    alive = [0] * (len(steps) + 1)
    for buffer in buffers:
        for index in range(buffer.first + 1, buffer.last + 1):
            alive[index] += buffer.nbytes // batch if buffer.base == 0 else 0
    return [
        StepBytes(step.weight_bytes, (step.moved_bytes - step.weight_bytes) // batch, live)
        for step, live in zip(steps, alive, strict=False)
    ]


class Costs:
    """What ``steps`` cost in parts of each size: computed once, for all batches of such images."""

    def __init__(self, steps: Sequence[StepBytes], cache: int) -> None:
        """``cache`` is what a core keeps to itself."""
        self.steps = steps
        #: Of ending a stage before each step: written by one stage, read by another.
        self.switching = [2 * step.alive for step in steps]
        self._cache = cache
        self._of: dict[int, list[float]] = {}

    def of(self, images: int) -> list[float]:
        """Each step's, in parts of so many images."""
        found = self._of.get(images)
        if found is None:
            found = self._of[images] = [beyond(step, images, self._cache) for step in self.steps]
        return found


def best_stages(costs: Costs, sizes: Sequence[int], batch: int) -> list[BatchStage]:
    """The cheapest way through the steps in parts of ``sizes``, which divide ``batch``."""
    sizes = sorted(sizes, reverse=True)  # of equals the larger: fewer calls
    best = [0.0] * len(sizes)  # of the best way so far that ends in each size
    ways: list[Sequence[int]] = []  # for each step, from which size the best way comes to each
    same = range(len(sizes))
    for moved, switching in zip(
        zip(*map(costs.of, sizes), strict=True), costs.switching, strict=True
    ):
        switched = min(best) + switching
        if switched < max(best):
            cheapest = best.index(min(best))
            ways.append([cheapest if switched < cost else i for i, cost in enumerate(best)])
            best = [min(cost, switched) for cost in best]
        else:
            ways.append(same)
        best = [cost + more for cost, more in zip(best, moved, strict=True)]
    return _stages_of(ways, best.index(min(best)), sizes, batch)


def one_stage(costs: Costs, sizes: Sequence[int], batch: int) -> list[BatchStage]:
    """The cheapest way in parts of one size."""
    best = min(sorted(sizes, reverse=True), key=lambda size: sum(costs.of(size)))
    return [BatchStage(len(costs.steps), best, batch // best)]


def streamed(steps: Sequence[StepBytes], stages: Sequence[BatchStage]) -> float:
    """Bytes of weights that are read for each image."""
    return sum(
        step.weights / stage.images
        for start, stage in stretches(stages)
        for step in steps[start : stage.end]
    )


def beyond(step: StepBytes, images: int, cache: int) -> float:
    """Bytes an image that come from beyond the cache: its share of the weights, what overflows."""
    return step.weights / images + max(0.0, step.activations - cache / images)


def _stages_of(
    ways: Sequence[Sequence[int]], last: int, sizes: Sequence[int], batch: int
) -> list[BatchStage]:
    """Backwards along the best way, which ends in size ``last``."""
    found: list[BatchStage] = []
    for index in range(len(ways) - 1, -1, -1):
        images = sizes[last]
        if not found or found[-1].images != images:
            found.append(BatchStage(index + 1, images, batch // images))
        last = ways[index][last]
    return found[::-1]
