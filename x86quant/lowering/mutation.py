"""Graphs without mutation: every write in place becomes a new value that later readers see.

The passes, and stock quantization, take it that a node only makes its own result. A traced model
need not: ``x.clamp_(0)``, ``F.relu(x, inplace=True)``, ``x[:, :4].mul_(2)`` and ``x[mask] = 0``
change what other nodes made, and every view of it.

What a node writes is observed rather than read off its name: the graph runs once on example inputs,
and torch's own version counters tell which tensors changed. A write has a functional form if that
form gives the same values on the example; any other write is done on a copy, by an ``OnCopy``
module. Views of what was written are taken again from the new value. At the end both graphs are
compared on the example inputs.

``InPlaceTracer`` is for what torch.fx itself loses: its proxies know no ``x += 1`` (which becomes
``x = x + 1``, so that other names of x keep the old value) and refuse ``x[i] = y``.
"""

from __future__ import annotations

import copy
import dataclasses
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Interpreter, Node, Proxy, Tracer
from torch.fx.node import map_arg

from x86quant.errors import UnsupportedError
from x86quant.lowering.functional_forms import IN_PLACE_OPERATORS, NodeCall, functional_forms, tried
from x86quant.lowering.pickled_graph import PlainGraph
from x86quant.lowering.reshaped import without_reshapes
from x86quant.lowering.tensor_memory import (
    Geometry,
    clones,
    geometry_of,
    is_fresh,
    layout_of,
    same_values,
    state_of,
    storage_of,
    tensors_of,
    version_of,
)

_SEED = 0


class OnCopy(nn.Module):
    """Does a write in place on a copy of its first input, and returns the copy.

    To tracers it must be a leaf.
    """

    def __init__(self, write: GraphModule) -> None:
        super().__init__()
        self.write = write

    def forward(self, *inputs: Any) -> Any:
        """The first input, after the write that the others take part in."""
        return self.write(*inputs)

    def __reduce__(self) -> tuple[Any, ...]:
        return _on_copy, (PlainGraph.of(self.write),)

    def __reduce_ex__(self, _: Any) -> tuple[Any, ...]:
        return self.__reduce__()


def _on_copy(write: PlainGraph) -> OnCopy:
    return OnCopy(write.graph_module()).eval()


