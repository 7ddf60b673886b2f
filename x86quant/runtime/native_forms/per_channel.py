"""Ops with parameters of their own for every channel."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.fx import Node

from x86quant.errors import NoKernelError
from x86quant.runtime import layout
from x86quant.runtime.draft import Draft
from x86quant.runtime.native_form import KnownSizes, NativeForm
from x86quant.runtime.native_forms.pointwise import lut_of
from x86quant.runtime.plan import Value
from x86quant.runtime.programs import NativeStep, images_of, rows_of


def _per_channel(draft: Draft, node: Node, kind: str, numbers: dict[str, Any]) -> Value:
    kwargs: Any = node.kwargs
    x = draft.value(kwargs["x"])
    axis = kwargs["axis"] % x.meta.dim()
    x = draft.with_channels_adjacent(node, x, axis)
    out = draft.output_of(node, [i for i in layout.order_of(x.meta) if i != axis] + [axis])
    numbers["out_zp"] = kwargs["out_zp"]
    step = NativeStep(kind, {**rows_of([x], out, axis), **numbers})
    return draft.add(node, step, [x], out)


def _for_each(draft: Draft, node: Node, table: torch.Tensor) -> torch.Tensor:
    """``table`` as floats; one value may stand for all channels, the kernel reads one for each."""
    kwargs: Any = node.kwargs
    channels = draft.value(kwargs["x"]).shape[kwargs["axis"]]
    if table.numel() not in (1, channels):  # a single channel, spread over the values
        raise NoKernelError(f"it has {table.numel()} parameters for {channels} channels")
    return table.float().expand(channels).contiguous()


def _affine(draft: Draft, node: Node) -> Value:
    kwargs: Any = node.kwargs
    out_scale = kwargs["out_scale"]
    scale, shift = (draft.table(node, name).double() for name in ("scale", "shift"))
    numbers = {
        "a_zp": kwargs["x_zp"],
        "lo": kwargs["lo"],
        "hi": kwargs["hi"],
        "scale_c": _for_each(draft, node, scale * (kwargs["x_scale"] / out_scale)),
        "shift_c": _for_each(draft, node, shift / out_scale),
    }
    return _per_channel(draft, node, "affine", {**numbers, **lut_of(draft, node)})


def _tables(draft: Draft, node: Node) -> Iterator[tuple[str, torch.Tensor]]:
    """The weight and the bias that a norm has, in steps of its output, by their fields."""
    kwargs: Any = node.kwargs
    for field, name in (("scale_c", "weight"), ("shift_c", "bias")):
        if kwargs[name] is not None:
            yield field, draft.table(node, name).double() / kwargs["out_scale"]


def _layer_norm(draft: Draft, node: Node) -> Value:
    kwargs: Any = node.kwargs
    out_scale = kwargs["out_scale"]
    numbers = {"a_mult": 1.0 / out_scale, "eps": kwargs["eps"] / kwargs["x_scale"] ** 2}
    numbers |= {field: _for_each(draft, node, table) for field, table in _tables(draft, node)}
    return _per_channel(draft, node, "layer_norm", numbers)


def _group_norm(draft: Draft, node: Node) -> Value:
    kwargs: Any = node.kwargs
    x = draft.with_channels_adjacent(node, draft.value(kwargs["x"]), 1)
    out = draft.output_of(node, layout.channels_last_order(x.meta.dim()))
    numbers = {
        **images_of(x, out),
        "groups": kwargs["groups"],
        "a_mult": 1.0 / kwargs["out_scale"],
        "eps": kwargs["eps"] / kwargs["x_scale"] ** 2,
        **{name: kwargs[name] for name in ("out_zp", "lo", "hi")},
        **lut_of(draft, node),
        **{field: table.float().contiguous() for field, table in _tables(draft, node)},
    }
    return draft.add(node, NativeStep("group_norm", numbers), [x], out)


def _group_norm_sizes(known: KnownSizes, kwargs: Any) -> Sequence[int] | None:
    x = known.size(kwargs["x"])
    if not 3 <= len(x) <= 5 or x[1] % kwargs["groups"]:
        return None
    parameters = [kwargs[name] for name in ("weight", "bias") if kwargs[name] is not None]
    return x if all(known.size(one).numel() == x[1] for one in parameters) else None


def _sizes(known: KnownSizes, kwargs: Any) -> Sequence[int] | None:
    x = known.size(kwargs["x"])
    if not -len(x) <= kwargs["axis"] < len(x):
        return None
    parameters = [kwargs[name] for name in ("scale", "shift", "weight", "bias") if kwargs.get(name)]
    sizes = {known.size(parameter).numel() for parameter in parameters}
    return x if sizes <= {1, x[kwargs["axis"]]} else None


FORMS = (
    NativeForm("affine", _sizes, _affine),
    NativeForm("layer_norm", _sizes, _layer_norm),
    NativeForm("group_norm", _group_norm_sizes, _group_norm),
)
