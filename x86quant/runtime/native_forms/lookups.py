"""Lookups in the tables of a model, all in one step, and the interaction behind them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.fx import Node

from x86quant.errors import InvalidInputError, NoKernelError
from x86quant.lowering.graph_tools import attribute, is_op, op_name
from x86quant.ops.embedding import interaction_width, named
from x86quant.runtime import layout
from x86quant.runtime.draft import Draft
from x86quant.runtime.native_form import KnownSizes, NativeForm
from x86quant.runtime.native_forms.code_rows import contiguous
from x86quant.runtime.plan import Value
from x86quant.runtime.programs import NativeStep

_NUMBERS = 7


def _embedding_bags(draft: Draft, node: Node) -> Value:
    fields, read, facts = _lookups(draft, node)
    out = draft.output_of(node, range(2), torch.float32)
    fields |= {"out": out, "out_stride": out.meta.stride(0)}
    return draft.add(node, NativeStep("lookup", fields), read, out, op_name(node), **facts)


def _interact_bags(draft: Draft, node: Node) -> Value:
    kwargs: Any = node.kwargs
    fields, read, facts = _lookups(draft, node)
    dense = contiguous(draft, node, "dense")
    if dense.shape[0] != fields["bags"]:
        raise InvalidInputError(
            f"there are {dense.shape[0]} samples, but {fields['bags']} bags in the tables"
        )
    out = draft.output_of(node, range(2))
    fields |= {
        "dense": dense,
        "dense_stride": dense.meta.stride(0),
        "out": out,
        "out_stride": out.meta.stride(0),
        "a_mult": 1.0 / kwargs["out_scale"],
        "out_zp": kwargs["out_zp"],
    }
    if kwargs["places"] is not None:
        fields["places"] = list(kwargs["places"])
    count = len(kwargs["names"])
    facts["multiply_adds"] = dense.meta.numel() * count * (count + 1) // 2
    step = NativeStep("lookup", fields)
    return draft.add(node, step, [dense, *read], out, op_name(node), **facts)


def _lookups(draft: Draft, node: Node) -> tuple[dict[str, Any], list[Value], dict[str, Any]]:
    """The fields of a step that reads tables, what it reads, and what is said of it."""
    kwargs: Any = node.kwargs
    names, formats = kwargs["names"], kwargs["formats"]
    last = bool(kwargs["include_last_offset"])
    each = [_each(draft, kwargs[x], len(names)) for x in ("indices", "offsets", "weights")]
    fields: dict[str, Any] = {"tables": len(names), "last_offset": last}
    read: list[Value] = []
    row_bytes = 0
    counts = {
        field: [draft.open_size(node) for node in kwargs[x]]
        for field, x in (("count", "indices"), ("weight_count", "weights"))
    }
    for i, (name, rows, *given) in enumerate(zip(names, kwargs["rows"], *each, strict=True)):
        table = attribute(draft.root, str(rows.target))
        if table.dim() != 2 or not table.is_contiguous():
            raise NoKernelError("the rows of a table do not lie one behind the other")
        # Indices without offsets may have any strides.
        is_list = (given[1] is not None, True, True)
        operands = [
            _in_order(draft, node, x) if o else x for x, o in zip(given, is_list, strict=True)
        ]
        own, bags = _operands(named(name, len(table)), operands, last)
        if fields.setdefault("bags", bags) != bags:
            first = fields["bags"]
            raise InvalidInputError(f"the table {name} has {bags} bags, but {names[0]} has {first}")
        format_ = formats[_NUMBERS * i : _NUMBERS * (i + 1)]
        own |= {"table": [*table.shape, *format_, *own["table"]], "rows": table}
        own |= {field: sizes[i] for field, sizes in counts.items() if any(sizes[i : i + 1])}
        if name:
            own["name"] = list(name.encode())
        fields |= {f"{field}{i}": value for field, value in own.items()}
        read += [x for x in operands if x is not None]
        row_bytes += given[0].meta.numel() * table.shape[1]
    return fields, read, {"weight_bytes": row_bytes}


def _operands(table: str, operands: Sequence[Any], last: bool) -> tuple[dict[str, Any], int]:
    """The fields of one table's indices, offsets and weights, and how many bags they are."""
    indices, offsets, weights = operands
    meta, count = indices.meta, indices.meta.numel()
    if meta.dtype not in (torch.int32, torch.int64):
        raise NoKernelError(f"indices are {meta.dtype}")
    if meta.dim() != (2 if offsets is None else 1):
        raise NoKernelError("indices have other dimensions than bags of them")
    fields: dict[str, Any] = {"indices": indices}
    if offsets is None:
        bags, each = meta.shape
        fields["strides"] = [*meta.stride()]
    else:
        if offsets.meta.dtype != meta.dtype:
            raise NoKernelError("offsets are not of the type of the indices")
        bags, each = offsets.meta.shape[0] - last, 0
        fields["offsets"] = offsets
    if weights is not None:
        if weights.meta.dtype != torch.float32:
            raise NoKernelError("weights are not float32")
        if (given := weights.meta.numel()) != count:
            raise InvalidInputError(
                f"{table}: there are {given} per_sample_weights for {count} indices"
            )
        fields["weights"] = weights
    fields["table"] = [each, count, meta.element_size()]
    return fields, bags


