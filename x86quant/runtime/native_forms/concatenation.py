"""Concatenation: most inputs are written in place by the ops that make them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from x86quant.runtime import layout
from x86quant.runtime.draft import Draft
from x86quant.runtime.native_form import KnownSizes, NativeForm
from x86quant.runtime.native_forms.pointwise import requantization
from x86quant.runtime.plan import Value
from x86quant.runtime.programs import NativeStep, rows_of


def _cat(draft: Draft, node: Node) -> Value:
    kwargs: Any = node.kwargs
    whole = draft.cat_buffer(node)
    dim = kwargs["dim"] % whole.meta.dim()
    start = 0
    qparams = zip(kwargs["x_scales"], kwargs["x_zps"], strict=True)
    for x_node, (scale, zero_point) in zip(kwargs["xs"], qparams, strict=True):
        if not draft.shapes[x_node].numel():
            continue
        x = draft.value(x_node)
        part = Value(whole.buffer, whole.meta.narrow(dim, start, x.shape[dim]))
        start += x.shape[dim]
        placement = draft.placements.get(x_node)
        if placement is not None and placement.cat is node:
            continue
        if (scale, zero_point) == (kwargs["out_scale"], kwargs["out_zp"]):
            draft.copy(node, x, part)
            continue
        channel = layout.order_of(whole.meta)[-1]
        x = draft.with_channels_adjacent(node, x, channel)
        numbers = requantization({**kwargs, "x_scale": scale, "x_zp": zero_point})
        step = NativeStep("requantize", {**rows_of([x], part, channel), **numbers})
        draft.add(node, step, [x], part)
    return whole


def _join(draft: Draft, node: Node) -> Value:
    kwargs: Any = node.kwargs
    whole = draft.output_of(node, range(len(draft.shapes[node])), torch.float32)
    start = 0
    for x_node in kwargs["xs"]:
        x = draft.value(x_node)
        size = x.shape[kwargs["dim"]]
        draft.copy(node, x, Value(whole.buffer, whole.meta.narrow(kwargs["dim"], start, size)))
        start += size
    return whole


def _sizes(known: KnownSizes, kwargs: Any) -> Sequence[int] | None:
    sizes = [list(known.size(x)) for x in kwargs["xs"]]
    first = sizes[0]
    if not -len(first) <= kwargs["dim"] < len(first):
        return None
    dim = kwargs["dim"] % len(first)
    rest = [(len(s), s[:dim], s[dim + 1 :]) for s in sizes]
    if any(r != rest[0] for r in rest):
        return None
    return [*first[:dim], sum(s[dim] for s in sizes), *first[dim + 1 :]]


FORMS = (
    NativeForm("cat", _sizes, _cat),
    NativeForm("join", _sizes, _join, reads=torch.float32, gives=torch.float32),
)
