"""Steps of a float graph that have no codes: what they take or give cannot become int8."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.fx import GraphModule, Interpreter, Node
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from x86quant.calling.call import Call
from x86quant.lowering.graph_tools import given_by_name
from x86quant.observing.observer import LARGEST
from x86quant.quantization.static.int8_forms import WEIGHTED_FUNCTIONS, WEIGHTED_LAYERS
from x86quant.quantization.tracing.recurrent_layers import is_recurrent_layer


def float_steps(gm: GraphModule, example: Call) -> tuple[set[str], tuple[Any, ...]]:
    """The names of nodes that take or give what no codes stand for, and the results of ``gm``.

    That is tensors other than of float32, numbers computed, several tensors at once, and values
    without bounds, such as a mask of -inf before a softmax.
    """
    kinds: dict[Node, Any] = {}
    unbounded: set[Node] = set()
    constants: set[Node] = set()

    class Watch(Interpreter):
        def run_node(self, n: Node) -> Any:
            value = super().run_node(n)
            kinds[n] = value.dtype if isinstance(value, torch.Tensor) else type(value)
            if _is_unbounded(value):
                unbounded.add(n)
            return value

    with torch.no_grad():
        results = Watch(gm).run(*example.args)
    if any(map(_holds_nan, results)):
        unbounded.clear()  # no mask, but a model or data to be refused
    found = set()
    for node in gm.graph.nodes:
        if node.op == "get_attr" or (
            node.op.startswith("call_")
            and node.all_input_nodes
            and constants.issuperset(node.all_input_nodes)
        ):
            constants.add(node)
        if not node.op.startswith("call_"):
            continue
        given = [kinds[n] for n in node.all_input_nodes]
        tensors = [k for k in (*given, kinds[node]) if isinstance(k, torch.dtype)]
        computed = any(k in (int, float, bool) for k in given) and not _moves(node)
        if (
            any(k is not torch.float32 for k in tensors)
            or computed
            or (kinds[node] is tuple and not is_recurrent_layer(_layer(gm, node)))
            or unbounded.intersection((node, *node.all_input_nodes))
            or _takes_other_statistics(gm, node)
            or _is_given_more(gm, node)
            or _pads_with_a_number(node)
            or (node.target in _WITH_CONSTANTS and not _constant_weight(node))
        ):
            found.add(node.name)
    return found, tuple(results)


def _has_codes(value: Any) -> bool:
    """Whether ``value`` is a tensor of the kind that becomes int8."""
    return (
        isinstance(value, torch.Tensor)
        and value.dtype is torch.float32
        and value.layout is torch.strided
    )


def _holds_nan(value: Any) -> bool:
    return _has_codes(value) and bool(value.isnan().any())


def _is_unbounded(value: Any) -> bool:
    """Whether a tensor holds infinities, NaN, or what stands for infinity, such as finfo.min."""
    if not _has_codes(value) or not value.numel():
        return False
    low, high = torch.aminmax(value.detach())
    return not (float(low) > -LARGEST and float(high) < LARGEST)  # true of NaN


def _layer(gm: GraphModule, node: Node) -> nn.Module | None:
    return gm.get_submodule(str(node.target)) if node.op == "call_module" else None


#: Functions with a weight as their second argument, which must be a constant.
_WITH_CONSTANTS = (*WEIGHTED_FUNCTIONS, F.layer_norm)


def _constant_weight(node: Node) -> bool:
    inputs = node.all_input_nodes[1:]
    return bool(inputs) and all(n.op == "get_attr" for n in inputs)


def _moves(node: Node) -> bool:
    """Whether the numbers that ``node`` takes are sizes or indices."""
    name = str(node.target if node.op == "call_method" else getattr(node.target, "__name__", ""))
    return name in _MOVING


_MOVING = frozenset(
    [
        "view",
        "reshape",
        "flatten",
        "permute",
        "transpose",
        "unsqueeze",
        "squeeze",
        "expand",
        "getitem",
        "chunk",
        "split",
        "narrow",
        "select",
        "repeat",
        "interpolate",
        "pad",
        "unflatten",
        "slice",
        "contiguous",
    ]
)


def _is_given_more(gm: GraphModule, node: Node) -> bool:
    """Whether ``node`` calls a layer with more than its input, such as a size of its result."""
    layer = _layer(gm, node)
    return len(node.args) + len(node.kwargs) > 1 and isinstance(layer, WEIGHTED_LAYERS)


def _pads_with_a_number(node: Node) -> bool:
    """Whether ``node`` adds margins of a number, which the range of its input may not hold."""
    if node.target is not F.pad:
        return False
    given = given_by_name(node, ("input", "pad", "mode", "value"))
    return given.get("value") not in (None, 0, 0.0)


def _takes_other_statistics(gm: GraphModule, node: Node) -> bool:
    """Whether ``node`` calls a norm by other statistics than those that its int8 kernel has.

    That of a batch norm has what training found, that of an instance norm each image's own.
    """
    layer = _layer(gm, node)
    if isinstance(layer, _BatchNorm):
        return layer.running_mean is None
    return isinstance(layer, _InstanceNorm) and layer.running_mean is not None
