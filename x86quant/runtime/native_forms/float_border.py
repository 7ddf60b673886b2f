"""From float32 to codes and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Node

from x86quant.errors import NoKernelError
from x86quant.lowering.graph_tools import is_op
from x86quant.runtime import layout
from x86quant.runtime.draft import Draft
from x86quant.runtime.native_form import NativeForm, same_sizes
from x86quant.runtime.plan import Value
from x86quant.runtime.programs import NativeStep, NativeTensor, as_image, as_rows


def _quantize(draft: Draft, node: Node) -> Value:
    kwargs: Any = node.kwargs
    x = draft.value(kwargs["x"])
    rank = x.meta.dim()
    order = list(range(rank)) if rank < 4 and not _feeds_conv(node) else None
    out = draft.output_of(node, order or layout.channels_last_order(rank))
    channel, a, codes = _float_and_codes(x, out)
    fields = {
        "a": a,
        "out": codes,
        "a_stride_c": 4 * x.meta.stride(channel),
        "a_mult": 1.0 / kwargs["out_scale"],
        "out_zp": kwargs["out_zp"],
    }
    return draft.add(node, NativeStep("quantize", fields), [x], out)


def _feeds_conv(node: Node) -> bool:
    return any(is_op(user, "conv") for user in node.users)


def _dequantize(draft: Draft, node: Node) -> Value:
    kwargs: Any = node.kwargs
    return _reals(draft, node, "dequantize", {"a_zp": kwargs["x_zp"], "a_mult": kwargs["x_scale"]})


def _lut_real(draft: Draft, node: Node) -> Value:
    return _reals(draft, node, "lut_real", {"table": draft.table(node, "table")})


def _reals(draft: Draft, node: Node, kind: str, how: Mapping[str, Any]) -> Value:
    """A step that makes floats of the codes that ``node`` reads."""
    kwargs: Any = node.kwargs
    x = draft.value(kwargs["x"])
    rank = x.meta.dim()
    free = rank >= 4 and not kwargs.get("contiguous")
    order = layout.order_of(x.meta) if free else list(range(rank))
    channel = layout.order_of(x.meta)[-1] if rank else 0
    x = draft.with_channels_adjacent(node, x, channel)
    out = draft.output_of(node, order, torch.float32)
    channel, real, codes = _float_and_codes(out, x)
    fields = {
        "a": codes,
        "out": real,
        "out_stride_c": 4 * out.meta.stride(channel),
        **how,
    }
    return draft.add(node, NativeStep(kind, fields), [x], out)


def _float_and_codes(real: Value, codes: Value) -> tuple[int, NativeTensor, NativeTensor]:
    """The dimension of the channels, which are adjacent in ``codes``, and both tensors.

    Rows stay apart, so that there is something to share among threads.
    """
    meta = codes.meta
    rank = meta.dim()
    if 3 <= rank <= 5 and layout.fits(meta, 1) and meta.stride(-1) >= meta.shape[1]:
        return 1, as_image(real), as_image(codes)
    if rank == 0:
        raise NoKernelError("its tensor has no dimensions")
    channel = layout.order_of(meta)[-1]
    as_real, as_codes = as_rows([real, codes], channel)
    return channel, as_real, as_codes


FORMS = (
    NativeForm("quantize", same_sizes, _quantize, reads=torch.float32),
    NativeForm("dequantize", same_sizes, _dequantize, gives=torch.float32, viewed=False),
    NativeForm("lut_real", same_sizes, _lut_real, gives=torch.float32, viewed=False),
)
