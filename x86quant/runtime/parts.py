"""Whether a batch is better run in parts, each by itself from end to end.

A part that fits the second-level cache stays there from layer to layer, and threads that each have
parts of their own wait for each other once a run instead of once a layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from x86quant.hardware.cpu import cpu
from x86quant.runtime.packs import Packs
from x86quant.runtime.plan import Plan
from x86quant.runtime.planner import plan_segment
from x86quant.runtime.shapes import infer_shapes

#: Products for each byte of weights that a part must do. With fewer, loading weights again for each
#: part costs more than it saves.
MIN_PRODUCTS_PER_WEIGHT = 32

#: The share of the threads' time that must be used: 3 parts keep 2 threads busy 3/4 of it.
MIN_BALANCE = 0.8


def plan_in_parts(
    graph_module: GraphModule, inputs: Sequence[Any], packs: Packs, threads: int
) -> Plan | None:
    """A plan for ``inputs`` in parts, or None where one for the whole batch is better."""
    batch = _batch(inputs)
    if batch < 2 or not _images_are_apart(graph_module, inputs, batch):
        return None
    single = plan_segment(graph_module, [x[:1] for x in inputs], packs, 1)
    size = _part_size(batch, threads, single.peak_bytes)
    if size in (0, batch):
        return None
    weights = sum(step.weight_bytes for step in single.steps)
    products = size * sum(step.multiply_adds for step in single.steps)
    if products < MIN_PRODUCTS_PER_WEIGHT * weights:
        return None
    return plan_segment(graph_module, [x[:size] for x in inputs], packs, 1, batch // size)


def _batch(inputs: Sequence[Any]) -> int:
    """The first size of all inputs, 0 if they have none in common."""
    if not all(isinstance(x, torch.Tensor) and x.dim() > 0 for x in inputs):
        return 0
    sizes = {x.shape[0] for x in inputs}
    return sizes.pop() if len(sizes) == 1 else 0


def _part_size(batch: int, threads: int, bytes_of_one: int) -> int:
    """Images a part: as many as the cache holds; 0 if threads would idle."""
    cache = cpu().l2 or 1 << 20  # a usual size where the system does not say
    fitting = max(1, cache // max(1, bytes_of_one))
    for size in range(min(fitting, batch), 0, -1):
        parts = batch // size
        if batch % size == 0 and parts / (-(-parts // threads) * threads) >= MIN_BALANCE:
            return size
    return 0


def _images_are_apart(graph_module: GraphModule, inputs: Sequence[Any], batch: int) -> bool:
    """Whether every tensor of the graph has the images of the batch in its first dimension.

    Asked of the shapes for one image and for all. A transposition or a concatenation of the first
    dimension shows: with one image its size is not 1, or with all it is not that of the batch.
    """
    try:
        one = infer_shapes(graph_module, [x[:1] for x in inputs])
    except (RuntimeError, ValueError, IndexError):
        return False  # it needs the others
    whole = infer_shapes(graph_module, inputs)
    (output,) = (node for node in graph_module.graph.nodes if node.op == "output")
    if not all(isinstance(whole[node], torch.Size) for node in output.all_input_nodes):
        return False
    return all(_is_apart(one[node], whole[node], batch) for node in one if node is not output)


def _is_apart(one: Any, whole: Any, batch: int) -> bool:
    if isinstance(one, torch.Tensor):
        one, whole = one.shape, whole.shape
    if isinstance(one, torch.Size):
        return len(one) > 0 and one[0] == 1 and whole == torch.Size([batch, *one[1:]])
    if isinstance(one, tuple | list) and any(isinstance(x, torch.Tensor) for x in one):
        return all(_is_apart(a, b, batch) for a, b in zip(one, whole, strict=True))
    return True  # a number: views made with it are judged by their shapes
