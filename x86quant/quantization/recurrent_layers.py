"""LSTMs and GRUs in a traced graph: one float layer at a time, each with one result.

What a static graph makes of such a layer is ``RoundedRecurrent``.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node

#: Of the pair of states that an LSTM returns.
_STATES, _CELLS = 0, 1


class _OneLayer:
    """Of ``nn.LSTM`` or ``nn.GRU``: the states at all steps, and no more."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = super().forward(x)[0]  # type: ignore[misc]
        return found


class LSTMLayer(_OneLayer, nn.LSTM):  # type: ignore[misc]
    """One layer of an ``nn.LSTM``, both directions; returns the states at all steps."""


class GRULayer(_OneLayer, nn.GRU):  # type: ignore[misc]
    """One layer of an ``nn.GRU``, both directions; returns the states at all steps."""


LAYERS: dict[type[nn.Module], type[LSTMLayer | GRULayer]] = {nn.LSTM: LSTMLayer, nn.GRU: GRULayer}


def is_recurrent_layer(module: object) -> bool:
    """Whether ``module`` is one layer of a recurrent one, as ``part_recurrent`` makes them."""
    return isinstance(module, _OneLayer)


def part_recurrent(gm: GraphModule) -> int:
    """Let recurrent modules be one layer after another in ``gm``.

    Those stay whole that are given states, whose cells are read, or whose states are projected.
    Returns how many were taken apart. Not yet recompiled.
    """
    modules = dict(gm.named_modules(remove_duplicate=False))
    calls: dict[str, list[Node]] = {}
    for node in gm.graph.nodes:
        if node.op == "call_module" and type(modules[str(node.target)]) in LAYERS:
            calls.setdefault(str(node.target), []).append(node)
    taken = {path: nodes for path, nodes in calls.items() if all(_fits(n, modules) for n in nodes)}
    for path, nodes in taken.items():
        layers = _layers(modules[path])
        # One layer keeps the path of its module; several are children of it.
        paths = [path] if len(layers) == 1 else [f"{path}.layer{i}" for i in range(len(layers))]
        gm.set_submodule(path, nn.Module())
        for own, layer in zip(paths, layers, strict=True):
            gm.set_submodule(own, layer)
        for node in nodes:
            _replace(gm, node, paths, modules[path])
    return len(taken)


def _fits(node: Node, modules: dict[str, Any]) -> bool:
    """Whether layers one by one can do what this call does."""
    module = modules[str(node.target)]
    if module.proj_size or len(node.args) != 1 or node.kwargs or not isinstance(node.args[0], Node):
        return False
    if any(p.dtype != torch.float32 for p in module.parameters()):
        return False
    pairs = [] if isinstance(module, nn.GRU) else [u for u in node.users if u.args[1:] == (1,)]
    states = [state for pair in pairs for state in pair.users]
    if any(
        x.target is not operator.getitem or x.args[1] not in (0, 1) for x in (*node.users, *states)
    ):
        return False
    return not any(state.args[1] == _CELLS and state.users for state in states)


def _layers(module: Any) -> list[nn.Module]:
    """The layers of a recurrent ``module``, whose parameters they share."""
    found: list[nn.Module] = []
    directions = 2 if module.bidirectional else 1
    for i in range(module.num_layers):
        layer = LAYERS[type(module)](
            module.input_size if i == 0 else directions * module.hidden_size,
            module.hidden_size,
            bias=module.bias,
            batch_first=module.batch_first,
            bidirectional=module.bidirectional,
            device="meta",
        )
        for name in list(layer._parameters):
            own = name.replace("_l0", f"_l{i}")
            layer.register_parameter(name, getattr(module, own))
        layer._flat_weights = [getattr(layer, name) for name in layer._flat_weights_names]
        found.append(layer.eval())
    return found


def _replace(gm: GraphModule, node: Node, paths: Sequence[str], module: Any) -> None:
    """Let layers at ``paths`` do what ``node`` does."""
    graph = gm.graph
    outs: list[Node] = []
    with graph.inserting_before(node):
        x = node.args[0]
        for path in paths:
            x = graph.call_module(path, (x,))
            x.meta.update(node.meta)
            outs.append(x)
    for user in list(node.users):
        if user.args[1] == 0:
            user.replace_all_uses_with(outs[-1])
        elif isinstance(module, nn.GRU):
            _replace_last(gm, user, outs, module)
        else:
            for state in list(user.users):
                if state.args[1] == _STATES:
                    _replace_last(gm, state, outs, module)
                graph.erase_node(state)
            graph.erase_node(user)
            continue
        graph.erase_node(user)
    graph.erase_node(node)


def _replace_last(gm: GraphModule, states: Node, outs: Sequence[Node], module: Any) -> None:
    """Let the last states come from the states at all steps."""
    count = len(outs) * (2 if module.bidirectional else 1)
    for user in list(states.users):
        at = user.args[1] if user.target is operator.getitem and len(user.args) == 2 else None
        if isinstance(at, int) and -count <= at < count:
            with gm.graph.inserting_before(user):
                user.replace_all_uses_with(_last(gm, outs, at % count, module))
            gm.graph.erase_node(user)
    if states.users:
        with gm.graph.inserting_before(states):
            found = [_last(gm, outs, i, module) for i in range(count)]
            states.replace_all_uses_with(gm.graph.call_function(torch.stack, (found, 0)))


def _last(gm: GraphModule, outs: Sequence[Node], number: int, module: Any) -> Node:
    """The last state of one direction of one layer: at the last step, or backward at the first."""
    directions = 2 if module.bidirectional else 1
    layer, direction = divmod(number, directions)
    out, graph = outs[layer], gm.graph
    if directions == 2:
        units = module.hidden_size
        out = graph.call_function(torch.narrow, (out, -1, direction * units, units))
    steps = -2 if module.batch_first else 0
    out = graph.call_function(torch.narrow, (out, steps, 0 if direction else -1, 1))
    return graph.call_function(torch.squeeze, (out, steps))
