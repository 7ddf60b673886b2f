"""Norms on codes, and instance norms in float."""

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
    given_by_name,
    inherit,
    replace,
    scale_and_zp,
    sole_user,
    why,
)
from x86quant.lowering.passes._epilogue import Lowered, lower
from x86quant.lowering.views import laid_out

aten = torch.ops.aten


def lower_layer_norm(gm: GraphModule) -> int:
    """Layer norm over the last dimension becomes ``x86quant.layer_norm``.

    Returns the number of layer norms lowered.
    """
    return lower(gm, torch.ops.aten.layer_norm.default, _layer_norm_rule, clamps=False)


def _layer_norm_rule(gm: GraphModule, node: Node) -> Lowered:
    x, normalized_shape, weight, bias, eps = node.args
    codes = dequantized(x)
    if codes is None or "shape" not in codes.meta:
        why(node, "its input is not quantized")
        return None
    if len(normalized_shape) != 1:  # type: ignore[arg-type]
        why(node, "it normalizes over more than one dimension")
        return None
    return "layer_norm", {
        "x": codes,
        "axis": len(codes.meta["shape"]) - 1,
        "weight": weight,
        "bias": bias,
        "eps": eps,
        **scale_and_zp("x", codes),
    }


def lower_group_norm(gm: GraphModule) -> int:
    """Group and instance norms, and a clamp behind them, become ``x86quant.group_norm``.

    Returns the number of norms lowered.
    """
    for node in list(gm.graph.nodes):
        x = node.args[0] if node.args else None
        codes = dequantized(x)
        if codes is None or "shape" not in codes.meta:
            continue
        shape = codes.meta["shape"]
        given = _given_to_norm(gm, node, len(shape))
        if given is not None:  # groups of one channel
            values = (x, int(shape[1]), given["weight"], given["bias"], given["eps"])
            with gm.graph.inserting_before(node):
                norm = gm.graph.call_function(aten.group_norm.default, values)
            replace(node, inherit(norm, node))
    return lower(gm, aten.group_norm.default, _group_norm_rule)


def _group_norm_rule(gm: GraphModule, node: Node) -> Lowered:
    x, groups, weight, bias, eps = node.args
    codes = dequantized(x)
    if codes is None or len(codes.meta.get("shape", ())) not in (3, 4, 5):
        why(node, "its input is not quantized" if codes is None else "it has no positions")
        return None
    given = {"x": codes, "groups": groups, "weight": weight, "bias": bias, "eps": eps}
    return "group_norm", given | scale_and_zp("x", codes)


_NORM_ARGUMENTS = (
    "input", "weight", "bias", "running_mean", "running_var", "use_input_stats", "momentum", "eps",
)  # fmt: skip
#: Dimensions of a batch, by module: without the first of them channels lie elsewhere.
_RANKS = {nn.InstanceNorm1d: 3, nn.InstanceNorm2d: 4, nn.InstanceNorm3d: 5}


def spell_instance_norm(gm: GraphModule) -> int:
    """An instance norm in float is a group norm of one channel a group, of contiguous values.

    The same sums, which torch takes a third of the time for, since it has a kernel for them.

    Returns the number of norms.
    """
    changed = 0
    for node in list(gm.graph.nodes):
        x = node.args[0] if node.args else None
        shape = x.meta.get("shape") if isinstance(x, Node) else None
        given = None if shape is None else _given_to_norm(gm, node, len(shape))
        if given is None:
            continue
        assert isinstance(x, Node)
        _spell_norm(gm, node, x, shape, given)
        changed += 1
    return finish(gm, changed)


def _given_to_norm(gm: GraphModule, node: Node, rank: int) -> dict[str, Any] | None:
    """Weight, bias and epsilon of the norm of a batch that ``node`` is, with no memory; or None."""
    if node.target is F.instance_norm and len(node.args) == 1:
        kwargs = node.kwargs
        if kwargs.get("running_mean") is not None or not kwargs.get("use_input_stats", True):
            return None
        return {"weight": None, "bias": None, "eps": 1e-5} | {
            name: value for name, value in kwargs.items() if name in ("weight", "bias", "eps")
        }
    if node.target is aten.instance_norm.default:
        given = given_by_name(node, _NORM_ARGUMENTS)
        if given["running_mean"] is not None or not given["use_input_stats"]:
            return None
        return {name: given[name] for name in ("weight", "bias", "eps")}
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


def _spell_norm(gm: GraphModule, node: Node, x: Node, shape: Any, given: dict[str, Any]) -> None:
    with gm.graph.inserting_before(node):
        if dequantized(x) is not None and sole_user(x) is node:
            x.update_kwarg("contiguous", True)
        else:
            x = laid_out(gm.graph, x, len(shape))
        norm = gm.graph.call_function(F.group_norm, (x, int(shape[1])), given)
    replace(node, inherit(norm, node))
