"""Calls without a write in place that might give what a call with one writes."""

from __future__ import annotations

import copy
import inspect
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.fx import Node
from torch.fx.node import map_arg

from x86quant.lowering.tensor_memory import clones

#: op, target, args, kwargs: what makes a node.
NodeCall = tuple[str, Any, tuple[Any, ...], dict[str, Any]]

#: ``x += y`` and the like, by the operator without the write.
IN_PLACE_OPERATORS: dict[Any, Callable[..., Any]] = {
    operator.iadd: operator.add,
    operator.iand: operator.and_,
    operator.ifloordiv: operator.floordiv,
    operator.ilshift: operator.lshift,
    operator.imatmul: operator.matmul,
    operator.imod: operator.mod,
    operator.imul: operator.mul,
    operator.ior: operator.or_,
    operator.ipow: operator.pow,
    operator.irshift: operator.rshift,
    operator.isub: operator.sub,
    operator.itruediv: operator.truediv,
    operator.ixor: operator.xor,
}

#: Methods whose functional form is not called what they are without the underscore.
_METHODS: dict[str, Callable[..., Any]] = {
    "copy_": torch.ops.aten.copy.default,
    "fill_": torch.full_like,
    "zero_": torch.zeros_like,
}


def functional_forms(n: Node, root: nn.Module) -> Iterator[NodeCall]:
    """Calls without a write that might give what ``n`` writes."""
    args, kwargs = n.args, dict(n.kwargs)
    target: Any = n.target
    if "out" in kwargs:
        yield n.op, target, args, {k: v for k, v in kwargs.items() if k != "out"}
    if n.op == "call_module":
        module = root.get_submodule(str(target))
        if getattr(module, "inplace", False):
            plain = copy.copy(module)
            plain.inplace = False  # type: ignore[assignment]
            yield "call_module", plain, args, kwargs
    elif n.op == "call_method" and target.endswith("_") and not target.endswith("__"):
        if target in _METHODS:
            yield "call_function", _METHODS[target], args, kwargs
        elif hasattr(torch.Tensor, target[:-1]):
            yield "call_method", target[:-1], args, kwargs
    elif n.op == "call_function":
        yield from _functional_functions(target, args, kwargs)


def _functional_functions(
    target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[NodeCall]:
    if target in IN_PLACE_OPERATORS:
        yield "call_function", IN_PLACE_OPERATORS[target], args, kwargs
        return
    if isinstance(target, torch._ops.OpOverload):
        packet, overload = target._schema.name.partition("::")[2], target._overloadname
        plain = getattr(torch.ops.aten, packet.removesuffix("_"), None)
        if packet.endswith("_") and overload in getattr(plain, "overloads", list)():
            yield "call_function", getattr(plain, overload), args, kwargs
        return
    name = getattr(target, "__name__", "")
    if name.endswith("_") and not name.endswith("__"):
        for home in (F, torch):
            if callable(plain := getattr(home, name[:-1], None)):
                yield "call_function", plain, args, kwargs
    try:
        bound = inspect.signature(target).bind(*args, **kwargs)
    except (TypeError, ValueError):  # builtin, or not a legal call
        return
    if bound.arguments.get("inplace"):
        bound.arguments["inplace"] = False
        yield "call_function", target, bound.args, bound.kwargs


def tried(call: NodeCall, env: Mapping[Node, Any]) -> Any:
    """What a form gives on copies of the values in ``env``; None if it cannot be called."""
    op, target, args, kwargs = call
    args = clones(map_arg(args, lambda n: env[n]))
    kwargs = clones(map_arg(kwargs, lambda n: env[n]))
    with torch.random.fork_rng(devices=[]):
        try:
            if op == "call_method":
                return getattr(args[0], target)(*args[1:], **kwargs)
            return target(*args, **kwargs)
        except (RuntimeError, TypeError, ValueError, NotImplementedError, AttributeError):
            return None
