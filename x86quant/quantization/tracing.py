"""A float model as one graph of layers and functions: by torch.fx, or else by torch.export."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.fx import GraphModule, Node
from torch.fx.proxy import TraceError
from torch.nn.utils.fusion import fuse_conv_bn_eval, fuse_linear_bn_eval

from x86quant.dynamic import DynamicMultiheadAttention, Int8Linear
from x86quant.errors import UnsupportedError
from x86quant.lowering.mutation import InPlaceTracer, without_mutations
from x86quant.quantization.batches import Call
from x86quant.quantization.exported import from_export
from x86quant.quantization.faithful import check_faithful, why_untraceable
from x86quant.quantization.wording import first_line

#: What symbolic tracing raises when code depends on values, beside its own TraceError.
_TRACE_ERRORS = (TraceError, TypeError, ValueError, AttributeError, RuntimeError, AssertionError)

_CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)

#: Spellings that stock quantization does not know how to fuse.
_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    torch.relu: F.relu,
    torch.relu_: F.relu,
    F.relu_: F.relu,
    operator.iadd: operator.add,
    operator.imul: operator.mul,
}
_METHODS: dict[str, Callable[..., Any]] = {
    "relu": F.relu,
    "relu_": F.relu,
    "add": torch.add,
    "mul": torch.mul,
    "matmul": torch.matmul,
    "flatten": torch.flatten,
}
#: Layers that do nothing in evaluation mode.
_IDENTITIES = (nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)


@dataclasses.dataclass(frozen=True, slots=True)
class Traced:
    """A traced model.

    Attributes:
        graph_module: layers keep their paths; batch norms are folded.
        method: "torch.fx" or "torch.export".
        note: why it was not traced by torch.fx, or nothing.
    """

    graph_module: GraphModule
    method: str
    note: str = ""


def trace(model: nn.Module, calls: Sequence[Call]) -> Traced:
    """``model``, in evaluation mode, as a graph; its batch norms folded. ``model`` may be changed.

    ``calls`` are examples of how it is called: what is traced must answer them as ``model`` does.

    Raises:
        UnsupportedError: neither torch.fx nor torch.export can trace it; says why.
    """
    example = calls[0]
    if example.kwargs:
        raise UnsupportedError("it takes keyword arguments, and a graph takes positional ones only")
    if (why := why_untraceable(model, example)) is not None:
        raise UnsupportedError(why)
    try:
        tracer = _LayerTracer()
        graph = tracer.trace(model)
        gm = GraphModule(model, graph)
        for node in graph.nodes:
            node.meta["scope"] = tracer.node_name_to_scope[node.name][0]
        gm = without_mutations(gm, example.args)
        check_faithful(model, gm, calls)
        found = Traced(gm, "torch.fx")
    except (*_TRACE_ERRORS, UnsupportedError) as error:
        reason = f"torch.fx cannot trace it ({first_line(error)})"
        gm = from_export(model, example, reason)
        check_faithful(model, gm, calls)
        found = Traced(gm, "torch.export", reason)
    normalize(found.graph_module)
    fold_batch_norms(found.graph_module)
    return found


class _LayerTracer(InPlaceTracer):
    """Sees through everything but torch's own layers and x86quant's."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if isinstance(m, Int8Linear | DynamicMultiheadAttention):
            return True
        return super().is_leaf_module(m, module_qualified_name)


def normalize(gm: GraphModule) -> None:
    """Spell functions the way stock quantization knows and fuses them."""
    modules = dict(gm.named_modules(remove_duplicate=False))
    for node in list(gm.graph.nodes):
        if node.op == "call_module":
            _normalize_module(gm, node, modules[str(node.target)])
        if node.op == "call_function" and node.target in _FUNCTIONS:
            node.target = _FUNCTIONS[node.target]
        elif node.op == "call_method" and node.target in _METHODS:
            node.op, node.target = "call_function", _METHODS[node.target]
    gm.delete_all_unused_submodules()
    gm.recompile()


def _normalize_module(gm: GraphModule, node: Node, module: nn.Module) -> None:
    if type(module) in _IDENTITIES:
        node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
        gm.graph.erase_node(node)
    elif type(module) is nn.Flatten:
        node.op, node.target = "call_function", torch.flatten
        node.args = (node.args[0], module.start_dim, module.end_dim)


def fold_batch_norms(gm: GraphModule) -> int:
    """Fold each batch norm into the layer that it alone follows; returns how many."""
    modules = dict(gm.named_modules(remove_duplicate=False))
    calls: dict[str, int] = {}
    for node in gm.graph.nodes:
        if node.op == "call_module":
            calls[str(node.target)] = calls.get(str(node.target), 0) + 1
    folded = 0
    for node in list(gm.graph.nodes):
        source = node.args[0] if node.args else None
        if not isinstance(source, Node) or {node.op, source.op} != {"call_module"}:
            continue
        if calls[str(source.target)] > 1 or len(source.users) > 1:
            continue
        fused = _folded(modules[str(source.target)], modules[str(node.target)])
        if fused is None:
            continue
        _set_submodule(gm, str(source.target), fused)
        modules[str(source.target)] = fused
        node.replace_all_uses_with(source)
        gm.graph.erase_node(node)
        folded += 1
    gm.delete_all_unused_submodules()
    gm.recompile()
    return folded


def _folded(layer: nn.Module, norm: Any) -> nn.Module | None:
    """``layer`` with the batch norm ``norm`` folded into it, or None."""
    if type(norm) not in _BATCH_NORMS or norm.running_mean is None:
        return None
    if type(layer) in _CONVS:
        return fuse_conv_bn_eval(layer, norm)  # type: ignore[type-var]
    if type(layer) in _TRANSPOSED and getattr(layer, "groups", 1) == 1:
        return fuse_conv_bn_eval(layer, norm, transpose=True)  # type: ignore[type-var]
    if type(layer) is nn.Linear and type(norm) is nn.BatchNorm1d:
        return fuse_linear_bn_eval(layer, norm)
    return None


def _set_submodule(root: nn.Module, path: str, module: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    setattr(root.get_submodule(parent), name, module)
