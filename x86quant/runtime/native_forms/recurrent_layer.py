"""A layer of an LSTM or a GRU: one step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from x86quant.errors import NoKernelError
from x86quant.lowering.graph_tools import attribute, op_name
from x86quant.runtime.draft import Draft
from x86quant.runtime.native_form import KnownSizes, NativeForm
from x86quant.runtime.native_forms.code_rows import contiguous
from x86quant.runtime.native_step import NativeStep
from x86quant.runtime.plan import Value


def _recurrent(draft: Draft, node: Node) -> Value:
    kwargs: Any = node.kwargs
    x = contiguous(draft, node, "x", torch.uint8)
    batch_first = bool(kwargs["batch_first"]) and len(x.shape) == 3
    sizes = x.shape[:-1] if len(x.shape) == 3 else (x.shape[0], 1)
    sequences, steps = sizes if batch_first else sizes[::-1]
    if 0 in x.shape:
        raise NoKernelError("it has no rows")
    fields: dict[str, Any] = {}
    names = ("input0", "hidden0", "input1", "hidden1")
    count = 0
    for name, *operands in zip(
        names, kwargs["weights"], kwargs["scales"], kwargs["biases"], strict=False
    ):
        weight, scale, bias = (attribute(draft.root, str(x.target)) for x in operands)
        fields[name] = draft.packs.programs.row_linear((weight, scale, bias), None)
        if fields[name] is None:
            raise NoKernelError("it has no weights to pack")
        count += weight.numel()
    out = draft.output_of(node, range(len(x.shape)))
    target = out
    if not out.meta.is_contiguous():  # a part of a concatenation
        target = draft.new(
            f"{node.name}_states", torch.empty_like(out.meta, memory_format=torch.contiguous_format)
        )
    fields |= {
        "lstm": kwargs["kind"] == "lstm",
        "batch_first": batch_first,
        "steps": steps,
        "sequences": sequences,
        "features": x.shape[-1],
        "units": attribute(draft.root, str(kwargs["weights"][1].target)).shape[1],
        "x": x,
        "out": target,
        "x_scale": float(kwargs["x_scale"]),
        "x_zp": kwargs["x_zp"],
        "h_scale": float(kwargs["out_scale"]),
        "h_zp": kwargs["out_zp"],
        "h_mult": 1.0 / kwargs["out_scale"],
    }
    facts: dict[str, Any] = {"multiply_adds": steps * sequences * count, "weight_bytes": count}
    draft.add(node, NativeStep("recurrent", fields), [x], target, op_name(node), **facts)
    return out if target is out else draft.copy(node, target, out)


def _sizes(known: KnownSizes, kwargs: Any) -> Sequence[int] | None:
    x = known.size(kwargs["x"])
    first = known.size(kwargs["weights"][0])
    if len(x) not in (2, 3) or x[-1] != first[1]:
        return None
    return (*x[:-1], sum(known.size(weight)[1] for weight in kwargs["weights"][1::2]))


def _takes(node: Node) -> bool:
    kwargs: Any = node.kwargs
    lists = [kwargs.get(name, ()) for name in ("weights", "scales", "biases")]
    return all(lists) and all(x.op == "get_attr" for given in lists for x in given)


FORMS = (NativeForm("recurrent", _sizes, _recurrent, _takes),)
