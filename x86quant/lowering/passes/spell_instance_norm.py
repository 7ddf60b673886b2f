"""An instance norm in float is a group norm of one channel a group, of contiguous values.

The same sums, which torch takes a third of the time for, since it has a kernel for them.
"""

from __future__ import annotations

from typing import Any

import torch
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
from x86quant.lowering.result_layout import laid_out

#: Dimensions of a batch, by module: without the first of them channels lie elsewhere.
_RANKS = {nn.InstanceNorm1d: 3, nn.InstanceNorm2d: 4, nn.InstanceNorm3d: 5}


def run(gm: GraphModule) -> int:
    """Apply the pass to ``gm``; returns the number of norms."""
    changed = 0
    for node in list(gm.graph.find_nodes(op="call_module")):
        module: Any = gm.get_submodule(str(node.target))
        shape = node.args[0].meta.get("shape") if isinstance(node.args[0], Node) else None
        if shape is None or _RANKS.get(type(module)) != len(shape) or len(node.args) > 1:
            continue
        if module.running_mean is None and not module._forward_hooks:
            _spell(gm, node, module, int(shape[1]))
            changed += 1
    return finish(gm, changed)


def _spell(gm: GraphModule, node: Node, module: Any, channels: int) -> None:
    (x,) = node.args
    assert isinstance(x, Node)
    with gm.graph.inserting_before(node):
        if dequantized(x) is not None and sole_user(x) is node:
            x.update_kwarg("contiguous", True)
        else:
            x = laid_out(gm.graph, x, _RANKS[type(module)])
        weight, bias = (_parameter(gm, node, module, name) for name in ("weight", "bias"))
        norm = gm.graph.call_function(F.group_norm, (x, channels, weight, bias, module.eps))
    replace(node, inherit(norm, node))


def _parameter(gm: GraphModule, node: Node, module: nn.Module, name: str) -> Node | None:
    value: torch.Tensor | None = getattr(module, name)
    if value is None:
        return None
    return add_constant(gm, gm.graph, f"{node.name}_{name}", value.detach())
