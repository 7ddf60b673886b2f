"""Ops on codes in their places: tables, other scales, sums and products."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.fx import Node

from x86quant.runtime import layout
from x86quant.runtime.draft import Draft
from x86quant.runtime.native_form import KnownSizes, NativeForm, same_sizes
from x86quant.runtime.plan import Value
from x86quant.runtime.programs import NativeStep, as_image, rows_of


def _elementwise(
    draft: Draft, node: Node, names: str, kind: str, numbers: Mapping[str, Any]
) -> Value:
    """A step on the arguments ``names``, broadcast to one shape, as rows of channels."""
    shape = draft.shapes[node]
    values = [_expanded(draft, node, draft.value(node.kwargs[name]), shape) for name in names]
    order = layout.order_of(values[0].meta)
    out = draft.output_of(node, order)
    channel = next((i for i in reversed(order) if shape[i] != 1), len(shape) - 1)
    if not layout.fits(out.meta, channel):  # placed in a concatenation of another layout
        channel = layout.order_of(out.meta)[-1]
    values = [draft.with_channels_adjacent(node, value, channel) for value in values]
    step = NativeStep(kind, {**rows_of(values, out, channel), **numbers})
    return draft.add(node, step, values, out)


def _expanded(draft: Draft, node: Node, value: Value, shape: torch.Size) -> Value:
    """``value`` broadcast to ``shape``, in memory of its own where it must be repeated."""
    if value.meta.shape == shape:
        return value
    wide = Value(value.buffer, value.meta.expand(shape))
    order = layout.channels_last_order(len(shape))
    return draft.copy(node, wide, draft.new(node.name, layout.like(shape, order)))


def _lut(draft: Draft, node: Node) -> Value:
    return _elementwise(draft, node, "x", "lut", {"lut": draft.table(node, "table")})


def requantization(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers of a "requantize": the same reals in other codes."""
    return {
        "a_zp": kwargs["x_zp"],
        "a_mult": kwargs["x_scale"] / kwargs["out_scale"],
        "out_zp": kwargs["out_zp"],
    }


def _requantize(draft: Draft, node: Node) -> Value:
    return _elementwise(draft, node, "x", "requantize", requantization(node.kwargs))


def _add(draft: Draft, node: Node) -> Value:
    kwargs: Any = node.kwargs
    numbers = {f"{x}_mult": kwargs[f"{x}_scale"] / kwargs["out_scale"] for x in "ab"}
    return _elementwise(draft, node, "ab", "add", {**numbers, **_binary(draft, node)})


def _mul(draft: Draft, node: Node) -> Value:
    kwargs: Any = node.kwargs
    numbers = _binary(draft, node)
    numbers["mult"] = kwargs["a_scale"] * kwargs["b_scale"] / kwargs["out_scale"]
    a, b = draft.value(kwargs["a"]), draft.value(kwargs["b"])
    if _is_point(a.shape, b.shape):  # a product does not mind
        a, b = b, a
        numbers["a_zp"], numbers["b_zp"] = numbers["b_zp"], numbers["a_zp"]
    if not _is_point(b.shape, a.shape):
        return _elementwise(draft, node, "ab", "mul", numbers)
    a, b = (draft.with_channels_adjacent(node, v, 1) for v in (a, b))
    out = draft.output_of(node, layout.channels_last_order(a.meta.dim()))
    tensors = {name: as_image(value) for name, value in (("a", a), ("b", b), ("out", out))}
    return draft.add(node, NativeStep("mul", {**tensors, **numbers}), [a, b], out)


def _binary(draft: Draft, node: Node) -> dict[str, Any]:
    names = ("a_zp", "b_zp", "out_zp", "lo", "hi")
    return {**{name: node.kwargs[name] for name in names}, **lut_of(draft, node)}


def lut_of(draft: Draft, node: Node) -> dict[str, torch.Tensor]:
    """The field ``lut`` of an op that looks its codes up at last; empty where it does not."""
    return {} if node.kwargs["lut"] is None else {"lut": draft.table(node, "lut")}


def _is_point(point: tuple[int, ...], whole: tuple[int, ...]) -> bool:
    """Whether ``point`` is one pixel of each image of ``whole``."""
    return (
        2 < len(point) == len(whole) <= 5
        and point[:2] == whole[:2]
        and all(size == 1 for size in point[2:])
        and point != whole
    )


def _broadcast(known: KnownSizes, kwargs: Any) -> Sequence[int]:
    a, b = known.size(kwargs["a"]), known.size(kwargs["b"])
    if a == b:
        return a
    # torch.broadcast_shapes would import sympy, which takes longer than planning.
    both = (torch.empty(size, device="meta", dtype=torch.float32) for size in (a, b))
    joined: torch.Tensor = torch.broadcast_tensors(*both)[0]  # type: ignore[no-untyped-call]
    return joined.shape


FORMS = (
    NativeForm("lut", same_sizes, _lut),
    NativeForm("requantize", same_sizes, _requantize),
    NativeForm("add", _broadcast, _add),
    NativeForm("mul", _broadcast, _mul),
)
