"""An instance norm in float is a group norm of one channel a group, of contiguous values.

The same sums, which torch takes a third of the time for, since it has a kernel for them.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.fx import GraphModule, Node

from x86quant.lowering.graph_tools import (
    add_constant,
    dequantized,
    finish,
    inherit,
    replace,
    sole_user,
)
from x86quant.lowering.views import laid_out

#: Dimensions of a batch, by module: without the first of them channels lie elsewhere.
_RANKS = {nn.InstanceNorm1d: 3, nn.InstanceNorm2d: 4, nn.InstanceNorm3d: 5}


def run(gm: GraphModule) -> int:
    """Apply the pass to ``gm``; returns the number of norms."""
    changed = 0
    for node in list(gm.graph.nodes):
        x = node.args[0] if node.args else None
        shape = x.meta.get("shape") if isinstance(x, Node) else None
        given = None if shape is None else _given(gm, node, len(shape))
        if given is None:
            continue
        assert isinstance(x, Node)
        _spell(gm, node, x, shape, given)
        changed += 1
    return finish(gm, changed)


def _given(gm: GraphModule, node: Node, rank: int) -> dict[str, Any] | None:
    """Weight, bias and epsilon of the norm of a batch that ``node`` is, with no memory; or None."""
    if node.target is F.instance_norm and len(node.args) == 1:
        kwargs = node.kwargs
        if kwargs.get("running_mean") is not None or not kwargs.get("use_input_stats", True):
            return None
        return {"weight": None, "bias": None, "eps": 1e-5} | {
            name: value for name, value in kwargs.items() if name in ("weight", "bias", "eps")
        }
    module: Any = gm.get_submodule(str(node.target)) if node.op == "call_module" else None
    if _RANKS.get(type(module)) != rank or len(node.all_input_nodes) > 1:
        return None
    if module.running_mean is not None or module._forward_hooks:
        return None
    with gm.graph.inserting_before(node):
        parameters = {
            name: None
            if value is None
            else add_constant(gm, gm.graph, f"{node.name}_{name}", value.detach())
            for name, value in (("weight", module.weight), ("bias", module.bias))
        }
    return {**parameters, "eps": module.eps}


def _spell(gm: GraphModule, node: Node, x: Node, shape: Any, given: dict[str, Any]) -> None:
    with gm.graph.inserting_before(node):
        if dequantized(x) is not None and sole_user(x) is node:
            x.update_kwarg("contiguous", True)
        else:
            x = laid_out(gm.graph, x, len(shape))
        norm = gm.graph.call_function(F.group_norm, (x, int(shape[1])), given)
    replace(node, inherit(norm, node))
