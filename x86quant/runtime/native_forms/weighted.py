"""Convolutions and linears, which the router answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.fx import Node

from x86quant.lowering.graph_tools import op_name
from x86quant.routing.sizes import Sizes
from x86quant.runtime import layout
from x86quant.runtime.draft import Draft
from x86quant.runtime.native_form import KnownSizes, NativeForm
from x86quant.runtime.native_forms.windows import window_sizes
from x86quant.runtime.plan import Value, multiply_adds
from x86quant.runtime.programs import NativeStep, NativeTensor, as_image, as_rows


def _conv(draft: Draft, node: Node) -> Value:
    kwargs: Any = node.kwargs
    x = draft.with_channels_adjacent(node, draft.value(kwargs["x"]), 1)
    out = draft.output_of(node, layout.channels_last_order(x.meta.dim()))
    values = [x, *_residual(draft, node, 1), out]
    pixels = x.meta.shape[2:].numel() if kwargs["transposed"] else 0
    sizes = Sizes.of_conv(x.shape, out.shape)
    return _weighted(draft, node, [*map(as_image, values)], sizes, out.shape, pixels)


def _linear(draft: Draft, node: Node) -> Value:
    x = draft.with_channels_adjacent(node, draft.value(node.kwargs["x"]), -1)
    out = draft.output_of(node, range(x.meta.dim()))
    values = [x, *_residual(draft, node, -1), out]
    sizes = Sizes.of_linear(out.shape)
    return _weighted(draft, node, as_rows(values, -1), sizes, (sizes.rows, out.shape[-1]), 0)


def _residual(draft: Draft, node: Node, channel: int) -> list[Value]:
    residual = node.kwargs["residual"]
    if residual is None:
        return []
    return [draft.with_channels_adjacent(node, draft.value(residual), channel)]


def _weighted(
    draft: Draft,
    node: Node,
    tensors: Sequence[NativeTensor],
    sizes: Sizes,
    shape: tuple[int, ...],
    input_pixels: int,
) -> Value:
    x, *residual, out = tensors
    weight = draft.packs.weight(node)
    packed = draft.packs.get(node, sizes, draft.threads)
    fields = {"pack": packed.handle, "in": x, "out": out}
    if residual:
        fields["residual"] = residual[0]
    return draft.add(
        node,
        NativeStep("conv", fields),
        [x.value, *(r.value for r in residual)],
        out.value,
        op=op_name(node),
        answer=packed.choice,
        sizes=sizes,
        multiply_adds=multiply_adds(shape, tuple(weight.shape), input_pixels),
        weight_bytes=weight.numel(),
    )


def _linear_sizes(known: KnownSizes, kwargs: Any) -> Sequence[int] | None:
    x = known.size(kwargs["x"])
    outputs, inputs = known.size(kwargs["weight"])
    if len(x) < 2 or x[-1] != inputs:
        return None
    return _beside_residual([*x[:-1], outputs], kwargs, known)


def _conv_sizes(known: KnownSizes, kwargs: Any) -> Sequence[int] | None:
    x = known.size(kwargs["x"])
    weight = known.size(kwargs["weight"])
    if kwargs["transposed"]:
        channels, outputs = weight[0], weight[1] * kwargs["groups"]
    else:
        channels, outputs = weight[1] * kwargs["groups"], weight[0]
    if len(x) != len(weight) or x[1] != channels:
        return None
    if not kwargs["transposed"]:
        found = window_sizes(known, kwargs, weight[2:])
        return found and _beside_residual([x[0], outputs, *found], kwargs, known)
    geometry = zip(
        x[2:], weight[2:], kwargs["stride"], kwargs["padding"], kwargs["dilation"], strict=False
    )
    extra = kwargs["output_padding"] or [0] * (len(x) - 2)
    sizes = [
        (size - 1) * stride - 2 * padding + dilation * (window - 1) + more + 1
        for (size, window, stride, padding, dilation), more in zip(geometry, extra, strict=False)
    ]
    if len(sizes) != len(x) - 2 or min(sizes, default=1) < 1:
        return None
    return _beside_residual([x[0], outputs, *sizes], kwargs, known)


def _beside_residual(shape: list[int], kwargs: Any, known: KnownSizes) -> Sequence[int] | None:
    residual = kwargs["residual"]
    return shape if residual is None or list(known.size(residual)) == shape else None


FORMS = (
    NativeForm("conv", _conv_sizes, _conv),
    NativeForm("linear", _linear_sizes, _linear),
)
