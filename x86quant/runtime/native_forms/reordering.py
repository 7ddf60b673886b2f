"""Row codes whose features are put in another order."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from x86quant.lowering.graph_tools import op_name
from x86quant.runtime.draft import Draft
from x86quant.runtime.native_form import KnownSizes, NativeForm
from x86quant.runtime.native_forms.code_rows import add_rows, contiguous
from x86quant.runtime.plan import Value


def _reorder_codes(draft: Draft, node: Node) -> Value:
    codes = contiguous(draft, node, "codes", torch.uint8)
    out = draft.output_of(node, range(codes.meta.dim()), torch.uint8)
    fields = {
        "rows": math.prod(codes.shape[:-1]), "features": codes.shape[-1], "codes": codes,
        "out_codes": out, "order": draft.table(node, "order"),
    }  # fmt: skip
    add_rows(draft, node, fields, [codes], [out], op_name(node), kind="reorder_codes")
    return out


def _sizes(known: KnownSizes, kwargs: Any) -> Sequence[int] | None:
    codes, order = known.size(kwargs["codes"]), known.size(kwargs["order"])
    return codes if len(codes) and tuple(order) == (codes[-1],) else None


def _takes(node: Node) -> bool:
    codes, order = node.kwargs["codes"], node.kwargs["order"]
    return (
        isinstance(order, Node)
        and order.op == "get_attr"
        and isinstance(codes, Node)
        and codes.op != "get_attr"
    )


FORMS = (NativeForm("reorder_codes", _sizes, _reorder_codes, _takes),)
