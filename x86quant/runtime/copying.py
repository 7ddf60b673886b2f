"""Steps that copy codes between tensors of one shape."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from x86quant.runtime import layout
from x86quant.runtime.native_step import NativeStep, NativeTensor, rows_of
from x86quant.runtime.plan import Value


def copying(source: Value, target: Value) -> NativeStep:
    """A copy, whatever the strides of the two; the quickest that can do it."""
    return _quick(source, target) or _strided(source, target)


def _quick(source: Value, target: Value) -> NativeStep | None:
    if source.meta.dtype != torch.uint8 or source.meta.dim() == 0:
        return None
    innermost = layout.order_of(target.meta)[-1]
    if layout.fits(source.meta, innermost) and layout.fits(target.meta, innermost):
        if layout.rows([source.meta, target.meta], innermost) is None:
            return None
        return NativeStep("copy", rows_of([source], target, innermost))
    return _shuffling(source, target)


def _shuffling(source: Value, target: Value) -> NativeStep | None:
    """Channels that are groups of adjacent codes in ``source``, interleaved in ``target``."""
    axes = [i for i in layout.order_of(target.meta) if target.meta.shape[i] != 1]
    if len(axes) < 2:
        return None
    within, group = axes[-2:]
    each, groups = target.meta.shape[within], target.meta.shape[group]
    strides = [(m.stride(within), m.stride(group)) for m in (source.meta, target.meta)]
    if strides != [(1, each), (groups, 1)]:
        return None
    rest = [i for i in range(target.meta.dim()) if i not in (within, group)]
    joined = [_joined(m, rest, each * groups) for m in (source.meta, target.meta)]
    rows = layout.rows(joined, -1)
    if rows is None:
        return None
    a, out = NativeTensor(source, *rows[0]), NativeTensor(target, *rows[1])
    return NativeStep("shuffle", {"a": a, "out": out, "groups": groups})


def _joined(meta: torch.Tensor, rest: Sequence[int], channels: int) -> torch.Tensor:
    """``meta`` with two of its dimensions as one, the last."""
    return torch.empty_strided(
        [*(meta.shape[i] for i in rest), channels],
        [*(meta.stride(i) for i in rest), 1],
        dtype=meta.dtype,
        device="meta",
    )


def _strided(source: Value, target: Value) -> NativeStep:
    size = source.meta.element_size()
    fields = {
        "element_size": size,
        "sizes": list(source.shape),
        "from": source,
        "from_strides": [stride * size for stride in source.meta.stride()],
        "to": target,
        "to_strides": [stride * size for stride in target.meta.stride()],
    }
    return NativeStep("strided_copy", fields)
