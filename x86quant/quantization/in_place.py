"""Statements that change a tensor in place, in a graph of torch.fx.

A graph of torch.fx names values, not memory: after ``y = relu_(x)`` a later use of ``x`` would see
the old values wherever a pass or a converter replaces ``relu_``. So every node that may write is
either renamed into its functional form, with the later uses of the variable redirected, or the
graph is refused, and torch.export functionalizes instead. Renaming is sound only for memory that
nobody else sees: the tensor written must come from an op that makes a new one, and what has read it
before must have made new ones too.
"""

from __future__ import annotations

import copy
import inspect
import operator
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.fx import GraphModule, Node

from x86quant.errors import UnsupportedError

#: Layers of torch whose result is always a new tensor.
_FRESH_LAYERS: tuple[type[nn.Module], ...] = (
    nn.Linear, nn.Bilinear, nn.modules.conv._ConvNd, nn.modules.batchnorm._BatchNorm,
    nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.Embedding, nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d,
    nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d, nn.ReLU, nn.ReLU6, nn.Hardtanh, nn.LeakyReLU, nn.ELU,
    nn.SiLU, nn.GELU, nn.Hardswish, nn.Hardsigmoid, nn.Sigmoid, nn.Tanh, nn.Softmax, nn.Softplus,
    nn.Mish, nn.PReLU, nn.Upsample,
)  # fmt: skip
#: The same for functions and methods, by name.
_FRESH_NAMES = frozenset(
    [
        "conv1d",
        "conv2d",
        "conv3d",
        "conv_transpose1d",
        "conv_transpose2d",
        "conv_transpose3d",
        "linear",
        "batch_norm",
        "layer_norm",
        "group_norm",
        "instance_norm",
        "max_pool1d",
        "max_pool2d",
        "max_pool3d",
        "avg_pool1d",
        "avg_pool2d",
        "avg_pool3d",
        "relu",
        "relu6",
        "hardtanh",
        "leaky_relu",
        "elu",
        "silu",
        "gelu",
        "hardswish",
        "hardsigmoid",
        "sigmoid",
        "tanh",
        "softmax",
        "log_softmax",
        "add",
        "sub",
        "mul",
        "div",
        "truediv",
        "pow",
        "neg",
        "abs",
        "exp",
        "log",
        "sqrt",
        "rsqrt",
        "sin",
        "cos",
        "clamp",
        "clamp_min",
        "clamp_max",
        "minimum",
        "maximum",
        "where",
        "masked_fill",
        "cat",
        "stack",
        "matmul",
        "bmm",
        "mm",
        "addmm",
        "baddbmm",
        "mean",
        "sum",
        "amax",
        "amin",
        "std",
        "var",
        "norm",
        "cumsum",
        "eq",
        "ne",
        "lt",
        "le",
        "gt",
        "ge",
        "logical_and",
        "logical_or",
        "logical_not",
        "iadd",
        "isub",
        "imul",
        "itruediv",
        "interpolate",
        "clone",
        "repeat",
        "softplus",
        "mish",
        "embedding",
    ]
)
#: They change the shape or the flags of a tensor, not its values.
_NOT_VALUES = frozenset(
    [
        "t_",
        "transpose_",
        "swapaxes_",
        "swapdims_",
        "squeeze_",
        "unsqueeze_",
        "resize_",
        "resize_as_",
        "as_strided_",
        "set_",
        "requires_grad_",
        "detach_",
        "retain_grad_",
        "rename_",
        "share_memory_",
        "sparse_resize_",
    ]
)
_OPERATORS: dict[Any, Callable[..., Any]] = {
    operator.iadd: operator.add,
    operator.isub: operator.sub,
    operator.imul: operator.mul,
    operator.itruediv: operator.truediv,
    operator.ifloordiv: operator.floordiv,
    operator.imod: operator.mod,
    operator.ipow: operator.pow,
    operator.iand: operator.and_,
    operator.ior: operator.or_,
    operator.ixor: operator.xor,
    operator.imatmul: operator.matmul,
    operator.ilshift: operator.lshift,
    operator.irshift: operator.rshift,
}
#: What takes sizes and the like, not tensors, and so writes nowhere.
_NO_TENSORS = ("size", "dim", "numel", "stride", "ndimension", "is_contiguous", "get_device")


def functionalize(gm: GraphModule, numbers: Collection[Node] = ()) -> None:
    """Rename every in-place call of ``gm``, which is changed.

    Args:
        gm: a graph of torch.fx.
        numbers: nodes whose values are no tensors: nothing can be written to them.

    Raises:
        UnsupportedError: one of them writes to memory that something else may see.
    """
    modules = dict(gm.named_modules(remove_duplicate=False))
    order = {node: number for number, node in enumerate(gm.graph.nodes)}
    for node in [n for n in gm.graph.nodes if _writes(n, modules)]:
        written = _written(node)
        if written in numbers:
            node.target = _OPERATORS.get(node.target, node.target)
            continue
        _check_alone(node, written, modules, order)
        _rename(gm, node, modules)
        later = [user for user in written.users if order[user] > order[node]]
        for user in later:
            user.replace_input_with(written, node)
    gm.graph.lint()
    gm.recompile()


def _refuse(node: Node, why: str) -> UnsupportedError:
    return UnsupportedError(f"{node.format_node() or node.name} writes in place: {why}")


