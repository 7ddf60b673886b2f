"""What a traced graph computes of weights alone is computed once.

So weights that are standardized at every call (``F.conv2d(x, norm(self.weight))``), or tables of
relative positions that a small network makes of coordinates, are weights like others.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from x86quant.lowering.graph_tools import add_constant, constant

#: Of such a name is what draws numbers, or reads memory that nobody wrote to.
_DRAWS = re.compile("rand|normal|bernoulli|multinomial|poisson|dropout|empty|exponential|uniform")
#: A result of more numbers stays a step.
_MOST_NUMBERS = 1 << 24
_NUMBERS = (bool, int, float)


def fold_constants(gm: GraphModule) -> int:
    """Let constants stand for what depends on constants only; returns how many there are.

    Numbers, such as sizes of weights, go into the calls that take them.
    """
    known: dict[Node, Any] = {}
    for node in gm.graph.nodes:
        if (tensor := constant(gm, node)) is not None:
            known[node] = tensor
        elif node.op.startswith("call_") and _depends_on(node, known):
            value = _computed(gm, node, known)
            if value is not None:
                known[node] = value
    folded = 0
    for node, value in known.items():
        users = [user for user in node.users if user not in known and user.op != "output"]
        if node.op != "get_attr" and users:
            folded += _replaced(gm, node, users, value)
    if folded:
        gm.graph.eliminate_dead_code()
        gm.delete_all_unused_submodules()
        gm.recompile()
    return folded


def _depends_on(node: Node, known: dict[Node, Any]) -> bool:
    """Whether ``node`` takes something, and nothing that is not ``known``."""
    return bool(node.all_input_nodes) and all(x in known for x in node.all_input_nodes)


def _computed(gm: GraphModule, node: Node, known: dict[Node, Any]) -> Any:
    """What ``node`` gives at every call; None if that is not known."""
    target: Any = node.target
    module = gm.get_submodule(str(target)) if node.op == "call_module" else None
    name = str(target if module is None else type(module).__name__)
    if _DRAWS.search(getattr(target, "__name__", name).lower()) or name.endswith("_"):
        return None
    if module is not None and any(
        _DRAWS.search(type(m).__name__.lower()) for m in module.modules()
    ):
        return None
    args = map_arg(node.args, known.__getitem__)
    kwargs = map_arg(node.kwargs, known.__getitem__)
    if node.op == "call_method":
        target, args = getattr(type(args[0]), str(target), None), args
    function = target if module is None else module
    if not callable(function):
        return None
    try:
        with torch.no_grad():
            value = function(*args, **kwargs)
    except Exception:  # where the code would have caught it, say
        return None
    return value if _is_constant(value) else None


def _is_constant(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() <= _MOST_NUMBERS
    return isinstance(value, _NUMBERS) or (
        isinstance(value, tuple | list) and bool(value) and all(map(_is_constant, value))
    )


def _replaced(gm: GraphModule, node: Node, users: list[Node], value: Any) -> int:
    """Give ``users`` the value of ``node``, if that can stand in a graph."""
    if isinstance(value, torch.Tensor):
        with gm.graph.inserting_before(node):
            stands: Any = add_constant(gm, gm.graph, node.name, value.contiguous())
        stands.meta.update(node.meta)
    elif isinstance(value, _NUMBERS):
        stands = value
    elif all(isinstance(x, _NUMBERS) for x in value):
        stands = tuple(value)
    else:
        return 0
    for user in users:
        user.args = map_arg(user.args, lambda x: stands if x is node else x)
        user.kwargs = map_arg(user.kwargs, lambda x: stands if x is node else x)
    return 1
