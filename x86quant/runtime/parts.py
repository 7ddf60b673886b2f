"""Whether a batch is better run in parts, each by itself, from end to end or in stages.

A part that fits the second-level cache stays there from layer to layer, and threads that each have
parts of their own wait for each other once a stage instead of once a layer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from x86quant.hardware.cpu import cpu
from x86quant.lowering.graph_tools import is_op
from x86quant.runtime.draft import Draft
from x86quant.runtime.packs import Packs
from x86quant.runtime.plan import BatchStage, NoNativeFormError, Plan
from x86quant.runtime.planner import draft_segment, finished, plan_segment
from x86quant.runtime.shapes import infer_shapes
from x86quant.runtime.stages import (
    Costs,
    best_stages,
    bytes_of_steps,
    one_stage,
    plan_stages,
    streamed,
)

#: Products for each byte of weights that a part must do. With fewer, loading weights again for each
#: part costs more than it saves.
MIN_PRODUCTS_PER_WEIGHT = 32

#: The share of the threads' time that must be used: 3 parts keep 2 threads busy 3/4 of it.
MIN_BALANCE = 0.8

#: Images of a part that the cache does not hold, at most: weights are then a small cost, and the
#: plan for one batch serves its multiples.
MOST_IMAGES = 8

#: Kinds of images that are remembered.
_MAX_IMAGES = 1024


class BatchParts:
    """Plans of one graph: of whole batches, or of their parts where that is better."""

    def __init__(self, graph_module: GraphModule, packs: Packs) -> None:
        self._root = graph_module
        self._packs = packs
        self._images: dict[Hashable, _Image] = {}
        # Its first dimension may be that of steps, which come one after another; or of indices,
        # which offsets count from the first of all on.
        self._is_whole = any(
            is_op(node, "recurrent", "recurrent_last") or node.kwargs.get("offsets")
            for node in graph_module.graph.nodes
        )
        # The last plan of each kind of parts, for as long as somebody keeps it.
        self._of_parts = weakref.WeakValueDictionary[Hashable, Plan]()
        # Of the last batch that went in parts, in its last stage.
        self._images_of_part = 0
        (output,) = (node for node in graph_module.graph.nodes if node.op == "output")
        self._outputs = output.all_input_nodes

    def plan(self, inputs: Sequence[Any], threads: int, open_inputs: Sequence[Node] = ()) -> Plan:
        """The plan for ``inputs``; of those that are open any number of elements will do."""
        batch = _batch(inputs)
        if batch < 2 or self._is_whole:
            return plan_segment(self._root, inputs, self._packs, threads, open_inputs)
        key = tuple(_kind(x[:1]) for x in inputs)
        image, draft = self._images.get(key), None
        if image is None:
            image, draft = self._met(key, inputs, threads, batch)
        whole = None if draft is None or draft.is_part else draft
        shapes = None if whole is None else whole.shapes
        for stages in self._ways(inputs, image, threads, batch, shapes):
            plan = self._plan_of_parts(inputs, image, stages, threads)
            if plan is not None:
                self._images_of_part = stages[-1].images
                return plan
            image.takes_stages = False
        if whole is None:
            return plan_segment(self._root, inputs, self._packs, threads)
        return finished(whole, inputs)

    def _met(
        self, key: Hashable, inputs: Sequence[torch.Tensor], threads: int, batch: int
    ) -> tuple[_Image, Draft]:
        """What images not met before take, and the draft that says so, which may be wanted.

        It is of the whole batch, or of a part as large as other images had.
        """
        if len(self._images) >= _MAX_IMAGES:
            self._images.clear()
        size = self._images_of_part
        if size and batch % size == 0:
            with contextlib.suppress(RuntimeError, ValueError, IndexError, NoNativeFormError):
                few = [x[:size] for x in inputs]
                part = draft_segment(self._root, few, self._packs, 1, is_part=True)
                image = self._images[key] = _Image.of(part, size)
                image.drafts_by(self._packs.rules_seen)[size] = part
                return image, part
        whole = draft_segment(self._root, inputs, self._packs, threads)
        image = self._images[key] = _Image.of(whole, batch)
        return image, whole

    def _ways(
        self,
        inputs: Sequence[torch.Tensor],
        image: _Image,
        threads: int,
        batch: int,
        shapes: Mapping[Node, Any] | None,
    ) -> Sequence[Sequence[BatchStage]]:
        """In which parts the batch may run, the best way first; none where it is better whole.

        ``shapes`` are those of the whole batch, where they are known.
        """
        most = max(MOST_IMAGES, _core_bytes() // max(1, image.peak_bytes))
        sizes = _part_sizes(batch, threads, most)
        if not sizes:
            return ()
        of_one_size = one_stage(image.costs, sizes, batch)
        ways = [best_stages(image.costs, sizes, batch)] if image.takes_stages else []
        ways = [*(way for way in ways if len(way) > 1), of_one_size]
        if ways == [of_one_size] and of_one_size[0].parts == 1:
            return ()
        if image.multiply_adds < MIN_PRODUCTS_PER_WEIGHT * streamed(image.costs.steps, ways[0]):
            return ()
        if image.shapes is None:
            image.shapes = self._shapes_of_one([x[:1] for x in inputs])
        if shapes is None:
            shapes = infer_shapes(self._root, inputs)
        if not all(isinstance(shapes[node], torch.Size) for node in self._outputs):
            return ()
        return ways if _images_are_apart(image.shapes, shapes, batch) else ()

    def _plan_of_parts(
        self,
        inputs: Sequence[torch.Tensor],
        image: _Image,
        stages: Sequence[BatchStage],
        threads: int,
    ) -> Plan | None:
        """One part after another: a plan for other numbers of such parts serves, with its steps."""
        self._packs.follow_rules()
        cuts = tuple((stage.end, stage.images) for stage in stages)
        key = (threads, self._packs.rules_seen, cuts, *(_kind(x[:1]) for x in inputs))
        plan = self._of_parts.get(key)
        if plan is None:
            drafts = image.drafts_by(self._packs.rules_seen)
            plan = plan_stages(self._root, inputs, self._packs, stages, drafts)
        elif plan.stages[0].parts != stages[0].parts:
            plan = plan.of_parts(stages[0].parts)
        if plan is not None:
            self._of_parts[key] = plan
        return plan

    def _shapes_of_one(self, inputs: Sequence[torch.Tensor]) -> Mapping[Node, Any]:
        try:
            return infer_shapes(self._root, inputs)
        except (RuntimeError, ValueError, IndexError):
            return {}


@dataclasses.dataclass
class _Image:
    """What running one image by itself takes.

    Attributes:
        peak_bytes, multiply_adds: as of plans and steps.
        costs: of its steps.
        takes_stages: whether, for all that is known, it may run in stages.
        shapes: of every value, once somebody asked; none where it needs the others of its batch.
    """

    peak_bytes: int
    multiply_adds: int
    costs: Costs
    takes_stages: bool = True
    shapes: Mapping[Node, Any] | None = None
    _rules: int = 0
    _drafts: weakref.WeakValueDictionary[int, Draft] = dataclasses.field(
        default_factory=weakref.WeakValueDictionary
    )

    def drafts_by(self, rules: int) -> weakref.WeakValueDictionary[int, Draft]:
        """Of how many such images plans by these rules have drafts, while they are kept."""
        if self._rules != rules:
            self._drafts.clear()
            self._rules = rules
        return self._drafts

    @classmethod
    def of(cls, whole: Draft, batch: int) -> _Image:
        """Its share of a ``whole`` batch."""
        return cls(
            whole.lay_out() // batch,
            sum(step.multiply_adds for step in whole.steps) // batch,
            Costs(bytes_of_steps(whole.steps, whole.buffers, batch), _core_bytes()),
        )


def _core_bytes() -> int:
    """The cache that a core keeps to itself."""
    return cpu().l2 or 1 << 20  # a usual size where the system does not say


def _kind(x: torch.Tensor) -> Hashable:
    return tuple(x.shape), x.stride(), x.dtype


def _batch(inputs: Sequence[Any]) -> int:
    """The first size of all inputs, 0 if they have none in common."""
    if not all(isinstance(x, torch.Tensor) and x.dim() > 0 for x in inputs):
        return 0
    sizes = {x.shape[0] for x in inputs}
    return sizes.pop() if len(sizes) == 1 else 0


def _part_sizes(batch: int, threads: int, most: int) -> list[int]:
    """Images that parts may have, so that threads do not idle."""
    sizes = []
    for size in range(1, min(batch, most) + 1):
        parts = batch // size
        if batch % size == 0 and parts / (-(-parts // threads) * threads) >= MIN_BALANCE:
            sizes.append(size)
    return sizes


def _images_are_apart(one: Mapping[Node, Any], whole: Mapping[Node, Any], batch: int) -> bool:
    """Whether every tensor of the graph has the images of the batch in its first dimension.

    Asked of the shapes for one image and for all. A transposition or a concatenation of the first
    dimension shows: with one image its size is not 1, or with all it is not that of the batch.
    """
    return bool(one) and all(_is_apart(one[node], whole[node], batch) for node in one)


def _is_apart(one: Any, whole: Any, batch: int) -> bool:
    if isinstance(one, torch.Tensor):
        one, whole = one.shape, whole.shape
    if isinstance(one, torch.Size):
        return len(one) > 0 and one[0] == 1 and whole == torch.Size([batch, *one[1:]])
    if isinstance(one, tuple | list) and any(isinstance(x, torch.Tensor) for x in one):
        return all(_is_apart(a, b, batch) for a, b in zip(one, whole, strict=True))
    return True  # a number: views made with it are judged by their shapes
