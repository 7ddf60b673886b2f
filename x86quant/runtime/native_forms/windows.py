"""Windows of pools and convolutions: as fields of steps, and how many there are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from x86quant.runtime import layout
from x86quant.runtime.draft import Draft
from x86quant.runtime.native_form import KnownSizes
from x86quant.runtime.plan import Value


def window_of(kwargs: Any, kernel: Sequence[int]) -> dict[str, list[int]]:
    """Fields of three entries each, of depth, height and width."""
    given = {"kernel": kernel, **kwargs}
    return {
        name: [missing] * (3 - len(given.get(name, ()))) + list(given.get(name, ()))
        for name, missing in (("kernel", 1), ("stride", 1), ("padding", 0), ("dilation", 1))
    }


def window_sizes(known: KnownSizes, kwargs: Any, kernel: Sequence[int]) -> list[int] | None:
    """How many windows ``x`` has along each of its last dimensions; None where it has none."""
    x = known.size(kwargs["x"])
    stride, padding = kwargs["stride"] or kernel, kwargs["padding"]
    dilation = kwargs.get("dilation") or [1] * len(kernel)
    if not len(x) - 2 == len(kernel) == len(stride) == len(padding) == len(dilation):
        return None
    sizes = [
        (size + 2 * p - d * (w - 1) - 1) // s + 1
        for size, w, s, p, d in zip(x[2:], kernel, stride, padding, dilation, strict=True)
    ]
    return None if min(sizes) < 1 else sizes


def real_result(draft: Draft, node: Node) -> tuple[Value, bool]:
    """Where windows give floats, channels last, and whether ``in_their_order`` has to copy them."""
    shape = draft.shapes[node]
    order = layout.channels_last_order(len(shape))
    # Results of few dimensions lie in their order as well.
    if len(shape) <= 3 or node.kwargs.get("contiguous"):
        return draft.new(node.name, layout.like(shape, order, torch.float32)), True
    return draft.output_of(node, order, torch.float32), False


def in_their_order(draft: Draft, node: Node, floats: Value) -> Value:
    """A copy whose dimensions lie in memory as they are counted."""
    order = range(len(draft.shapes[node]))
    return draft.copy(node, floats, draft.output_of(node, order, torch.float32))
