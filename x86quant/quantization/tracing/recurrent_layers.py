"""LSTMs and GRUs in a traced graph: one float layer at a time, cells as layers of one step.

What a static graph makes of such a layer is ``RoundedRecurrent``.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node

#: Of the pair of states that an LSTM returns.
_STATES, _CELLS = 0, 1

_Given = tuple[Any, ...]


class _OneLayer:
    """Of ``nn.LSTM`` or ``nn.GRU``: the states at all steps, and no more.

    Initial states ``h`` and ``c`` are [directions, ...]; None stands for zeros.
    """

    def forward(
        self, x: torch.Tensor, h: torch.Tensor | None = None, c: torch.Tensor | None = None
    ) -> Any:
        return self._both(x, h, c)[0]

    def _both(
        self, x: torch.Tensor, h: torch.Tensor | None, c: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The states at all steps, and what a layer that goes on needs: last cells or states."""
        rnn: Any = self
        if not isinstance(self, nn.LSTM):
            states, last = super().forward(x, h)  # type: ignore[misc]
            return states, last
        hx = None
        if h is not None or c is not None:
            sequences = x.shape[0 if rnn.batch_first else 1 : 1 if rnn.batch_first else 2]
            before = (2 if rnn.bidirectional else 1, *(sequences if x.dim() == 3 else ()))
            widths = (rnn.proj_size or rnn.hidden_size, rnn.hidden_size)
            hx = tuple(
                x.new_zeros((*before, width)) if state is None else state
                for state, width in zip((h, c), widths, strict=True)
            )
        states, (_, last) = super().forward(x, hx)
        return states, last


class _WithLast(_OneLayer):
    """The same with the last cells of an LSTM, or the last states of a GRU."""

    def forward(
        self, x: torch.Tensor, h: torch.Tensor | None = None, c: torch.Tensor | None = None
    ) -> Any:
        return self._both(x, h, c)


class LSTMLayer(_OneLayer, nn.LSTM):  # type: ignore[misc]
    """One layer of an ``nn.LSTM``, both directions; returns the states at all steps."""


class GRULayer(_OneLayer, nn.GRU):  # type: ignore[misc]
    """One layer of an ``nn.GRU``, both directions; returns the states at all steps."""


class LSTMLayerWithLast(_WithLast, nn.LSTM):  # type: ignore[misc]
    """The same; also returns the last cells."""


class LSTMCellLayer(_WithLast, nn.LSTM):  # type: ignore[misc]
    """An ``nn.LSTMCell`` as a layer of one step."""


class GRUCellLayer(_WithLast, nn.GRU):  # type: ignore[misc]
    """An ``nn.GRUCell`` as a layer of one step; the last states are as before rounding."""


#: By the class of torch that each kind of layer shows itself as.
_KINDS: dict[type[nn.Module], type[Any]] = {
    nn.LSTM: LSTMLayer, nn.GRU: GRULayer, nn.LSTMCell: LSTMCellLayer, nn.GRUCell: GRUCellLayer,
}  # fmt: skip

#: All kinds of layers, and those classes.
LAYERS: dict[type[nn.Module], type[nn.Module]] = {
    LSTMLayerWithLast: nn.LSTM, **{layer: kind for kind, layer in _KINDS.items()},
}  # fmt: skip


def is_recurrent_layer(module: object) -> bool:
    """Whether ``module`` is one layer of a recurrent one, as ``part_recurrent`` makes them."""
    return isinstance(module, _OneLayer)


def returns_last(module: object) -> bool:
    """Whether a recurrent layer returns a pair."""
    return isinstance(module, _WithLast)


def states_of(node: Node, module: object) -> Node:
    """The node of the states at all steps, where ``node`` calls such a layer; else ``node``."""
    if not returns_last(module):
        return node
    return next(
        user for user in node.users if user.target is operator.getitem and user.args[1] == 0
    )


