"""Pools, and margins of codes as they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.fx import Node
from torch.fx.node import map_arg

from x86quant.errors import NoKernelError
from x86quant.lowering.graph_tools import op_name
from x86quant.ops.pool import PAD_MODES
from x86quant.runtime import layout
from x86quant.runtime.draft import Draft
from x86quant.runtime.native_form import KnownSizes, NativeForm
from x86quant.runtime.native_forms.pointwise import requantization
from x86quant.runtime.native_forms.windows import window_of, window_sizes
from x86quant.runtime.plan import Value
from x86quant.runtime.programs import NativeStep, images_of


def _pool(draft: Draft, node: Node) -> Value:
    kwargs: Any = node.kwargs
    kind = op_name(node)
    numbers: dict[str, Any] = {}
    if kind != "adaptive_avg_pool":
        numbers |= window_of(kwargs, kwargs["kernel_size"])
    if kind != "max_pool":
        numbers |= requantization(kwargs)
    if kind == "avg_pool":
        numbers["count_include_pad"] = bool(kwargs["count_include_pad"])
    x = draft.with_channels_adjacent(node, draft.value(kwargs["x"]), 1)
    out = draft.output_of(node, layout.channels_last_order(x.meta.dim()))
    return draft.add(node, NativeStep(kind, {**images_of(x, out), **numbers}), [x], out)


def _largest(draft: Draft, node: Node) -> Value:
    """One window along each dimension that shrinks, as a pool of that size."""
    kwargs: Any = node.kwargs
    x = draft.with_channels_adjacent(node, draft.value(kwargs["x"]), 1)
    out = draft.output_of(node, layout.channels_last_order(x.meta.dim()))
    kernel = [
        now if size == 1 else 1
        for now, size in zip(x.meta.shape[2:], kwargs["output_size"], strict=True)
    ]
    step = NativeStep("max_pool", {**images_of(x, out), **window_of({}, kernel)})
    return draft.add(node, step, [x], out)


_SIDES = ("before", "after")


def _pad(draft: Draft, node: Node) -> Value:
    kwargs: Any = node.kwargs
    x = draft.with_channels_adjacent(node, draft.value(kwargs["x"]), 1)
    out = draft.output_of(node, layout.channels_last_order(x.meta.dim()))
    before, after = (map_arg(kwargs[name], draft.shapes.__getitem__) for name in _SIDES)
    if kwargs["mode"] != "constant" and min(*before, *after) < 0:
        raise NoKernelError("margins below zero")
    fields = {
        **images_of(x, out),
        "before": [0] * (3 - len(before)) + list(before),
        "mode": PAD_MODES.index(kwargs["mode"]),
        "a_zp": kwargs["x_zp"],
    }
    return draft.add(node, NativeStep("pad", fields), [x], out)


def _pool_sizes(known: KnownSizes, kwargs: Any) -> Sequence[int] | None:
    halves = zip(kwargs["padding"], kwargs["kernel_size"], strict=False)
    if kwargs["ceil_mode"] or any(2 * p > w for p, w in halves):
        return None
    found = window_sizes(known, kwargs, kwargs["kernel_size"])
    return None if found is None else [*known.size(kwargs["x"])[:2], *found]


def _pad_sizes(known: KnownSizes, kwargs: Any) -> Sequence[int] | None:
    x = known.size(kwargs["x"])
    before, after = (map_arg(kwargs[name], known.values.__getitem__) for name in _SIDES)
    if len(x) != len(before) + 2:
        return None
    margins = list(zip(x[2:], before, after, strict=True))
    if kwargs["mode"] == "reflect" and any(max(one[1:]) >= one[0] for one in margins):
        return None
    found = [*map(sum, margins)]
    return [*x[:2], *found] if min(found) > 0 else None


def _adaptive_sizes(known: KnownSizes, kwargs: Any) -> Sequence[int] | None:
    x = known.size(kwargs["x"])
    wanted = kwargs["output_size"]
    if len(x) != len(wanted) + 2 or not 1 <= len(wanted) <= 3:
        return None
    return [*x[:2], *(now if w < 0 else w for now, w in zip(x[2:], wanted, strict=True))]


def _largest_sizes(known: KnownSizes, kwargs: Any) -> Sequence[int] | None:
    return _adaptive_sizes(known, kwargs) if {*kwargs["output_size"]} <= {1, -1} else None


FORMS = (
    NativeForm("max_pool", _pool_sizes, _pool),
    NativeForm("avg_pool", _pool_sizes, _pool),
    NativeForm("pad", _pad_sizes, _pad),
    NativeForm("adaptive_avg_pool", _adaptive_sizes, _pool),
    NativeForm("adaptive_max_pool", _largest_sizes, _largest),
)