def _in_order(draft: Draft, node: Node, value: Value | None) -> Value | None:
    """``value``, or a copy whose elements lie one behind the other."""
    if value is None or value.meta.is_contiguous():
        return value
    order = range(value.meta.dim())
    copy = draft.new(f"{node.name}_operand", layout.like(value.shape, order, value.meta.dtype))
    return draft.copy(node, value, copy)


def _each(draft: Draft, given: Sequence[Node], count: int) -> Iterator[Value | None]:
    """One value for each table."""
    if not given:
        return iter([None] * count)
    values = [draft.value(node) for node in given]
    if count > 1 and len(given) == 1:
        whole = values[0]
        if whole.meta.dim() < 2 or len(whole.meta) != count:
            raise NoKernelError("the first dimension is not that of the tables")
        return iter([Value(whole.buffer, part) for part in whole.meta.unbind(0)])
    if len(given) != count:
        raise NoKernelError("there are not as many operands as tables")
    return iter(values)


# --- sizes ---


def _bag_sizes(known: KnownSizes, kwargs: Any) -> Sequence[int] | None:
    bags = _bags(known, kwargs)
    return None if bags is None else (bags, sum(kwargs["formats"][::_NUMBERS]))


def _bags(known: KnownSizes, kwargs: Any) -> int | None:
    given = kwargs["offsets"] or kwargs["indices"]
    sizes = known.size(given[0])
    stacked = len(kwargs["names"]) > 1 and len(given) == 1
    if len(sizes) != (1 if kwargs["offsets"] else 2) + stacked:
        return None
    return int(sizes[int(stacked)]) - bool(kwargs["offsets"] and kwargs["include_last_offset"])


def _interaction_sizes(known: KnownSizes, kwargs: Any) -> Sequence[int] | None:
    dense, bags = known.size(kwargs["dense"]), _bags(known, kwargs)
    if bags is None or len(dense) != 2 or dense[1] != kwargs["formats"][0]:
        return None
    return bags, interaction_width(dense[1], len(kwargs["names"]), kwargs["places"])


# --- what is taken ---


def _takes(node: Node) -> bool:
    """Constant tables; and bags whose indices are as many in each call of a shape, or are open."""
    kwargs: Any = node.kwargs
    # By position in graphs that were never lowered, only traced.
    if "rows" not in kwargs or any(x.op != "get_attr" for x in kwargs["rows"]):
        return False
    if any(x.op == "get_attr" for x in (*kwargs["indices"], *kwargs["offsets"])):
        return False
    lists = (*kwargs["indices"], *kwargs["weights"])
    return not _is_ragged(kwargs) or all(is_open(x) for x in lists if x.op == "placeholder")


def _is_ragged(kwargs: Any) -> bool:
    """Whether indices are one-dimensional and come with offsets, so that they are of any number."""
    return bool(kwargs["offsets"]) and not _is_stacked(kwargs, "indices")


def _is_stacked(kwargs: Any, operand: str) -> bool:
    return len(kwargs["names"]) > 1 and len(kwargs[operand]) == 1


def is_open(placeholder: Node) -> bool:
    """Whether one plan serves for any number of elements: indices of bags, or their weights."""
    return bool(placeholder.users) and all(_are_in_bags(placeholder, x) for x in placeholder.users)


def _are_in_bags(x: Node, user: Node) -> bool:
    kwargs: Any = user.kwargs
    if not is_op(user, "embedding_bags", "interact_bags") or "rows" not in kwargs:
        return False
    others = (kwargs.get("dense"), *kwargs["offsets"], *kwargs["rows"])
    return _is_ragged(kwargs) and not _is_stacked(kwargs, "weights") and x not in others


FORMS = (
    NativeForm(
        "embedding_bags", _bag_sizes, _embedding_bags, _takes, None, torch.float32, viewed=False
    ),
    NativeForm("interact_bags", _interaction_sizes, _interact_bags, _takes, None),
)
