"""A layer of an LSTM or a GRU: one step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from x86quant.errors import NoKernelError
from x86quant.lowering.graph_tools import attribute, op_name
from x86quant.ops.recurrence import LayerSizes, sequences_of
from x86quant.runtime.draft import Draft
from x86quant.runtime.native_form import KnownSizes, NativeForm
from x86quant.runtime.native_forms.code_rows import contiguous, result_of
from x86quant.runtime.plan import Value
from x86quant.runtime.programs import NativeStep


def _recurrent(draft: Draft, node: Node) -> Value:
    out = draft.output_of(node, range(len(draft.shapes[node])))
    target = out
    if not out.meta.is_contiguous():  # a part of a concatenation
        target = draft.new(f"{node.name}_states", _contiguous(out))
    _add(draft, node, target, None)
    return out if target is out else draft.copy(node, target, out)


def _recurrent_last(draft: Draft, node: Node) -> tuple[Value, Value]:
    found = [result_of(draft, node, i, t) for i, t in enumerate((torch.uint8, torch.float32))]
    states, last = (
        value if value.meta.is_contiguous() else draft.new(f"{node.name}_{i}", _contiguous(value))
        for i, value in enumerate(found)
    )
    _add(draft, node, states, last)
    for value, made in zip(found, (states, last), strict=True):
        if value is not made:
            draft.copy(node, made, value)
    return found[0], found[1]


def _add(draft: Draft, node: Node, states: Value, last: Value | None) -> None:
    """Append the step, which writes ``states`` and perhaps the ``last`` cells or states."""
    kwargs: Any = node.kwargs
    x = contiguous(draft, node, "x", torch.uint8)
    batch_first = bool(kwargs["batch_first"]) and len(x.shape) == 3
    sizes = x.shape[:-1] if len(x.shape) == 3 else (x.shape[0], 1)
    sequences, steps = sizes if batch_first else sizes[::-1]
    if 0 in x.shape:
        raise NoKernelError("it has no rows")
    packs, layer, count = _packed(draft, kwargs)
    given = {name: contiguous(draft, node, name) for name in "hc" if kwargs.get(name) is not None}
    fields: dict[str, Any] = packs | {
        "lstm": kwargs["kind"] == "lstm",
        "batch_first": batch_first,
        "steps": steps,
        "sequences": sequences,
        "features": x.shape[-1],
        "units": layer.units,
        "x": x,
        "out": states,
        "x_scale": float(kwargs["x_scale"]),
        "x_zp": kwargs["x_zp"],
        "h_scale": float(kwargs["out_scale"]),
        "h_zp": kwargs["out_zp"],
        "h_mult": 1.0 / kwargs["out_scale"],
        **given,
    }
    if last is not None:
        fields["last"] = last
    others = [] if last is None else [last]
    facts: dict[str, Any] = {"multiply_adds": steps * sequences * count, "weight_bytes": count}
    step = NativeStep("recurrent", fields)
    draft.add(node, step, [x, *given.values()], states, op_name(node), others, **facts)


def _packed(draft: Draft, kwargs: Any) -> tuple[dict[str, Any], LayerSizes, int]:
    """The packed products as fields of the step, the layer's sizes, and how many weights it has."""
    lists = [
        [attribute(draft.root, str(x.target)) for x in kwargs[name]]
        for name in ("weights", "scales", "biases")
    ]
    layer = LayerSizes.of(lists[0])
    fields: dict[str, Any] = {}
    for i, (weight, scale, bias) in enumerate(zip(*lists, strict=True)):
        direction, product = divmod(i, layer.products)
        name = f"{('input', 'hidden', 'projection')[product]}{direction}"
        fields[name] = draft.packs.programs.row_linear((weight, scale, bias), None)
        if fields[name] is None:
            raise NoKernelError("it has no weights to pack")
    return fields, layer, sum(weight.numel() for weight in lists[0])


def _contiguous(value: Value) -> torch.Tensor:
    return torch.empty_like(value.meta, memory_format=torch.contiguous_format)


def _sizes(known: KnownSizes, kwargs: Any) -> Sequence[int] | None:
    found = _results(known, kwargs)
    return None if found is None else found[0].shape


def _results(known: KnownSizes, kwargs: Any) -> tuple[torch.Tensor, ...] | None:
    x = known.size(kwargs["x"])
    weights = [
        torch.empty(known.size(w), device="meta", dtype=torch.float32) for w in kwargs["weights"]
    ]
    if len(x) not in (2, 3) or x[-1] != weights[0].shape[1]:
        return None
    layer = LayerSizes.of(weights)
    before = (layer.directions, *sequences_of(x, kwargs["batch_first"]))
    for name, width in (("h", layer.width), ("c", layer.units)):
        given = kwargs.get(name)  # files of old versions have none
        if given is not None and tuple(known.size(given)) != (*before, width):
            return None
    states = (*x[:-1], layer.directions * layer.width)
    return (
        torch.empty(states, dtype=torch.uint8, device="meta"),
        torch.empty((*before, layer.units), device="meta", dtype=torch.float32),
    )


def _takes(node: Node) -> bool:
    kwargs: Any = node.kwargs
    lists = [kwargs.get(name, ()) for name in ("weights", "scales", "biases")]
    return all(lists) and all(x.op == "get_attr" for given in lists for x in given)


FORMS = (
    NativeForm("recurrent", _sizes, _recurrent, _takes, None),
    NativeForm("recurrent_last", _sizes, _recurrent_last, _takes, None, results=_results),
)
