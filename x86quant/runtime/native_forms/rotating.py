"""Rotary positions of heads as they lie among the results of a product."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from x86quant.errors import NoKernelError
from x86quant.lowering.graph_tools import op_name
from x86quant.runtime.draft import Draft
from x86quant.runtime.native_form import KnownSizes, NativeForm
from x86quant.runtime.plan import Value
from x86quant.runtime.programs import NativeStep


def _rotate(draft: Draft, node: Node) -> Value:
    kwargs: Any = node.kwargs
    values = {name: draft.value(kwargs[name]) for name in ("x", "cos", "sin")}
    for name, value in values.items():
        if value.meta.stride(-1) != 1:
            raise NoKernelError(f"the features of its {name} are not adjacent")
    out = draft.output_of(node, range(4), torch.float32)
    batch, tokens, heads, size = values["x"].shape
    fields = {
        "batch": batch, "tokens": tokens, "heads": heads, "size": size, "out": out, **values,
        **{f"{name}_strides": _strides(value) for name, value in values.items()},
    }  # fmt: skip
    return draft.add(node, NativeStep("rotate", fields), [*values.values()], out, op_name(node))


def _strides(value: Value) -> list[int]:
    """Of all dimensions but the last; 0 where there is one of it."""
    pairs = zip(value.shape[:-1], value.meta.stride()[:-1], strict=True)
    return [0 if size == 1 else stride for size, stride in pairs]


def _sizes(known: KnownSizes, kwargs: Any) -> Sequence[int] | None:
    x, cos, sin = (known.size(kwargs[name]) for name in ("x", "cos", "sin"))
    if len(x) != 4 or x[3] % 2 or not (_fit(cos, x) and _fit(sin, x)):
        return None
    return x if all(known.dtypes[kwargs[n]] is torch.float32 for n in ("x", "cos", "sin")) else None


def _fit(angles: torch.Size, x: torch.Size) -> bool:
    return (
        len(angles) == 3 and angles[0] in (1, x[0]) and angles[1] in (1, x[1]) and angles[2] == x[3]
    )


def _is_computed(node: Node) -> bool:
    return all(
        isinstance(x := node.kwargs[n], Node) and x.op != "get_attr" for n in ("x", "cos", "sin")
    )


FORMS = (NativeForm("rotate", _sizes, _rotate, _is_computed, None, gives=torch.float32),)
