"""Rows of tokens: batches without their padding, and those tokens that are wanted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from x86quant.lowering.graph_tools import op_name
from x86quant.runtime.draft import Draft
from x86quant.runtime.native_form import KnownSizes, NativeForm
from x86quant.runtime.native_forms.code_rows import contiguous, result_of
from x86quant.runtime.plan import Value
from x86quant.runtime.programs import NativeStep

#: The types of places, starts and what is seen.
_TYPES = (torch.int64, torch.int64, torch.bool)


def _present_tokens(draft: Draft, node: Node) -> tuple[Value, ...]:
    mask = contiguous(draft, node, "mask", torch.bool)
    results = [result_of(draft, node, i, dtype) for i, dtype in enumerate(_TYPES)]
    batch, tokens = mask.shape
    fields = {
        "batch": batch, "tokens": tokens, "first": bool(node.kwargs["first"]), "mask": mask,
        **dict(zip(("places", "starts", "seen"), results, strict=True)),
    }  # fmt: skip
    step = NativeStep(op_name(node), fields)
    draft.add(node, step, [mask], results[0], others=results[1:])
    return tuple(results)


def _gather_tokens(draft: Draft, node: Node) -> Value:
    out = _moved(draft, node)
    out.buffer.starts = draft.value(node.kwargs["starts"])
    return out


def _moved(draft: Draft, node: Node) -> Value:
    """The step that moves rows between a batch and its gathered form."""
    x = contiguous(draft, node, "x")
    told = {name: contiguous(draft, node, name, torch.int64) for name in ("places", "starts")}
    out = draft.output_of(node, range(3), torch.float32)
    batch, tokens, features = x.shape
    fields = {
        "batch": batch, "tokens": tokens, "features": features, "x": x, "out": out, **told,
    }  # fmt: skip
    return draft.add(node, NativeStep(op_name(node), fields), [x, *told.values()], out)


def _take_tokens(draft: Draft, node: Node) -> Value:
    x = contiguous(draft, node, "x")
    places = contiguous(draft, node, "places", torch.int64)
    out = draft.output_of(node, range(3), torch.float32)
    batch, tokens, features = x.shape
    fields = {
        "batch": batch, "tokens": tokens, "taken": places.shape[0], "features": features,
        "x": x, "places": places, "out": out,
    }  # fmt: skip
    return draft.add(node, NativeStep(op_name(node), fields), [x, places], out)


def _as_taken(known: KnownSizes, kwargs: Any) -> Sequence[int] | None:
    x, places = (known.size(kwargs[name]) for name in ("x", "places"))
    types = tuple(known.dtypes.get(kwargs[name]) for name in ("x", "places"))
    fits = len(x) == 3 and len(places) == 1 and types == (torch.float32, torch.int64)
    return (x[0], places[0], x[2]) if fits else None


def _as_told(known: KnownSizes, kwargs: Any) -> tuple[torch.Tensor, ...] | None:
    mask = known.size(kwargs["mask"])
    if len(mask) != 2 or known.dtypes.get(kwargs["mask"]) is not torch.bool:
        return None
    rows = mask[0] * mask[1]
    sizes = (rows, mask[0] + 1, rows)
    return tuple(
        torch.empty(size, dtype=dtype, device="meta")
        for size, dtype in zip(sizes, _TYPES, strict=True)
    )


def _as_x(known: KnownSizes, kwargs: Any) -> torch.Size | None:
    x, places, starts = (known.size(kwargs[name]) for name in ("x", "places", "starts"))
    fits = len(x) == 3 and (*places, *starts) == (x[0] * x[1], x[0] + 1)
    types = tuple(known.dtypes.get(kwargs[name]) for name in ("x", "places", "starts"))
    return x if fits and types == (torch.float32, torch.int64, torch.int64) else None


FORMS = (
    NativeForm("present_tokens", lambda *_: None, _present_tokens, reads=None, results=_as_told),
    NativeForm("gather_tokens", _as_x, _gather_tokens, reads=None, gives=torch.float32),
    NativeForm("take_tokens", _as_taken, _take_tokens, reads=None, gives=torch.float32),
    NativeForm("scatter_tokens", _as_x, _moved, reads=None, gives=torch.float32),
)