def part_recurrent(gm: GraphModule) -> int:
    """Let recurrent modules be one layer after another in ``gm``, and cells layers of one step.

    Those stay whole that are called in a way that layers are not. Returns how many were taken
    apart. Not yet recompiled.
    """
    modules = dict(gm.named_modules(remove_duplicate=False))
    calls: dict[str, list[Node]] = {}
    for node in list(gm.graph.nodes):
        if node.op == "call_module" and type(modules[str(node.target)]) in _KINDS:
            _spell_pair(gm, node, modules[str(node.target)])
            _spell_results(gm, node, modules[str(node.target)])
            calls.setdefault(str(node.target), []).append(node)
    taken = {path: nodes for path, nodes in calls.items() if _fit(nodes, modules[path])}
    for path, nodes in taken.items():
        module = modules[path]
        part = _part_cells if isinstance(module, nn.RNNCellBase) else _part_layers
        part(gm, path, module, nodes)
    return len(taken)


def _spell_pair(gm: GraphModule, node: Node, module: nn.Module) -> None:
    """Let initial states that are handed on as one value be two."""
    pair = node.args[1] if len(node.args) > 1 else node.kwargs.get("hx")
    if not isinstance(pair, Node) or not isinstance(module, nn.LSTM | nn.LSTMCell):
        return
    with gm.graph.inserting_before(node):
        both = tuple(gm.graph.call_function(operator.getitem, (pair, i)) for i in (0, 1))
    node.args, node.kwargs = (_input(node), both), {}


def _spell_results(gm: GraphModule, node: Node, module: nn.Module) -> None:
    """Let results that are returned or handed on as one value be several."""
    if isinstance(module, nn.GRUCell):
        return
    _spell_out(gm, node)
    if isinstance(module, nn.LSTM):
        for user in list(node.users):
            if user.target is operator.getitem and user.args[1] == 1:
                _spell_out(gm, user)


def _spell_out(gm: GraphModule, node: Node) -> None:
    """Let those who take the pair ``node`` whole take both of what is in it."""
    whole = [user for user in node.users if user.target is not operator.getitem]
    if not whole:
        return
    with gm.graph.inserting_after(node):
        second = gm.graph.call_function(operator.getitem, (node, 1))
        first = gm.graph.call_function(operator.getitem, (node, 0))
    for user in whole:
        user.args = _put(tuple(user.args), node, (first, second))
        user.kwargs = _put(dict(user.kwargs), node, (first, second))


