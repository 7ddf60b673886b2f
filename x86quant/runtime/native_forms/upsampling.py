"""Upsampling, nearest and bilinear."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch.fx import Node
from torch.fx.node import map_arg

from x86quant.runtime import layout
from x86quant.runtime.draft import Draft
from x86quant.runtime.native_form import KnownSizes, NativeForm
from x86quant.runtime.native_forms.pointwise import requantization
from x86quant.runtime.plan import Value
from x86quant.runtime.programs import NativeStep, images_of, rows_of


def _upsample(draft: Draft, node: Node) -> Value:
    kwargs: Any = node.kwargs
    x = draft.with_channels_adjacent(node, draft.value(kwargs["x"]), 1)
    if kwargs["mode"] == "nearest":  # which moves codes as they are
        x = _in_codes_of_output(draft, node, x)
    out = draft.output_of(node, layout.channels_last_order(x.meta.dim()))
    factors = kwargs["scale_factor"] or [None] * (x.meta.dim() - 2)
    align = bool(kwargs["align_corners"])
    scales = [
        _source_step(size_in, size_out, factor, align)
        for size_in, size_out, factor in zip(x.shape[2:], out.shape[2:], factors, strict=True)
    ]
    fields = {
        **images_of(x, out),
        **requantization(kwargs),
        "align_corners": align,
        "scale": [1.0] * (3 - len(scales)) + scales,
    }
    return draft.add(node, NativeStep(kwargs["mode"], fields), [x], out)


def _in_codes_of_output(draft: Draft, node: Node, x: Value) -> Value:
    """``x`` in other codes where the output has others: there are fewer of them before."""
    kwargs: Any = node.kwargs
    if (kwargs["x_scale"], kwargs["x_zp"]) == (kwargs["out_scale"], kwargs["out_zp"]):
        return x
    out = draft.new(node.name, layout.like(x.shape, layout.channels_last_order(x.meta.dim())))
    fields = {**rows_of([x], out, 1), **requantization(kwargs)}
    return draft.add(node, NativeStep("requantize", fields), [x], out)


def _source_step(size_in: int, size_out: int, factor: float | None, align: bool) -> float:
    """Source pixels a destination pixel, as ``F.interpolate`` computes them."""
    if align:
        return (size_in - 1) / (size_out - 1) if size_out > 1 else 0.0
    return 1.0 / factor if factor else size_in / size_out


def _sizes(known: KnownSizes, kwargs: Any) -> Sequence[int]:
    real = torch.empty(known.size(kwargs["x"]), device="meta", dtype=torch.float32)
    size = map_arg(kwargs["size"], known.values.__getitem__)
    names = ("scale_factor", "mode", "align_corners")
    return F.interpolate(real, size, *(kwargs[name] for name in names)).shape


def _has_kernel(node: Node) -> bool:
    return node.kwargs["mode"] in ("nearest", "bilinear")


FORMS = (NativeForm("upsample", _sizes, _upsample, takes=_has_kernel),)
