"""Rows of codes between the products of a transformer, and those products: one step each."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from x86quant.errors import NoKernelError
from x86quant.lowering.graph_tools import attribute, op_name
from x86quant.ops.rows import CODES, NORM_KINDS, NORMED, TOTAL
from x86quant.packing.linear_dynamic import Weights, remembered, row_routes
from x86quant.routing.sizes import Sizes
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
from x86quant.weight_form import features_of

Results = tuple[Value | None, ...]

_WEIGHTS = ("weight", "weight_scale", "bias")
#: The types of codes, scales and zero points.
CODE_TYPES = (torch.uint8, torch.float32, torch.int32)


# --- what several ops share ---


def code_sizes(sizes: Sequence[int]) -> tuple[torch.Tensor, ...]:
    """Row codes of rows of these sizes, without data."""
    shapes = (sizes, sizes[:-1], sizes[:-1])
    return tuple(map(_like, shapes, CODE_TYPES))


def _like(sizes: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(sizes, dtype=dtype, device="meta")


def contiguous(draft: Draft, node: Node, name: str, dtype: torch.dtype = torch.float32) -> Value:
    """The argument ``name`` of ``node`` as rows one behind another: itself, or a copy."""
    value = draft.value(node.kwargs[name])
    if value.meta.dtype != dtype:
        raise NoKernelError(f"{name} is {value.meta.dtype} instead of {dtype}")
    if value.meta.is_contiguous():
        return value
    copy = draft.new(f"{node.name}_{name}", _like(value.shape, dtype))
    copy.buffer.starts = value.buffer.starts
    return draft.copy(node, value, copy)


def result_of(draft: Draft, node: Node, index: int, dtype: torch.dtype) -> Value:
    """Where result ``index`` of ``node`` is to be written."""
    found = [n for n in node.users if n.target is operator.getitem and n.args[1] == index]
    sizes = draft.shapes[node][index].shape
    leaving = [n for n in found if draft.leaves(n)]
    if leaving:
        return draft.output_of(leaving[0], range(len(sizes)), dtype)
    return draft.new(f"{node.name}_{index}", _like(sizes, dtype))


def new_codes(draft: Draft, node: Node, first: int = 0) -> tuple[Value, Value, Value]:
    """Where ``node`` writes row codes, which are its results from ``first`` on."""
    codes, scale, zp = (result_of(draft, node, first + i, t) for i, t in enumerate(CODE_TYPES))
    return codes, scale, zp


def codes_fields(rows: int, features: int, source: Value, out: Sequence[Value]) -> dict[str, Any]:
    """The fields of the step that quantizes each of the rows of ``source``."""
    return {"rows": rows, "features": features, "x": source, **written(out)}


def add_rows(
    draft: Draft,
    node: Node,
    fields: dict[str, Any],
    read: Sequence[Value],
    results: Sequence[Value],
    op: str,
    kind: str = "rows",
    **facts: Any,
) -> None:
    """Append a step of ``kind`` that makes rows of ``results`` of the same rows of all of ``read``.

    Where only the first rows of what it reads hold anything, it computes no more.
    """
    every = {value.buffer.starts for value in read}
    if len(every) > 1:
        raise NoKernelError("of some of its operands all rows count, of others the first ones")
    (starts,) = every
    if starts is not None:
        count = Value(starts.buffer, starts.meta[-1:])
        fields, read = {**fields, "count": count}, [*read, count]
    for value in results:
        value.buffer.starts = starts
    step = NativeStep(kind, fields)
    draft.add(node, step, read, results[0], op, others=results[1:], **facts)


def written(out: Sequence[Value]) -> dict[str, Value]:
    """The fields for row codes that a step writes."""
    return dict(zip(("out_codes", "out_scale", "out_zero_point"), out, strict=True))


def _codes_read(draft: Draft, node: Node) -> tuple[dict[str, Value], int]:
    """The row codes that a product reads, as fields, and how many rows they are."""
    names = ("codes", "scale", "zero_point")
    found = {
        name: contiguous(draft, node, name, dtype)
        for name, dtype in zip(names, CODE_TYPES, strict=True)
    }
    if any(draft.is_input(value) for value in found.values()):
        raise NoKernelError("its zero points come from outside and would have to be checked")
    return found, math.prod(found["scale"].shape)


def _weights(draft: Draft, node: Node, weight: str, scale: str, bias: str) -> Weights:
    kwargs = node.kwargs
    given = None if kwargs[bias] is None else draft.table(node, bias)
    return draft.table(node, weight), draft.table(node, scale), given


def _linear(draft: Draft, node: Node, activation: str | None) -> tuple[Any, dict[str, Any]]:
    """The pack of a linear, and what its step says of it."""
    weights = _weights(draft, node, *_WEIGHTS)
    pack = _pack(draft.packs.programs.row_linear(weights, activation))
    return pack, _facts(draft, node, [weights])


def _pack(found: Any) -> Any:
    if found is None:
        raise NoKernelError("it has no weights to pack")
    return found


def _facts(draft: Draft, node: Node, weights: Sequence[Weights]) -> dict[str, Any]:
    rows = math.prod(draft.value(node.kwargs["scale"]).shape)
    count = sum(len(weight) * features_of(weight) for weight, *_ in weights)
    nbytes = sum(x.nbytes for weight, scale, _ in weights for x in (weight, scale))
    facts: dict[str, Any] = {"multiply_adds": rows * count, "weight_bytes": nbytes}
    activation: Any = node.kwargs.get("activation")
    routes = row_routes(weights[-1], activation)
    if routes is None or not rows:
        return facts
    return {**facts, "answer": routes.choice_for(rows), "sizes": Sizes(None, rows, None)}


def _features(node: Node, draft: Draft, weight: str = "weight") -> int:
    return int(draft.table(node, weight).shape[0])


# --- lowering ---


def _quantize_rows(draft: Draft, node: Node) -> Results:
    x = contiguous(draft, node, "x")
    out = new_codes(draft, node)
    features = x.shape[-1]
    fields = codes_fields(math.prod(x.shape[:-1]), features, x, out)
    return _added(draft, node, fields, [x], out)


def _added(
    draft: Draft,
    node: Node,
    fields: dict[str, Any],
    read: Sequence[Value],
    results: Results,
    **facts: Any,
) -> Results:
    """Append a step with several results."""
    values = [value for value in results if value is not None]
    add_rows(draft, node, fields, read, values, op_name(node), **facts)
    return results


def _linear_rows(draft: Draft, node: Node) -> Value:
    activation: Any = node.kwargs["activation"]
    read, rows = _codes_read(draft, node)
    pack, facts = _linear(draft, node, activation)
    out = draft.output_of(node, range(len(draft.shapes[node])), torch.float32)
    fields = {"rows": rows, "features": _features(node, draft), "pack": pack, "total": out, **read}
    add_rows(draft, node, fields, [*read.values()], [out], op_name(node), **facts)
    return out


def _linear_real(draft: Draft, node: Node) -> Value:
    activation: Any = node.kwargs["activation"]
    x = contiguous(draft, node, "x", torch.uint8)
    rows = math.prod(x.shape[:-1])
    pack = _pack(draft.packs.programs.row_linear(_weights(draft, node, *_WEIGHTS), activation))
    out = draft.output_of(node, range(len(draft.shapes[node])), torch.float32)
    features = _features(node, draft)
    fields = {"rows": rows, "features": features, "pack": pack, "total": out, "codes": x}
    of_all: Any = {"scale_of_all": node.kwargs["x_scale"], "zero_point_of_all": node.kwargs["x_zp"]}
    count = features * x.shape[-1]
    add_rows(
        draft, node, {**fields, **of_all}, [x], [out], op_name(node),
        multiply_adds=rows * count, weight_bytes=count,
    )  # fmt: skip
    return out


#: A product makes so many results at a time; idle ones take as long as others.
_RESULTS_AT_A_TIME = 16
#: Convolutions of few results are done column by column where that leaves so small a share to do.
_WORTHWHILE = 0.75
#: Lines are shared among threads whole, and copied whole.
_FEWEST_LINES, _MOST_BYTES_A_LINE = 16, 1 << 20


def _conv_real(draft: Draft, node: Node) -> Value:
    kwargs: Any = node.kwargs
    x = draft.with_channels_adjacent(node, draft.value(kwargs["x"]), 1)
    weights = _weights(draft, node, *_WEIGHTS)
    weight, scale, bias = weights
    fields: dict[str, Any] = window_of(kwargs, weight.shape[1:-1])
    out, moves = real_result(draft, node)
    kind, rows = "conv_real", (weight.flatten(1), scale, bias)
    if _is_done_by_columns(weight, kwargs, fields, out.shape):
        columns = remembered("by columns", weights[:1], None, lambda: _columns_of(weight))
        if columns is not None:
            kind, rows = "conv_columns", columns
    pack = _pack(draft.packs.programs.row_linear(rows, kwargs["activation"]))
    if kind == "conv_columns":
        *lengths, across = fields["kernel"]
        fields |= {"kernel": [*lengths, 1], "columns": across, "apart": fields["dilation"][2]}
        fields["scale"] = scale * torch.tensor(kwargs["x_scale"], dtype=torch.float32)
        fields["bias"] = torch.zeros_like(scale) if bias is None else bias
    else:
        fields["a_scale"] = kwargs["x_scale"]
    fields |= {"a": as_image(x), "pack": pack, "out": out, "a_zp": kwargs["x_zp"]}
    draft.add(
        node, NativeStep(kind, fields), [x], out,
        multiply_adds=multiply_adds(tuple(out.shape), tuple(weight.shape), 0),
        weight_bytes=weight.numel(),
    )  # fmt: skip
    return in_their_order(draft, node, out) if moves else out


def _is_done_by_columns(
    weight: torch.Tensor, kwargs: Any, fields: dict[str, list[int]], out: Sequence[int]
) -> bool:
    """Whether a product for each column of taps, and sums of these, take clearly less time."""
    columns, step, apart = (fields[name][2] for name in ("kernel", "stride", "dilation"))
    if columns == 1 or step != 1 or kwargs["activation"] is not None:
        return False
    results, width = len(weight), out[-1]
    windows = width + (columns - 1) * apart
    lines = math.prod(out) // max(results * width, 1)
    bytes_a_window = max(weight.shape[1:].numel() // columns, 4 * results * columns)
    if lines < _FEWEST_LINES or windows * bytes_a_window > _MOST_BYTES_A_LINE:
        return False
    done = -(-results // _RESULTS_AT_A_TIME) * columns * width
    return -(-results * columns // _RESULTS_AT_A_TIME) * windows <= _WORTHWHILE * done


#: Sums of a column are floats that hold every integer up to here, and those of a window int32.
_MOST_OF_A_COLUMN, _MOST_OF_A_WINDOW = 1 << 24, (1 << 31) - 1


def _columns_of(weight: torch.Tensor) -> Weights | None:
    """The weights of each column of taps, one column after the other; None if sums may not fit."""
    columns = weight.movedim(-2, 0).flatten(2)
    sums = columns.to(torch.int32).abs().sum(2) * 255
    if int(sums.max()) > _MOST_OF_A_COLUMN or int(sums.sum(0).max()) > _MOST_OF_A_WINDOW:
        return None
    rows = columns.flatten(0, 1).contiguous()
    return rows, torch.ones(len(rows), dtype=torch.float32), None


def _linear_rows_rows(draft: Draft, node: Node) -> Results:
    activation: Any = node.kwargs["activation"]
    pack, facts = _linear(draft, node, activation)
    return _product_as_codes(draft, node, pack, _features(node, draft), facts)


def _gated_rows_rows(draft: Draft, node: Node) -> Results:
    activation: Any = node.kwargs["activation"]
    both = [_weights(draft, node, f"{x}_weight", f"{x}_scale", f"{x}_bias") for x in ("gate", "up")]
    pack = _pack(draft.packs.programs.gated_rows(both[0], both[1], activation))
    features = _features(node, draft, "up_weight")
    return _product_as_codes(draft, node, pack, features, _facts(draft, node, both))


def _product_as_codes(
    draft: Draft, node: Node, pack: Any, features: int, facts: dict[str, Any]
) -> Results:
    read, rows = _codes_read(draft, node)
    out = new_codes(draft, node)
    fields = {"rows": rows, "features": features, "pack": pack, **read, **written(out)}
    return _added(draft, node, fields, [*read.values()], out, **facts)


def _linear_rows_norm(draft: Draft, node: Node) -> Results:
    read, rows = _codes_read(draft, node)
    pack, facts = _linear(draft, node, None)
    fields = {"rows": rows, "features": _features(node, draft), "pack": pack, **read}
    return _normed(draft, node, fields, [*read.values()], facts)


def _norm_rows(draft: Draft, node: Node) -> Results:
    x = contiguous(draft, node, "x")
    fields = {"rows": math.prod(x.shape[:-1]), "features": x.shape[-1], "x": x}
    return _normed(draft, node, fields, [x], {})


def _normed(
    draft: Draft, node: Node, fields: dict[str, Any], read: list[Value], facts: dict[str, Any]
) -> Results:
    """A step that ends with a norm; which of its five results are wanted is in ``outputs``."""
    kwargs: Any = node.kwargs
    if kwargs["residual"] is not None:
        residual = contiguous(draft, node, "residual")
        fields["residual"] = residual
        read.append(residual)
    wanted = kwargs["outputs"]
    if wanted != TOTAL:
        fields["norm"] = 1 + NORM_KINDS.index(kwargs["kind"])
        fields["eps"] = float(kwargs["eps"])
    for name in ("norm_weight", "norm_bias"):
        if wanted != TOTAL and kwargs[name] is not None:
            fields[name] = draft.table(node, name)
    total = result_of(draft, node, 0, torch.float32) if wanted & TOTAL else None
    normed = result_of(draft, node, 1, torch.float32) if wanted & NORMED else None
    codes: tuple[Value | None, ...] = (None, None, None)
    if total is not None:
        fields["total"] = total
    if normed is not None:
        fields["normed"] = normed
    if wanted & CODES:
        new = new_codes(draft, node, 2)
        fields.update(written(new))
        codes = new
    return _added(draft, node, fields, read, (total, normed, *codes), **facts)


# --- sizes ---


def _as_x(known: KnownSizes, kwargs: Any) -> tuple[torch.Tensor, ...] | None:
    return code_sizes(known.size(kwargs["x"]))


def _product_sizes(known: KnownSizes, kwargs: Any) -> Sequence[int] | None:
    return _product(known, kwargs, kwargs["weight"])


def _product(known: KnownSizes, kwargs: Any, weight: Node) -> Sequence[int] | None:
    codes, (outputs, inputs) = known.size(kwargs["codes"]), _sizes_of(known, weight)
    of_rows = [known.size(kwargs[name]) for name in ("scale", "zero_point")]
    fits = codes[-1] == inputs and all(size == codes[:-1] for size in of_rows)
    return (*codes[:-1], outputs) if fits else None


def _sizes_of(known: KnownSizes, weight: Node) -> tuple[int, int]:
    """Outputs and input features of a weight, which is in the graph: see ``has_constants``."""
    tensor: torch.Tensor = attribute(known.root, str(weight.target))
    return tensor.shape[0], features_of(tensor)


def _conv_sizes(known: KnownSizes, kwargs: Any) -> Sequence[int] | None:
    outputs, *kernel, channels = known.size(kwargs["weight"])
    x = known.size(kwargs["x"])
    sizes = window_sizes(known, kwargs, kernel)
    return None if sizes is None or x[1] != channels else [x[0], outputs, *sizes]


def _real_sizes(known: KnownSizes, kwargs: Any) -> Sequence[int] | None:
    x, (outputs, inputs) = known.size(kwargs["x"]), _sizes_of(known, kwargs["weight"])
    return (*x[:-1], outputs) if len(x) > 1 and x[-1] == inputs else None


def _product_codes(known: KnownSizes, kwargs: Any) -> tuple[torch.Tensor, ...] | None:
    sizes = _product(known, kwargs, kwargs["weight"])
    return None if sizes is None else code_sizes(sizes)


def _gated_codes(known: KnownSizes, kwargs: Any) -> tuple[torch.Tensor, ...] | None:
    sizes = _product(known, kwargs, kwargs["up_weight"])
    return None if sizes is None else code_sizes(sizes)


def _norm_sizes(known: KnownSizes, kwargs: Any) -> tuple[torch.Tensor, ...] | None:
    return _norm_results(known, kwargs, known.size(kwargs["x"]))


def _product_norm_sizes(known: KnownSizes, kwargs: Any) -> tuple[torch.Tensor, ...] | None:
    sizes = _product(known, kwargs, kwargs["weight"])
    return None if sizes is None else _norm_results(known, kwargs, sizes)


def _norm_results(
    known: KnownSizes, kwargs: Any, sizes: Sequence[int]
) -> tuple[torch.Tensor, ...] | None:
    residual = kwargs["residual"]
    if residual is not None and tuple(known.size(residual)) != tuple(sizes):
        return None
    wanted = kwargs["outputs"]
    floats = [_like(sizes if wanted & bit else (0,), torch.float32) for bit in (TOTAL, NORMED)]
    return (*floats, *(code_sizes(sizes) if wanted & CODES else map(_like, [(0,)] * 3, CODE_TYPES)))


# --- what is taken ---

_CONSTANTS = (
    "weight", "weight_scale", "bias", "gate_weight", "gate_scale", "gate_bias", "up_weight",
    "up_scale", "up_bias", "norm_weight", "norm_bias",
)  # fmt: skip


def has_constants(node: Node) -> bool:
    """Whether what is to be packed is in the graph, and all else is computed or given."""
    return all(
        (x.op == "get_attr") == (name in _CONSTANTS)
        for name, x in node.kwargs.items()
        if isinstance(x, Node)
    )


def _form(op: str, lower: Any, results: Any) -> NativeForm:
    return NativeForm(op, _product_sizes, lower, has_constants, None, results=results)


FORMS = (
    NativeForm(
        "linear_rows", _product_sizes, _linear_rows, has_constants, None, gives=torch.float32
    ),
    NativeForm(
        "conv_real", _conv_sizes, _conv_real, has_constants, gives=torch.float32, viewed=False
    ),
    NativeForm("linear_real", _real_sizes, _linear_real, has_constants, gives=torch.float32),
    _form("quantize_rows", _quantize_rows, _as_x),
    _form("linear_rows_rows", _linear_rows_rows, _product_codes),
    _form("gated_rows_rows", _gated_rows_rows, _gated_codes),
    _form("norm_rows", _norm_rows, _norm_sizes),
    _form("linear_rows_norm", _linear_rows_norm, _product_norm_sizes),
)
