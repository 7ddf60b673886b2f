"""Observers in a float graph: before and behind every step that becomes int8."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.fx import Graph, GraphModule, Node

from x86quant.lowering.rounded import FusedLayer
from x86quant.lowering.views import parts
from x86quant.observing.activations import ExtremesObserver
from x86quant.observing.fixed import FixedRangeObserver
from x86quant.observing.observer import RangeObserver
from x86quant.quantization.static.flat_ends import is_unary, useful_range
from x86quant.quantization.static.int8_forms import (
    ALL_CLAMPS,
    BEFORE_CLAMP,
    BEFORE_SLOPED,
    CLAMPS,
    KNOWN,
    ORIGINS,
    SLOPED,
    kind_of,
    operands,
)
from x86quant.quantization.static.spelled_out import spelled_out
from x86quant.quantization.tracing.recurrent_layers import states_of


@dataclasses.dataclass(frozen=True, slots=True)
class Observation:
    """A float graph with observers.

    Attributes:
        graph_module: the graph; its layers are those of the float one.
        int8: the names of the steps that become int8.
        unfinished: those of them that are computed as one with the activation behind.
        inside: the names of steps inside a function that is spelled out, which is one int8 step.
    """

    graph_module: GraphModule
    int8: frozenset[str]
    unfinished: frozenset[str]
    inside: frozenset[str]


def observed(
    gm: GraphModule, observer: Callable[[], RangeObserver], in_float: Collection[str]
) -> Observation:
    """``gm`` with an ``observer`` for every value that int8 steps read or write.

    Args:
        gm: a float graph; it is not changed.
        observer: makes one.
        in_float: the names of the nodes that stay in float.
    """
    return _Observing(fused(gm), observer, in_float).result()


def fused(gm: GraphModule) -> GraphModule:
    """``gm`` with each activation that is one step with a layer in one module, at the layer's path.

    A module that is called more than once is fused where that holds of every call.
    """
    found = _copied(gm)
    stale = False
    modules = dict(found.named_modules(remove_duplicate=False))
    calls: dict[str, list[Node]] = {}
    read: set[str] = set()
    for node in found.graph.nodes:
        if node.op == "call_module":
            calls.setdefault(str(node.target), []).append(node)
        elif node.op == "get_attr":
            read.add(str(node.target).rpartition(".")[0])
    for path, nodes in calls.items():
        if path in read:
            continue  # its weight would have another path
        layer = modules[path]
        behind = [_activation_behind(node, modules) for node in nodes]
        activations = [node for node in behind if node is not None]
        told = {_told(node, modules) for node in activations}
        if len(activations) < len(nodes) or len(told) > 1:
            continue
        found.set_submodule(path, FusedLayer(layer, _module_of(told.pop())))
        for node, activation in zip(nodes, activations, strict=True):
            activation.replace_all_uses_with(node)
            found.graph.erase_node(activation)
        stale = True
    if stale:
        found.recompile()
    return found


def core(module: nn.Module) -> nn.Module:
    """``module``, or the layer in it if an activation is fused behind one."""
    if isinstance(module, FusedLayer):
        first: nn.Module = module[0]
        return first
    return module


def _copied(gm: GraphModule) -> GraphModule:
    """A copy whose graph and structure may change; layers are shared."""
    graph = Graph()
    graph.output(graph.graph_copy(gm.graph, val_map={}))
    return GraphModule(gm, graph).eval()


def _activation_behind(node: Node, modules: dict[str, nn.Module]) -> Node | None:
    """The ReLU, leaky ReLU or their like that alone reads ``node``, and is one step with it."""
    if len(node.users) != 1:
        return None
    kind, (user,) = _kind(node, modules), node.users
    if user.op == "call_method" or user.all_input_nodes != [node]:
        return None
    activation = _kind(user, modules)
    alone = not isinstance(modules.get(str(node.target)), FusedLayer)
    fits = (activation in CLAMPS and kind in BEFORE_CLAMP) or (
        activation in SLOPED and kind in BEFORE_SLOPED and alone
    )
    return user if fits else None


def _called(node: Node, modules: dict[str, nn.Module]) -> nn.Module | None:
    """The layer that ``node`` calls, if it calls one."""
    return core(modules[str(node.target)]) if node.op == "call_module" else None


def _kind(node: Node, modules: dict[str, nn.Module]) -> Any:
    return kind_of(node, _called(node, modules))


#: A PReLU, the slope of a leaky ReLU, or bounds.
_Told: TypeAlias = nn.Module | float | tuple[float, float]


def _told(activation: Node, modules: dict[str, nn.Module]) -> _Told:
    """What two activations have in common if they compute the same."""
    kind = _kind(activation, modules)
    if kind is nn.PReLU:
        return modules[str(activation.target)]
    return _slope(activation, modules) if kind in SLOPED else _bounds(activation, modules)


def _module_of(told: _Told) -> nn.Module:
    """A module that computes the activation."""
    if isinstance(told, nn.Module):
        return told
    return nn.LeakyReLU(told) if isinstance(told, float) else _clamp(*told)


def _slope(leaky: Node, modules: dict[str, nn.Module]) -> float:
    """What a leaky ReLU multiplies by what is below zero."""
    if leaky.op == "call_module":
        module: Any = modules[str(leaky.target)]
        return float(module.negative_slope)
    given = dict(zip(("input", "negative_slope"), leaky.args, strict=False)) | leaky.kwargs
    return float(given.get("negative_slope", 0.01))  # type: ignore[arg-type]


def _bounds(clamp: Node, modules: dict[str, nn.Module]) -> tuple[float, float]:
    """Between which values ``clamp`` keeps what it reads."""
    module: Any = modules[str(clamp.target)] if clamp.op == "call_module" else None
    kind = kind_of(clamp, module)
    if kind in (nn.ReLU, F.relu):
        return 0.0, math.inf
    if kind in (nn.ReLU6, F.relu6):
        return 0.0, 6.0
    if module is not None:
        return float(module.min_val), float(module.max_val)
    given = dict(zip(("input", "min_val", "max_val"), clamp.args, strict=False)) | clamp.kwargs
    return float(given.get("min_val", -1.0)), float(given.get("max_val", 1.0))  # type: ignore[arg-type]


def _clamp(low: float, high: float) -> nn.Module:
    """A module that keeps values between ``low`` and ``high``."""
    if low == 0.0 and high in (6.0, math.inf):
        return nn.ReLU() if high == math.inf else nn.ReLU6()
    return nn.Hardtanh(low, high)


class _Observing:
    """Goes through a graph once, in order, and puts observers where they belong."""

    def __init__(
        self, gm: GraphModule, observer: Callable[[], RangeObserver], in_float: Collection[str]
    ) -> None:
        self._gm, self._make, self._in_float = gm, observer, in_float
        self._modules = dict(gm.named_modules(remove_duplicate=False))
        self._observers: dict[Node, Any] = {}
        self._int8: set[str] = set()

    def result(self) -> Observation:
        """The graph with observers."""
        followers: set[Node] = set()
        made_here: set[Node] = set()
        functions = spelled_out(self._gm, self._modules)
        inside = {step for last, steps in functions.items() for step in steps if step is not last}
        for node in list(self._gm.graph.nodes):
            if not node.op.startswith("call_") or node.name in self._in_float:
                continue
            if made_here.issuperset(node.all_input_nodes):  # of numbers alone, such as arange
                made_here.add(node)
                continue
            if node in inside:
                continue
            if node in functions:
                self._observe_function(node, functions[node])
                continue
            module = self._module(node)
            kind = kind_of(node, module)
            if node in followers:
                self._observe(node, self._make())
                self._int8.add(node.name)
                continue
            origin = ORIGINS.get(kind)
            sources = operands(node)
            if origin is None or not sources:
                continue
            if origin == "codes" and sources[0] not in self._observers:
                continue
            if kind in ALL_CLAMPS and self._is_float_step(sources[0]):
                continue  # what it cuts off takes no codes
            behind = _activation_behind(node, self._modules)
            if behind is not None and behind.name in self._in_float:
                continue  # one step with it
            self._int8.add(node.name)
            for source in sources:
                self._observe_input(node, source)
            if behind is not None:
                followers.add(behind)  # one step with it: its results alone are observed
                continue
            self._observe(states_of(node, module), self._output(node, kind, origin))
        self._leave_out_flat_ends(functions)
        self._gm.recompile()
        self._gm.graph.lint()
        unfinished = {behind.all_input_nodes[0].name for behind in followers}
        names = frozenset(node.name for node in inside)
        return Observation(self._gm, frozenset(self._int8), frozenset(unfinished), names)

    def _leave_out_flat_ends(self, functions: Mapping[Node, Collection[Node]]) -> None:
        """Tell observers which values the one activation behind tells apart."""
        shared = Counter(map(id, self._observers.values()))
        for node, observer in self._observers.items():
            if not isinstance(observer, ExtremesObserver) or shared[id(observer)] > 1:
                continue
            users = set(node.users)
            found = next(((n, s) for n, s in functions.items() if users and users <= set(s)), None)
            if found is None and len(users) == 1 and is_unary(next(iter(users)), self._modules):
                found = (next(iter(users)), users)
            if found is not None:
                observer.useful = useful_range(node, found[1], found[0], self._modules)

    def _observe_function(self, last: Node, steps: Collection[Node]) -> None:
        """Observe what a function that is spelled out reads and gives."""
        if any(step.name in self._in_float for step in steps):
            return
        for step in steps:
            for source in step.all_input_nodes:
                if source not in steps:
                    self._observe_input(step, source)
        self._int8.add(last.name)
        self._observe(last, self._make())

    def _is_float_step(self, node: Node) -> bool:
        """Whether ``node`` has no codes, nor becomes a table between steps that have some."""
        called = node.op.startswith("call_") and node not in self._observers
        return called and not is_unary(node, self._modules)

    def _module(self, node: Node) -> nn.Module | None:
        return _called(node, self._modules)

    def _output(self, node: Node, kind: Any, origin: str) -> nn.Module:
        """The observer of the results of ``node``."""
        sources = operands(node)
        if origin == "known":
            scale, zero_point = KNOWN[kind]
            return FixedRangeObserver(scale, zero_point, self._make)
        # What a number makes of a tensor may be a thousand times smaller.
        if origin in ("seen", "operands"):
            return self._make()
        shared: nn.Module = self._observers[sources[0]]
        for source in sources[1:]:  # a join: all that comes in gets the codes that go out
            self._observers[source] = shared
            self._gm.set_submodule(str(source.target), shared)
        return shared

    def _observe_input(self, node: Node, source: Node) -> None:
        if source in self._observers:
            return
        for user in source.users:  # another step's input
            if user in self._observers:
                node.replace_input_with(source, user)
                return
        if self._takes_codes_apart(source):
            parted: Any = source.args[0]
            self._observe_input(parted, operands(parted)[0])
            self._observe(source, self._observers[operands(parted)[0]])
            return
        with self._gm.graph.inserting_before(node):
            node.replace_input_with(source, self._call(source, self._make()))

    def _takes_codes_apart(self, piece: Node) -> bool:
        """Whether ``piece`` is one of several that a tensor with codes is parted into."""
        parted = piece.args[0] if piece.target is operator.getitem else None
        if not isinstance(parted, Node) or not parts(parted):
            return False
        return all(
            whole.op.startswith("call_")
            and whole.name not in self._in_float
            and not self._is_float_step(whole)
            for whole in operands(parted)
        )

    def _observe(self, node: Node, observer: nn.Module) -> None:
        with self._gm.graph.inserting_after(node):
            new = self._call(node, observer)
        node.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)

    def _call(self, source: Node, observer: nn.Module) -> Node:
        path = f"activation_post_process_{len(self._observers)}"
        self._gm.add_submodule(path, observer)
        node = self._gm.graph.call_module(path, (source,))
        self._observers[node] = observer
        return node


def is_observer(module: object) -> bool:
    """Whether ``module`` is an observer: ours or, for "histogram", stock PyTorch's."""
    return hasattr(module, "calculate_qparams")


def qparams_of_observer(observer: Any) -> tuple[float, int]:
    """The scale and zero point that ``observer`` chooses."""
    scale, zero_point = observer.calculate_qparams()
    return float(scale), int(zero_point)


def int8_codes(weight: torch.Tensor, observer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of ``weight`` and their scales, as the weight ``observer`` says."""
    observer(weight.detach())
    scales, _ = observer.calculate_qparams()
    shape = [1] * weight.dim()
    if observer.ch_axis is not None:
        shape[observer.ch_axis] = -1
    low, high = int(observer.quant_min), int(observer.quant_max)
    codes = (weight.detach() * (1.0 / scales).reshape(shape)).round_().clamp_(low, high)
    return codes.to(torch.int8), scales