def _writes(node: Node, modules: dict[str, nn.Module]) -> bool:
    if node.op == "call_module":
        return bool(getattr(modules[str(node.target)], "inplace", False)) and not _does_nothing(
            modules[str(node.target)]
        )
    if node.op == "call_method":
        name = str(node.target)
        return (name.endswith("_") and not name.endswith("__")) or name == "__setitem__"
    if node.op != "call_function":
        return False
    if node.kwargs.get("out") is not None:
        return True
    if node.target in _OPERATORS or node.target in (operator.setitem, operator.delitem):
        return True
    if isinstance(node.target, torch._ops.OpOverload):
        return bool(node.target._schema.is_mutable)
    name = str(getattr(node.target, "__name__", node.target))
    if name.endswith("_") and not name.endswith("__"):
        return True
    return _inplace_argument(node) is True


def _does_nothing(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.dropout._DropoutNd) and not module.training


def _inplace_argument(node: Node) -> object:
    """The value of a function's argument ``inplace``; None if it has none."""
    if "inplace" in node.kwargs:
        return node.kwargs["inplace"]
    try:
        signature = inspect.signature(node.target)  # type: ignore[arg-type]
        return signature.bind(*node.args, **node.kwargs).arguments.get("inplace")
    except (TypeError, ValueError):  # built in, or called in a way that only torch understands
        return None


def _written(node: Node) -> Node:
    first = node.args[0] if node.args else node.kwargs.get("input")
    if node.kwargs.get("out") is not None or not isinstance(first, Node):
        raise _refuse(node, "what it writes to is not its first argument")
    return first


def _check_alone(
    node: Node, written: Node, modules: dict[str, nn.Module], order: dict[Node, int]
) -> None:
    """That ``written`` is memory of its own, which only its later users will read again."""
    if not _is_fresh(written, modules):
        raise _refuse(node, f"{written.name} may share its memory")
    for user in written.users:
        if order[user] < order[node] and not (_is_fresh(user, modules) or _reads_only(user)):
            raise _refuse(node, f"{user.name} may share memory with {written.name}")


def _is_fresh(node: Node, modules: dict[str, nn.Module]) -> bool:
    """Whether the value of ``node`` is always a new tensor."""
    if node.op == "call_module":
        return isinstance(modules[str(node.target)], _FRESH_LAYERS)
    if node.op == "call_method":
        return str(node.target) in _FRESH_NAMES
    if node.op == "call_function":
        target: Any = node.target
        home = str(getattr(target, "__module__", None) or "torch")
        name = str(getattr(target, "__name__", ""))
        return name in _FRESH_NAMES and home.startswith(("torch", "_operator", "operator"))
    return False


def _reads_only(node: Node) -> bool:
    """Whether ``node`` asks for sizes and the like."""
    if node.op == "call_method":
        return str(node.target) in _NO_TENSORS
    if node.target is getattr:
        return node.args[1] in ("shape", "dtype", "device", "ndim", "layout")
    return False


def _rename(gm: GraphModule, node: Node, modules: dict[str, nn.Module]) -> None:
    if node.op == "call_module":
        _rename_layer(gm, node, modules[str(node.target)])
        return
    if node.op == "call_function" and node.target in _OPERATORS:
        node.target = _OPERATORS[node.target]
        return
    if _inplace_argument(node) is True:
        _drop_argument(node)
        return
    name = str(node.target if node.op == "call_method" else getattr(node.target, "__name__", ""))
    plain = name[:-1]
    if name in _NOT_VALUES or not _has_functional_form(name):
        raise _refuse(node, f"{name} has no form that does not")
    if node.op == "call_method":
        node.target = plain
        return
    found = getattr(F, plain, None) or getattr(torch, plain, None)
    if found is None or isinstance(node.target, torch._ops.OpOverload):
        raise _refuse(node, f"{name} has no form that does not")
    node.target = found


def _rename_layer(gm: GraphModule, node: Node, layer: Any) -> None:
    """Let ``node`` call a layer like ``layer`` that does not write."""
    kinds = (nn.ReLU, nn.ReLU6, nn.Hardtanh, nn.LeakyReLU, nn.ELU, nn.SiLU, nn.Hardswish)
    kinds = (*kinds, nn.Hardsigmoid, nn.CELU, nn.SELU, nn.RReLU, nn.Threshold, nn.Mish)
    if not isinstance(layer, kinds):
        raise _refuse(node, f"{type(layer).__name__} is not known to have another form")
    other = copy.copy(layer)
    other.inplace = False
    gm.set_submodule(str(node.target), other)


def _drop_argument(node: Node) -> None:
    """Call a function without writing: ``inplace`` becomes False."""
    bound = inspect.signature(node.target).bind(*node.args, **node.kwargs)  # type: ignore[arg-type]
    del bound.arguments["inplace"]  # False by default everywhere
    node.args, node.kwargs = bound.args, bound.kwargs


def _has_functional_form(name: str) -> bool:
    """Whether the op ``name`` writes what the op without the underscore returns."""
    packets = [getattr(torch.ops.aten, one, None) for one in (name, name[:-1])]
    if None in packets or not name.endswith("_"):
        return False
    writing, plain = ({_arguments(o) for o in _overloads(p)} for p in packets)
    return bool(writing & plain) and hasattr(torch.Tensor, name[:-1])


def _overloads(packet: Any) -> Iterator[Any]:
    for name in packet.overloads():
        overload = getattr(packet, name)
        if not any(a.is_out for a in overload._schema.arguments):
            yield overload


def _arguments(overload: Any) -> tuple[tuple[str, str], ...]:
    return tuple((a.name, str(a.type)) for a in overload._schema.arguments)
