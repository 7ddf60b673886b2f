"""Images of one column: long signals that a network looks at as two-dimensional."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from x86quant.lowering.graph_tools import (
    add_constant,
    constant,
    emit,
    finish,
    inherit,
    nodes_of,
    replace,
)

#: Height and width change places.
_TURNED = (0, 1, 3, 2)


def turn_columns(gm: GraphModule) -> int:
    """Convolutions along images of one column run along rows: a window is adjacent bytes there.

    In memory nothing moves. It holds for any width; the example says which images have one column.

    Returns the number of convolutions.
    """
    changed = 0
    for conv in nodes_of(gm, "conv"):
        weight = constant(gm, conv.kwargs["weight"])
        if weight is None or not _is_along_a_column(conv, weight):
            continue
        _turn(gm, conv, weight)
        changed += 1
    return finish(gm, changed)


def _is_along_a_column(conv: Node, weight: torch.Tensor) -> bool:
    kwargs: Any = conv.kwargs
    shape = kwargs["x"].meta.get("shape")
    return (
        weight.dim() == 4
        and shape is not None
        and "shape" in conv.meta
        and shape[-1] == weight.shape[-1] == 1
        and weight.shape[-2] > 1
        and kwargs["padding"][1] == 0
        and not kwargs["transposed"]
        and "order" not in conv.meta
    )


def _turn(gm: GraphModule, conv: Node, weight: torch.Tensor) -> None:
    kwargs: dict[str, Any] = dict(conv.kwargs)
    for name in ("stride", "padding", "dilation", "output_padding"):
        kwargs[name] = kwargs[name][::-1]
    with gm.graph.inserting_before(conv):
        turned = weight.transpose(2, 3).contiguous()
        kwargs["weight"] = add_constant(gm, gm.graph, f"{kwargs['weight'].target}_turned", turned)
        for name in ("x", "residual"):
            if kwargs[name] is not None:
                kwargs[name] = _turned(gm, kwargs[name])
        new = emit(gm.graph, "conv", conv, **kwargs)
        new.meta["shape"] = _exchanged(conv.meta["shape"])
        new.meta["order"] = _TURNED
        back = inherit(gm.graph.call_function(torch.permute, (new, _TURNED)), conv)
    replace(conv, back)


def _turned(gm: GraphModule, codes: Node) -> Node:
    """``codes`` with height and width exchanged, from before they were turned back if they were."""
    if codes.target is torch.permute and codes.args[1] == _TURNED:
        before = codes.args[0]
        assert isinstance(before, Node)
        return before
    node = inherit(gm.graph.call_function(torch.permute, (codes, _TURNED)), codes)
    if "shape" in codes.meta:
        node.meta["shape"] = _exchanged(codes.meta["shape"])
    node.meta.pop("source", None)
    return node


def _exchanged(shape: Any) -> Any:
    return (*shape[:2], shape[3], shape[2])