class InPlaceTracer(Tracer):
    """A tracer that records ``x += y`` and ``x[i] = y`` as the writes they are."""

    def trace(self, root: Any, concrete_args: dict[str, Any] | None = None) -> Graph:
        """The graph of ``root``.

        Raises:
            UnsupportedError: ``root`` wrote to its own parameters or buffers while it was traced.
        """
        state = state_of(root) if isinstance(root, nn.Module) else []
        versions = list(map(version_of, state))
        graph = super().trace(root, concrete_args)
        if versions != list(map(version_of, state)):
            raise UnsupportedError(
                f"{type(root).__name__} changes its own parameters or buffers at each call; "
                "a quantized model keeps no state between calls"
            )
        storages = set(map(storage_of, state))
        for node in graph.nodes:
            # A view of a buffer may be read like a constant, but is not one that each call creates.
            if node.op == "get_attr" and is_fresh(node):
                tensor = getattr(self.root, str(node.target))
                if storage_of(tensor) in storages:
                    node.target = f"_view_of_state{node.target!s}"
                    setattr(self.root, node.target, tensor)
        return graph

    def proxy(self, node: Node) -> Proxy:
        """A proxy that knows how to be written to."""
        return InPlaceProxy(node, self)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Whether ``m`` is recorded as one call."""
        return isinstance(m, OnCopy) or super().is_leaf_module(m, module_qualified_name)


class InPlaceProxy(Proxy):
    """Stands for a value that may be written to."""

    def __setitem__(self, index: Any, value: Any) -> None:
        self.tracer.create_proxy("call_function", operator.setitem, (self, index, value), {})


def _recorded(target: Any) -> Callable[[Proxy, Any], Any]:
    def method(self: Proxy, other: Any) -> Any:
        return self.tracer.create_proxy("call_function", target, (self, other), {})

    return method


for _target, _ in IN_PLACE_OPERATORS.items():
    setattr(InPlaceProxy, f"__{_target.__name__}__", _recorded(_target))


def without_mutations(
    gm: GraphModule, example_inputs: Sequence[Any], *, compare: bool = True
) -> GraphModule:
    """``gm`` itself if no node writes to another's value, else a graph that gives the same results.

    The inputs of the new graph are left as they are, even where ``gm`` overwrites them. ``compare``
    is False where the caller compares the results of the graph before it is used.

    Raises:
        UnsupportedError: a write cannot be expressed, among them any to a parameter or buffer,
            which would outlast the call.
    """
    if not any(_may_write(node, gm) for node in gm.graph.nodes):
        return gm
    # Leaving inference mode would turn gradients on: no_grad comes after it.
    with torch.inference_mode(False), torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(_SEED)
        gm = without_reshapes(gm, example_inputs)
        torch.default_generator.manual_seed(_SEED)
        recorder = _WriteRecorder(gm)
        expected = recorder.run(*clones(tuple(example_inputs)))
        expected = clones(expected)
        spelled = [n for n in gm.graph.nodes if n.target in IN_PLACE_OPERATORS]
        if not recorder.writes and not spelled:
            return gm
        functional = _Rewriter(gm, recorder).run()
        if not compare:
            return functional
        torch.default_generator.manual_seed(_SEED)
        actual = Interpreter(functional).run(*clones(tuple(example_inputs)))
    if not same_values(expected, actual):
        raise UnsupportedError("writes in place cannot be told apart from the values they change")
    return functional


# --- what a node writes ----------------------------------------------------------------------

#: Where functions live that write to an argument only if their name or their arguments say so.
_KNOWN = ("torch", "_operator", "operator", "builtins", "math", "x86quant")


def _may_write(n: Node, root: nn.Module) -> bool:
    """Whether ``n`` could write in place: whatever is not known not to. Running it tells."""
    target: Any = n.target
    if n.op == "call_method":
        return str(target).endswith("_") or "out" in n.kwargs
    if n.op == "call_module":
        return not _keeps_inputs(root.get_submodule(str(target)))
    if n.op != "call_function":
        return False
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.is_mutable
    name = str(getattr(target, "__name__", ""))
    home = str(getattr(target, "__module__", None) or "torch")
    switches = ("inplace", "training", "train", "use_input_stats", "max_norm", "out")
    return (
        target in IN_PLACE_OPERATORS
        or target is operator.setitem
        or name.endswith("_")
        or home.partition(".")[0] not in _KNOWN
        or any(argument is True for argument in n.args)
        or any(n.kwargs.get(switch) not in (None, False) for switch in switches)
    )


def _keeps_inputs(module: nn.Module) -> bool:
    """Whether ``module``, one of torch's own, writes neither to its input nor to itself."""
    if isinstance(module, nn.Sequential):
        return all(map(_keeps_inputs, list(module.children())[:1]))
    state = module.training and any(True for _ in module.buffers())
    in_place = getattr(module, "inplace", False) or getattr(module, "max_norm", None) is not None
    return type(module).__module__.startswith("torch.") and not state and not in_place


@dataclasses.dataclass(frozen=True, slots=True)
class _Write:
    """A write by one node: the storage it changes, and how else its new value can be computed."""

    storage: int
    functional: NodeCall | None


class _WriteRecorder(Interpreter):
    """Runs a graph and notes the value of every node and what it wrote."""

    def __init__(self, gm: GraphModule) -> None:
        super().__init__(gm, garbage_collect_values=False)
        self.values: dict[Node, Any] = {}
        self.writes: dict[Node, _Write] = {}
        #: The shape of each node's tensor when it was made: a later ``t_()`` may change it.
        self.geometries: dict[Node, Geometry | None] = {}
        self._versions: dict[int, tuple[torch.Tensor, int, Geometry]] = {}
        self._copies: dict[int, torch.Tensor] = {}

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        """The attribute, or if it is a tensor a copy: a write must not change the model."""
        value = super().get_attr(target, args, kwargs)
        if not isinstance(value, torch.Tensor) or value.is_quantized:
            return value
        return self._copies.setdefault(id(value), value.detach().clone())

    def run_node(self, n: Node) -> Any:
        if n.op == "output":
            return super().run_node(n)
        module = self.fetch_attr(str(n.target)) if n.op == "call_module" else None
        state = [] if module is None else [(x, version_of(x)) for x in state_of(module)]
        candidates = [(call, tried(call, self.env)) for call in functional_forms(n, self.module)]
        value = super().run_node(n)
        if any(version_of(x) != version for x, version in state):
            raise UnsupportedError(
                f"{n.target} changes its own parameters or buffers at each call; "
                "call eval() on the model, or keep this module out of the quantized part"
            )
        self._note(n, candidates)
        self.values[n] = value
        self.geometries[n] = geometry_of(value) if isinstance(value, torch.Tensor) else None
        for x in tensors_of(value):
            self._versions.setdefault(id(x), (x, version_of(x), geometry_of(x)))
        return value

    def _note(self, n: Node, candidates: list[tuple[NodeCall, Any]]) -> None:
        for x in tensors_of([self.env[argument] for argument in n.all_input_nodes]):
            if geometry_of(x) != self._versions[id(x)][2]:
                raise UnsupportedError(
                    f"{n.target} changes the shape of a tensor in place; write x = x."
                    f"{str(n.target).rstrip('_')}(...) instead"
                )
        if isinstance(n.target, torch._ops.OpOverload) and not n.target._schema.is_mutable:
            return  # so that long graphs take no time that grows with their square
        written: dict[int, torch.Tensor] = {}
        for key, (x, version, geometry) in self._versions.items():
            if version_of(x) != version:
                written[storage_of(x)] = x
                self._versions[key] = (x, version_of(x), geometry)
        if not written:
            return
        if len(written) > 1:
            raise UnsupportedError(f"{n.target} writes to more than one tensor in place")
        (storage,) = written
        target = _written_argument(n, storage, self.env)
        same = [call for call, value in candidates if same_values(self.env[target], value)]
        self.writes[n] = _Write(storage, same[0] if same else None)


