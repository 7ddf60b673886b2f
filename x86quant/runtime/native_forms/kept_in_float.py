"""Convolutions that stay in float."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from x86quant.lowering.graph_tools import is_op
from x86quant.ops.float_conv import FUNCTIONS
from x86quant.packing.float_panels import float_panels
from x86quant.runtime import layout
from x86quant.runtime.draft import Draft
from x86quant.runtime.native_form import KnownSizes, NativeForm
from x86quant.runtime.native_forms.windows import (
    in_their_order,
    real_result,
    window_of,
    window_sizes,
)
from x86quant.runtime.plan import Value, multiply_adds
from x86quant.runtime.programs import NativeStep, as_image


def _taps(weight: torch.Tensor) -> torch.Tensor:
    """The weight [C, 1, *kernel] as [tap, channel]."""
    return weight.flatten(1).t().contiguous()


def _float_conv(draft: Draft, node: Node) -> Value:
    kwargs: Any = node.kwargs
    x = draft.with_channels_adjacent(node, draft.value(kwargs["x"]), 1)
    weight = draft.table(node, "weight").detach()
    bias = weight.new_zeros(len(weight))
    if kwargs["bias"] is not None:
        bias = draft.table(node, "bias").detach()
    depthwise = kwargs["groups"] > 1
    packed, filled = _taps(weight), bias
    if not depthwise:
        packed, filled = float_panels(weight.movedim(1, -1).flatten(1), bias)
    codes = is_op(node, "float_conv_codes")
    if codes:
        order = layout.channels_last_order(x.meta.dim())
        out, moves = draft.output_of(node, order, without_gaps=True), False
    else:
        out, moves = real_result(draft, node)
    fields = {
        "a": as_image(x), "out": as_image(out), "depthwise": depthwise,
        "weight": packed.flatten(), "bias": filled.contiguous(),
        **window_of(kwargs, weight.shape[2:]),
    }  # fmt: skip
    if kwargs["functions"]:
        fields["functions"] = [FUNCTIONS.index(name) for name in kwargs["functions"]]
        fields["numbers"] = torch.tensor(kwargs["numbers"], dtype=torch.float32)
    if codes:
        fields |= {"out_mult": 1.0 / kwargs["out_scale"], "out_zp": kwargs["out_zp"]}
    draft.add(
        node, NativeStep("float_conv", fields), [x], out,
        multiply_adds=multiply_adds(tuple(out.shape), tuple(weight.shape), 0),
        weight_bytes=weight.nbytes,
    )  # fmt: skip
    return in_their_order(draft, node, out) if moves else out


def _sizes(known: KnownSizes, kwargs: Any) -> Sequence[int] | None:
    outputs, channels, *kernel = known.size(kwargs["weight"])
    x = known.size(kwargs["x"])
    sizes = window_sizes(known, kwargs, kernel)
    fits = sizes is not None and x[1] == channels * kwargs["groups"]
    return [x[0], outputs, *sizes] if fits and sizes is not None else None


FORMS = (
    NativeForm(
        "float_conv", _sizes, _float_conv,
        reads=torch.float32, gives=torch.float32, viewed=False,
    ),
    NativeForm("float_conv_codes", _sizes, _float_conv, reads=torch.float32),
)  # fmt: skip