def _put(value: Any, node: Node, pair: _Given) -> Any:
    """``value`` with ``pair`` wherever it has ``node``."""
    if value is node:
        return pair
    if isinstance(value, dict):
        return {key: _put(x, node, pair) for key, x in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(_put(x, node, pair) for x in value)
    return value


def _input(node: Node) -> Any:
    return node.args[0] if node.args else node.kwargs.get("input")


def _initial(node: Node, module: nn.Module) -> tuple[Any, ...]:
    """The initial states of a call, h and c; None for zeros."""
    given = node.args[1] if len(node.args) > 1 else node.kwargs.get("hx")
    pair = given if isinstance(given, list | tuple) else (given, None)
    return tuple(None if _are_zeros(x) else x for x in pair)


def _are_zeros(x: object) -> bool:
    """Whether ``x`` is zeros of a size that is computed, as torch would begin by itself."""
    if not isinstance(x, Node) or x.target not in (torch.zeros, "new_zeros"):
        return False
    return len(x.all_input_nodes) > (x.target == "new_zeros")


def _fit(nodes: Sequence[Node], module: Any) -> bool:
    """Whether layers one by one can do what these calls of ``module`` do."""
    if any(p.dtype != torch.float32 for p in module.parameters()):
        return False
    is_pair = isinstance(module, nn.LSTM | nn.LSTMCell)
    for node in nodes:
        initial = _initial(node, module)
        known = {*node.kwargs} <= {"input", "hx"} and len(initial) == 2
        if not known or not isinstance(_input(node), Node):
            return False
        if not all(x is None or isinstance(x, Node) for x in initial):
            return False
        if not is_pair and initial[1] is not None:
            return False
        pairs = [u for u in node.users if isinstance(module, nn.LSTM) and u.args[1:] == (1,)]
        users = [] if isinstance(module, nn.GRUCell) else [*node.users]
        for user in (*users, *(state for pair in pairs for state in pair.users)):
            if user.target is not operator.getitem or user.args[1] not in (0, 1):
                return False
    return True


# --- layers ---


def _part_layers(gm: GraphModule, path: str, module: Any, nodes: Sequence[Node]) -> None:
    """Let layers do what ``module`` at ``path`` does in ``nodes``."""
    last = isinstance(module, nn.LSTM) and any(_cells_read(node) for node in nodes)
    layers = _layers(module, last)
    # One layer keeps the path of its module; several are children of it.
    paths = [path] if len(layers) == 1 else [f"{path}.layer{i}" for i in range(len(layers))]
    gm.set_submodule(path, nn.Module())
    for own, layer in zip(paths, layers, strict=True):
        gm.set_submodule(own, layer)
    for node in nodes:
        _replace(gm, node, paths, module, last)


def _cells_read(node: Node) -> bool:
    pairs = [user for user in node.users if user.args[1] == 1]
    return any(state.args[1] == _CELLS and state.users for pair in pairs for state in pair.users)


def _layers(module: Any, last: bool) -> list[nn.Module]:
    """The layers of a recurrent ``module``, whose parameters they share."""
    directions = 2 if module.bidirectional else 1
    width = directions * (module.proj_size or module.hidden_size)
    kind = LSTMLayerWithLast if last else _KINDS[type(module)]
    found: list[nn.Module] = []
    for i in range(module.num_layers):
        layer = kind(
            module.input_size if i == 0 else width,
            module.hidden_size,
            bias=module.bias,
            batch_first=module.batch_first,
            bidirectional=module.bidirectional,
            device="meta",
            **({"proj_size": module.proj_size} if module.proj_size else {}),
        )
        _share(layer, module, {name: name.replace("_l0", f"_l{i}") for name in layer._parameters})
        found.append(layer.eval())
    return found


def _share(layer: Any, module: nn.Module, names: Mapping[str, str]) -> None:
    """Give ``layer`` the parameters of ``module``; ``names`` has those there by those here."""
    for name, there in names.items():
        layer.register_parameter(name, getattr(module, there))
    layer._flat_weights = [getattr(layer, name) for name in layer._flat_weights_names]


def _replace(gm: GraphModule, node: Node, paths: Sequence[str], module: Any, last: bool) -> None:
    """Let layers at ``paths`` do what ``node`` does."""
    graph = gm.graph
    outs: list[Node] = []
    cells: list[Node] = []
    directions = 2 if module.bidirectional else 1
    initial = _initial(node, module)
    with graph.inserting_before(node):
        x = _input(node)
        for i, path in enumerate(paths):
            own = [_of_layer(gm, state, i, len(paths), directions) for state in initial]
            x = _call(gm, node, path, x, own)
            if last:
                cells.append(_item(gm, x, 1))
                x = _item(gm, x, 0)
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
                elif state.users:
                    _replace_cells(gm, state, cells, directions)
                graph.erase_node(state)
            graph.erase_node(user)
            continue
        graph.erase_node(user)
    graph.erase_node(node)


def _of_layer(gm: GraphModule, state: Any, layer: int, layers: int, directions: int) -> Any:
    """The part for one layer of an initial state of all; None for zeros."""
    first, last = layer * directions, (layer + 1) * directions
    if layers == 1 or state is None:
        return state
    if state.target is torch.ops.x86quant.join.default:  # another module's last states or cells
        parts = state.kwargs["xs"]
        if len(parts) == layers:
            return parts[layer]
        if len(parts) == layers * directions:
            return _joined(gm, parts[first:last])
    return _item(gm, state, slice(first, last))


def _joined(gm: GraphModule, states: Sequence[Node]) -> Node:
    """``states`` one after the other, not rounded again as by ``torch.cat``."""
    if len(states) == 1:
        return states[0]
    given: dict[str, Any] = {"xs": list(states), "dim": 0}
    return gm.graph.call_function(torch.ops.x86quant.join.default, (), given)


def _call(gm: GraphModule, node: Node, path: str, x: Any, initial: Sequence[Any]) -> Node:
    """Call the layer at ``path`` on ``x`` and what is given of ``initial`` states."""
    states = () if all(state is None for state in initial) else tuple(initial)
    found = gm.graph.call_module(path, (x, *states))
    found.meta.update(node.meta)
    return found


def _item(gm: GraphModule, value: Any, at: Any) -> Any:
    """``value[at]``, which is no step of a static graph and so is not rounded."""
    return None if value is None else gm.graph.call_function(operator.getitem, (value, at))


def _replace_cells(gm: GraphModule, states: Node, cells: Sequence[Node], directions: int) -> None:
    """Let the last cells come from those of each layer."""
    count = len(cells) * directions
    for user in list(states.users):
        at = user.args[1] if user.target is operator.getitem and len(user.args) == 2 else None
        if isinstance(at, int) and -count <= at < count:
            layer, direction = divmod(at % count, directions)
            with gm.graph.inserting_before(user):
                user.replace_all_uses_with(_item(gm, cells[layer], direction))
            gm.graph.erase_node(user)
    if states.users:
        with gm.graph.inserting_before(states):
            states.replace_all_uses_with(_joined(gm, cells))


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
            each = [_last(gm, outs, i, module) for i in range(count)]
            found = [gm.graph.call_function(torch.unsqueeze, (state, 0)) for state in each]
            states.replace_all_uses_with(_joined(gm, found))


def _last(gm: GraphModule, outs: Sequence[Node], number: int, module: Any) -> Node:
    """The last state of one direction of one layer: at the last step, or backward at the first."""
    directions = 2 if module.bidirectional else 1
    layer, direction = divmod(number, directions)
    out, graph = outs[layer], gm.graph
    if directions == 2:
        units = module.proj_size or module.hidden_size
        out = graph.call_function(torch.narrow, (out, -1, direction * units, units))
    steps = -2 if module.batch_first else 0
    out = graph.call_function(torch.narrow, (out, steps, 0 if direction else -1, 1))
    return graph.call_function(torch.squeeze, (out, steps))


# --- cells ---


def _part_cells(gm: GraphModule, path: str, module: Any, nodes: Sequence[Node]) -> None:
    """Let a layer of one step do what the cell at ``path`` does in ``nodes``."""
    layer = _KINDS[type(module)](
        module.input_size, module.hidden_size, bias=module.bias, device="meta"
    )
    _share(layer, module, {name: name.removesuffix("_l0") for name in layer._parameters})
    gm.set_submodule(path, layer.eval())
    graph = gm.graph
    for node in nodes:
        with graph.inserting_before(node):
            x = graph.call_function(torch.unsqueeze, (_input(node), 0))
            both = _call(gm, node, path, x, [_item(gm, x, None) for x in _initial(node, module)])
            state = graph.call_function(torch.squeeze, (_item(gm, both, 0), 0))
            last = _item(gm, _item(gm, both, 1), 0)
        for user in list(node.users):
            if isinstance(module, nn.LSTMCell):
                user.replace_all_uses_with(state if user.args[1] == 0 else last)
                graph.erase_node(user)
            else:  # what goes on from the state takes it as it was before rounding
                goes_on = user in nodes and _initial(user, module)[0] is node
                user.replace_input_with(node, last if goes_on else state)
        graph.erase_node(node)