def _written_argument(n: Node, storage: int, env: dict[Node, Any]) -> Node:
    """The argument of ``n``, a tensor, through which it writes to ``storage``."""
    first = [n.kwargs.get("out"), *n.args[:1], n.kwargs.get("input")]
    for argument in (*first, *n.all_input_nodes):
        if isinstance(argument, Node):
            value = env[argument]
            if isinstance(value, torch.Tensor) and storage_of(value) == storage:
                return argument
    raise UnsupportedError(f"{n.target} writes to a tensor that is not among its arguments")


# --- the new graph ---------------------------------------------------------------------------


class _Rewriter:
    """Copies a graph node by node; ``now`` has what stands for each old node at the moment."""

    def __init__(self, gm: GraphModule, recorded: _WriteRecorder) -> None:
        self.gm = gm
        self.values, self.writes = recorded.values, recorded.writes
        self.geometries = recorded.geometries
        self.graph = Graph()
        self.now: dict[Node, Node] = {}
        self.modules: dict[str, nn.Module] = {}
        self.written: set[int] = set()
        self.fresh: set[Node] = set()  # renewed after the latest write
        self.position = {node: index for index, node in enumerate(gm.graph.nodes)}

    def run(self) -> GraphModule:
        """The graph without mutations."""
        for node in self.gm.graph.nodes:
            if node.op == "output":
                self.graph.output(map_arg(node.args[0], self._current))
            elif node in self.writes:
                self._write(node)
            else:
                self.now[node] = self._again(node)
        new = copy.copy(self.gm)
        for path, module in self.modules.items():
            parent, _, name = path.rpartition(".")
            new.get_submodule(parent).add_module(name, module)
        new.graph = self.graph
        return new

    def _current(self, node: Node) -> Node:
        return self.now[node]

    def _tensor_in(self, node: Node, storage: int) -> bool:
        value = self.values.get(node)
        return isinstance(value, torch.Tensor) and storage_of(value) == storage

    def _again(self, node: Node) -> Node:
        """``node`` computed from what its arguments are now."""
        value = self.values[node]
        stale = isinstance(value, torch.Tensor) and storage_of(value) in self.written
        if stale and not any(self._tensor_in(x, storage_of(value)) for x in node.all_input_nodes):
            through_views = any(
                self._parent(x, storage_of(value)) is not None for x in node.all_input_nodes
            )
            if not through_views:
                return self._alike(node, storage_of(value))
        new = self.graph.node_copy(node, self._current)
        if node.target in IN_PLACE_OPERATORS and not isinstance(value, list | torch.Tensor):
            new.target = IN_PLACE_OPERATORS[node.target]  # of sizes
        return new

    def _alike(self, node: Node, storage: int) -> Node:
        """What stands for a tensor that is the same view as ``node``, which was written since."""
        for other in self.now:
            if self._tensor_in(other, storage) and self.geometries[other] == self.geometries[node]:
                return self.now[other]
        raise UnsupportedError(f"{node.name} is read again after a write in place to a part of it")

    def _parent(self, node: Node, storage: int) -> Node | None:
        """The argument that ``node`` is, is a view of, or has views of."""
        if node in self.writes:
            return _written_argument(node, storage, self.values)
        for before in node.all_input_nodes:
            if any(storage_of(x) == storage for x in tensors_of(self.values[before])):
                return before
        return None

    def _chain(self, node: Node, storage: int) -> list[Node]:
        """From the tensor that first had the storage to ``node``: each is a view of the one before.

        What is no tensor, such as the tuple of a chunk, may only stand in between.
        """
        chain = [node]
        while (parent := self._parent(chain[0], storage)) is not None:
            chain.insert(0, parent)
        while not isinstance(self.values[chain[0]], torch.Tensor):
            chain.pop(0)
        return chain

    def _write(self, node: Node) -> None:
        storage, functional = self.writes[node].storage, self.writes[node].functional
        target = _written_argument(node, storage, self.values)
        chain = self._chain(target, storage)
        root = chain[0]
        if root.op == "get_attr" and not is_fresh(root):
            raise UnsupportedError(
                f"the model writes to its own {root.target!r} at each call ({node.target}); "
                "a quantized model keeps no state between calls"
            )
        new = self._written_root(node, chain, storage, functional)
        new.meta.update(node.meta)
        self.written.add(storage)
        self._renew(node, root, new, storage)
        value = self.values[node]
        if isinstance(value, torch.Tensor) and self.geometries[node] == self.geometries[target]:
            self._renew_one(target, storage)
            self.now[node] = self.now[target]
        elif value is not None and node.users:
            raise UnsupportedError(f"{node.target} both writes in place and returns something else")

    def _written_root(
        self, node: Node, chain: list[Node], storage: int, functional: NodeCall | None
    ) -> Node:
        root, target = chain[0], chain[-1]
        if functional is None or self.geometries[root] != self.geometries[target]:
            return self._on_copy(node, chain)
        op, called, args, kwargs = functional
        if op == "call_module":
            self.modules[str(node.target)] = called
            called = str(node.target)
        new_args: Any = map_arg(args, self._current)
        new_kwargs: Any = map_arg(kwargs, self._current)
        return self.graph.create_node(op, called, new_args, new_kwargs, name=node.name)

    def _on_copy(self, node: Node, chain: list[Node]) -> Node:
        """The write of ``node`` done on a copy of the chain's root."""
        root, views = chain[0], [n for n in chain[1:] if n not in self.writes]
        steps = [*views, node]
        inner = Graph()
        inside: dict[Node, Node] = {}
        reads = dict.fromkeys(x for step in steps for x in step.all_input_nodes if x not in chain)
        for n in (root, *reads):
            inside[n] = inner.placeholder(f"{n.name}_")
        # Whether a view of it shares its memory depends on the layout that the copy has.
        layout: dict[str, Any] = {"memory_format": layout_of(self.values[root])}
        copied = inside[root] = inner.call_function(torch.clone, (inside[root],), layout)
        for step in (*chain[1:], node):
            if step in steps:
                inside[step] = inner.node_copy(step, inside.__getitem__)
            else:  # an earlier write, done in what the root is now
                parent = self._parent(step, self.writes[step].storage)
                assert parent is not None
                inside[step] = inside[parent]
        inner.output(copied)
        path = f"{node.name}_on_copy"
        self.modules[path] = OnCopy(GraphModule(self.gm, inner))
        inputs = tuple(self.now[n] for n in (root, *reads))
        return self.graph.create_node("call_module", path, inputs, {}, name=node.name)

    def _renew(self, node: Node, root: Node, new: Node, storage: int) -> None:
        """Everything in ``storage`` that is read after ``node`` is taken from ``new`` again."""
        self.now[root] = new
        after = self.position[node]
        self.fresh = {root}
        for other in list(self.now):
            if any(storage_of(x) == storage for x in tensors_of(self.values[other])) and any(
                self.position[user] > after for user in other.users
            ):
                self._renew_one(other, storage)

    def _renew_one(self, node: Node, storage: int) -> None:
        if node in self.fresh:
            return
        self.fresh.add(node)
        alike = [
            n for n in self.fresh
            if n is not node and self.geometries[n] is not None
            and self.geometries[n] == self.geometries[node]
        ]  # fmt: skip
        parent = self._parent(node, storage)
        if alike:
            self.now[node] = self.now[alike[0]]
        elif parent is None:
            if isinstance(self.values[node], torch.Tensor):
                raise UnsupportedError(f"{node.name} shares memory that a later node writes to")
            self.fresh.discard(node)  # a tuple of several tensors: its items know better
        else:
            self._renew_one(parent, storage)
            view = node not in self.writes
            self.now[node] = self.graph.node_copy(node, self._current) if view else self.now[parent]
