"""Attention: heads as they lie among the results of a product, without copies."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from x86quant.errors import NoKernelError
from x86quant.lowering.graph_tools import op_name
from x86quant.runtime import layout
from x86quant.runtime.draft import Draft
from x86quant.runtime.native_form import KnownSizes, NativeForm
from x86quant.runtime.native_forms.code_rows import (
    add_rows,
    code_sizes,
    codes_fields,
    contiguous,
    new_codes,
)
from x86quant.runtime.plan import Value
from x86quant.runtime.programs import NativeStep


def _attention(draft: Draft, node: Node) -> Value:
    out = draft.output_of(node, range(4), torch.float32)
    return _attend(draft, node, out)


def _attention_rows(draft: Draft, node: Node) -> tuple[Value, ...]:
    return _quantized(draft, node, _attend(draft, node, _new_floats(draft, node)))


def _present_attention_rows(draft: Draft, node: Node) -> tuple[Value, ...]:
    """Attention whose rows lie one behind another, as those that it reads do."""
    starts = contiguous(draft, node, "starts", torch.int64)
    seen = contiguous(draft, node, "seen", torch.bool)
    q = draft.value(node.kwargs["q"])
    out = _new_floats(draft, node)
    mask = Value(seen.buffer, seen.meta.view(q.shape[0], 1, 1, q.shape[1]))
    out.buffer.starts = q.buffer.starts
    return _quantized(draft, node, _attend(draft, node, out, mask, starts))


def _new_floats(draft: Draft, node: Node) -> Value:
    meta = layout.like(draft.value(node.kwargs["q"]).shape, range(4), torch.float32)
    return draft.new(f"{node.name}_floats", meta)


def _quantized(draft: Draft, node: Node, floats: Value) -> tuple[Value, ...]:
    batch, tokens, heads, size = floats.shape
    codes = new_codes(draft, node)
    fields = codes_fields(batch * tokens, heads * size, floats, codes)
    add_rows(draft, node, fields, [floats], codes, "quantize_rows")
    return codes


def _attend(
    draft: Draft, node: Node, out: Value, mask: Value | None = None, starts: Value | None = None
) -> Value:
    """The step of an attention; ``mask`` and ``starts`` are those of sentences without padding."""
    kwargs: Any = node.kwargs
    heads = {name: _adjacent(draft, node, name, may_copy=starts is None) for name in "qkv"}
    batch, queries, count, size = heads["q"].shape
    _, keys, kv_count, _ = heads["k"].shape
    fields: dict[str, Any] = {
        "batch": batch, "queries": queries, "keys": keys, "heads": count, "kv_heads": kv_count,
        "size": size, "causal": kwargs["causal"], "scale": float(kwargs["scale"]), "out": out,
        **heads, **{f"{name}_strides": [*x.meta.stride()[:3]] for name, x in heads.items()},
    }  # fmt: skip
    if starts is not None:
        fields.update({f"{name}_strides": _row_strides(x) for name, x in heads.items()})
    read = [*heads.values()]
    if starts is not None:
        fields["starts"] = starts
        read.append(starts)
    elif kwargs["mask"] is not None:
        mask = _adjacent(draft, node, "mask")
    if mask is not None:
        strides = [
            0 if size == 1 else stride
            for size, stride in zip(mask.shape[:3], mask.meta.stride()[:3], strict=True)
        ]
        if starts is not None:
            strides[0] = keys
        is_bool = mask.meta.dtype == torch.bool
        fields.update(mask=mask, mask_is_bool=is_bool, mask_strides=strides)
        read.append(mask)
    products = 2 * batch * count * queries * keys * size
    step = NativeStep("attention", fields)
    return draft.add(node, step, read, out, op_name(node), multiply_adds=products)


def _adjacent(draft: Draft, node: Node, name: str, *, may_copy: bool = True) -> Value:
    """An operand, copied unless its innermost elements are adjacent, as steps read them.

    Biases that are looked up head by head are not, nor is one cell of a mask seen many times, nor
    may heads be that torch has computed.
    """
    value = draft.value(node.kwargs[name])
    if value.meta.stride(3) == 1 or value.shape[3] == 1:
        return value
    if not may_copy:
        raise NoKernelError("the features of its heads are not adjacent")
    meta = layout.like(value.shape, range(4), value.meta.dtype)
    copied = draft.new(f"{node.name}_{name}", meta)
    draft.copy(node, value, copied)
    return copied


def _cached_attention(draft: Draft, node: Node) -> Value:
    kwargs: Any = node.kwargs
    new = {name: _adjacent(draft, node, name) for name in "qkv"}
    whole, length, hidden = (draft.value(kwargs[name]) for name in ("cache", "length", "hidden"))
    if not whole.meta.is_contiguous() or not hidden.meta.is_contiguous():
        raise NoKernelError("its cache is not contiguous")
    if (length.meta.dtype, hidden.meta.dtype) != (torch.int64, torch.int64):
        raise NoKernelError("its length is no int64")
    first = 2 * kwargs["layer"]
    held = {
        name: Value(whole.buffer, whole.meta[first + number])
        for number, name in enumerate(("keys", "values"))
    }
    if "scales" in kwargs:
        scales = draft.value(kwargs["scales"])
        if not scales.meta.is_contiguous():
            raise NoKernelError("the scales of its cache are not contiguous")
        for number, name in enumerate(("key_scales", "value_scales")):
            held[name] = Value(scales.buffer, scales.meta[first + number])
    out = draft.output_of(node, range(4), torch.float32)
    batch, tokens, heads, size = new["q"].shape
    tensors = {**new, **held}
    fields: dict[str, Any] = {
        "batch": batch, "tokens": tokens, "heads": heads, "kv_heads": whole.shape[2], "size": size,
        "capacity": whole.shape[3], "scale": float(kwargs["scale"]),
        "length": length, "hidden": hidden, "out": out,
        **tensors, **{f"{name}_strides": [*x.meta.stride()[:-1]] for name, x in tensors.items()},
    }  # fmt: skip
    step = NativeStep("cached_attention", fields)
    return draft.add(node, step, [*tensors.values(), length, hidden], out, op_name(node))


def _row_strides(heads: Value) -> list[int]:
    """Strides of heads [batch, tokens, heads, size] whose rows lie one behind another."""
    batch, tokens = heads.shape[:2]
    of_batch, of_row, of_head = heads.meta.stride()[:3]
    if tokens == 1:
        of_row = of_batch
    if batch > 1 and of_batch != tokens * of_row:
        raise NoKernelError("the rows of its heads do not lie one behind another")
    return [tokens * of_row, of_row, of_head]


def _reads(node: Node) -> bool:
    """Whether heads are computed or given; a mask may be a constant, too."""
    return all(isinstance(x := node.kwargs[name], Node) and x.op != "get_attr" for name in "qkv")


def _as_q(known: KnownSizes, kwargs: Any) -> Sequence[int] | None:
    q, k, v = (known.size(kwargs[name]) for name in "qkv")
    fits = len(q) == len(k) == 4 and k == v and q[0] == k[0] and q[3] == k[3]
    fits = fits and k[2] > 0 and q[2] % k[2] == 0 and _mask_fits(known, kwargs["mask"], q, k)
    floats = all(known.dtypes[kwargs[name]] is torch.float32 for name in "qkv")
    return q if fits and floats else None


def _reads_cache(node: Node) -> bool:
    """Whether its cache is an input: it is written to."""
    names = ("cache", "length", "hidden", *(["scales"] if "scales" in node.kwargs else []))
    told = (node.kwargs[name] for name in names)
    given = all(isinstance(x, Node) and x.op == "placeholder" for x in told)
    return given and _reads(node)


def _as_newest(known: KnownSizes, kwargs: Any) -> Sequence[int] | None:
    q, k, v, cache = (known.size(kwargs[name]) for name in ("q", "k", "v", "cache"))
    fits = len(q) == len(k) == 4 and len(cache) == 5 and k == v and q[:2] == k[:2]
    if not fits or (k[0], k[2], k[3]) != (cache[1], cache[2], cache[4]) or 0 in (*q, *k):
        return None
    fits = known.size(kwargs["hidden"]) == q[:1] and q[3] == k[3] and q[2] % k[2] == 0
    fits = fits and 0 <= 2 * kwargs["layer"] < cache[0] - 1
    floats = all(known.dtypes[kwargs[n]] is torch.float32 for n in "qkv")
    held = torch.int8 if "scales" in kwargs else torch.float32
    return q if fits and floats and known.dtypes[kwargs["cache"]] is held else None


def _as_newest_on_codes(known: KnownSizes, kwargs: Any) -> Sequence[int] | None:
    scales = kwargs["scales"]
    fits = known.size(scales) == known.size(kwargs["cache"])[:4]
    fits = fits and known.dtypes[scales] is torch.float32
    return _as_newest(known, kwargs) if fits else None


def _mask_fits(known: KnownSizes, mask: Node | None, q: torch.Size, k: torch.Size) -> bool:
    if mask is None:
        return True
    sizes, scores = known.size(mask), (q[0], q[2], q[1], k[1])
    return (
        known.dtypes.get(mask) in (torch.bool, torch.float32)
        and len(sizes) == 4
        and sizes[3] == scores[3]
        and all(size in (1, score) for size, score in zip(sizes, scores, strict=True))
    )


def _as_present_rows(known: KnownSizes, kwargs: Any) -> tuple[torch.Tensor, ...] | None:
    q, k, starts, seen = (known.size(kwargs[name]) for name in ("q", "k", "starts", "seen"))
    fits = len(q) == len(k) == 4 and q[1] == k[1]
    fits = fits and (*starts, *seen) == (q[0] + 1, q[0] * q[1])
    types = (known.dtypes.get(kwargs["starts"]), known.dtypes.get(kwargs["seen"]))
    fits = fits and types == (torch.int64, torch.bool)
    return _as_rows(known, {**kwargs, "mask": None}) if fits else None


def _as_rows(known: KnownSizes, kwargs: Any) -> tuple[torch.Tensor, ...] | None:
    q = _as_q(known, kwargs)
    return None if q is None else code_sizes((*q[:2], math.prod(q[2:])))


FORMS = (
    NativeForm("attention", _as_q, _attention, _reads, None, gives=torch.float32),
    NativeForm(
        "cached_attention", _as_newest, _cached_attention, _reads_cache, None, gives=torch.float32
    ),
    NativeForm(
        "int8_cached_attention",
        _as_newest_on_codes,
        _cached_attention,
        _reads_cache,
        None,
        gives=torch.float32,
    ),
    NativeForm("attention_rows", _as_q, _attention_rows, _reads, None, results=_as_rows),
    NativeForm(
        "present_attention_rows",
        _as_q,
        _present_attention_rows,
        _reads,
        None,
        results=_as_present_rows,
    ),
)
