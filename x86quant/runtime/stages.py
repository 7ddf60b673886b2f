"""In parts of how many images each stretch of a network runs a batch, and the plan for that.

Early layers have large activations and few weights: one image by itself stays in a core's second-
level cache from layer to layer. Late ones have many weights, which every part loads again. So a
batch may run in *stages*: all of its parts go through some steps, then larger parts through the
rest. What is weighed is the bytes that come from beyond that cache.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Collection, Hashable, MutableMapping, Sequence

import torch
from torch.fx import GraphModule

from x86quant.runtime.draft import Draft
from x86quant.runtime.packs import Packs
from x86quant.runtime.plan import BatchStage, Buffer, Plan, Step, aligned, assign_offsets, stretches
from x86quant.runtime.planner import draft_segment, new_program


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


def plan_stages(
    graph_module: GraphModule,
    inputs: Sequence[torch.Tensor],
    packs: Packs,
    stages: Sequence[BatchStage],
    known: MutableMapping[int, Draft] | None = None,
) -> Plan | None:
    """Plan ``graph_module`` for a batch like ``inputs``; None where the stages do not fit together.

    A stage has the steps of a draft for as many images as its parts have. So all drafts must have
    the same steps, and what one stage leaves to another must lie image after image. Drafts for
    numbers of images that other batches of such inputs have, too, are taken from and left in
    ``known``; the plan keeps its own.
    """
    batch = inputs[0].shape[0]
    known = {} if known is None else known
    drafts: dict[int, Draft] = {}
    for images in {stage.images for stage in stages}:
        draft = known.get(images)
        if draft is None:
            part = [x[:images] for x in inputs]
            draft = known[images] = draft_segment(graph_module, part, packs, 1, is_part=True)
        drafts[images] = draft
    results = {images: draft.results() for images, draft in drafts.items()}
    last = drafts[stages[-1].images]
    stages = [*stages[:-1], dataclasses.replace(stages[-1], end=len(last.steps))]
    ends = [stage.end for stage in stages]
    lives = [(bisect.bisect(ends, b.first), bisect.bisect(ends, b.last)) for b in last.buffers]
    shared = [i for i, (first, until) in enumerate(lives) if first != until]
    if len(drafts) > 1:
        lie = [_lie_of_images(draft, images, shared) for images, draft in drafts.items()]
        if None in lie or any(one != lie[0] for one in lie):
            return None

    outputs = [result.meta for result in results[stages[-1].images]]
    first_kept = 1 + len(inputs) + len(outputs)
    for draft in drafts.values():
        for buffer in draft.buffers:
            if buffer.base >= first_kept:  # another plan kept it
                buffer.base = 0
    kept = [i for i in shared if last.buffers[i].base == 0]
    kept_bytes = [last.buffers[i].nbytes // stages[-1].images * batch for i in kept]
    for draft in drafts.values():
        for place, i in enumerate(kept, first_kept):
            draft.buffers[i].base, draft.buffers[i].offset = place, 0
    peak = naive = 0
    for number, stage in enumerate(stages):
        buffers = zip(drafts[stage.images].buffers, lives, strict=True)
        own = [b for b, (first, _) in buffers if b.base == 0 and first == number]
        peak = max(peak, assign_offsets(own))
        naive += sum(aligned(b.nbytes) for b in own) * stage.parts

    program = new_program(last, peak, inputs, results[stages[-1].images], batch)
    program.keep(kept_bytes)
    image_bytes = [x.stride(0) * x.element_size() for x in (*inputs, *outputs)]
    image_bytes += [nbytes // batch for nbytes in kept_bytes]
    steps: list[Step] = []
    for start, stage in stretches(stages):
        draft = drafts[stage.images]
        steps += draft.steps[start : stage.end]
        for step in draft.native_steps[start : stage.end]:
            packs.programs.add(program, step)
        program.repeat(stage.parts, [nbytes * stage.images for nbytes in image_bytes])
    program.check_reach()
    kept_all = sum(map(aligned, kept_bytes))
    numbers = (None,) * len(outputs)
    return Plan(
        tuple(steps),
        peak,
        naive + kept_all,
        numbers,
        program,
        tuple(stages),
        kept_all,
        tuple(drafts.values()),
    )


def _lie_of_images(draft: Draft, images: int, shared: Collection[int]) -> list[Hashable] | None:
    """The steps, and how an image lies in ``shared`` buffers; None if not behind the one before."""
    numbers = {id(draft.buffers[i]): i for i in shared}
    found: list[Hashable] = []
    for step in draft.steps:
        found.append((step.name, step.op))
        for value in (*step.inputs, step.output, *step.others):
            number = numbers.get(id(value.buffer))
            if number is None:
                continue
            meta, nbytes = value.meta, value.buffer.nbytes
            is_dense = images == 1 or meta.stride(0) * meta.element_size() * images == nbytes
            if meta.shape[0] != images or not is_dense:
                return None
            inner = zip(meta.shape[1:], meta.stride()[1:], strict=True)
            lies = tuple(x for x in inner if x[0] > 1)
            found.append((number, nbytes // images, meta.storage_offset(), lies))
    return found
