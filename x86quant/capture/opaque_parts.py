"""A model as one graph in which its compiled parts stand with all that is known of their nodes.

They, and recurrent layers, are opaque while torch.export sees what surrounds them, and put back in
their places then.
"""

from __future__ import annotations

import contextlib
import dataclasses
import operator
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch._guards import detect_fake_mode
from torch.fx import Graph, GraphModule, Node
from torch.nn.utils.rnn import PackedSequence

from x86quant.calling.state import with_shared_tensors
from x86quant.capture.exported import Sizes, exported_once
from x86quant.capture.traced_graph import Traced
from x86quant.compiled import CompiledModule
from x86quant.compiled.shown_class import ShowsClass
from x86quant.compiled.traced import output_of, thawed
from x86quant.dynamic.recurrent import DynamicLSTM, takes_sequences
from x86quant.errors import UnsupportedError
from x86quant.forms.call_form import CallForm, Structure, take_apart
from x86quant.lowering.from_export import exported_layer
from x86quant.lowering.graph_tools import attribute, label, own_call

#: The parts of the model that is being exported in this thread, and what its result looked like.
SEEN = threading.local()


class OpaquePart(ShowsClass):
    """Stands for a compiled part, or a recurrent layer, while its surroundings are exported."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        # Not a child: export would take its tensors apart.
        self._hidden = [part]
        self.show_class_of(part)

    def __getattr__(self, name: str) -> Any:
        """What is asked of the part by the code around it: a number or a flag."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("_"):
                raise
            found = getattr(self._hidden[0], name)
            if isinstance(found, torch.Tensor | nn.Module):  # what computes goes through the op
                raise
            return found

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """One opaque op, whose fake kernel knows the shapes of the part's results."""
        part = self._hidden[0]
        if any(isinstance(x, PackedSequence) for x in args):  # whose results have no shapes to tell
            return part(*args, **kwargs)
        called, tensors = take_apart((args, kwargs))
        # Its result's structure is known once the fake kernel has run.
        seen = PartCall(part, called)
        SEEN.calls.append(seen)
        outputs = torch.ops.x86quant_capture.part(list(tensors), len(SEEN.calls) - 1)
        assert seen.result is not None
        return seen.result.fill(outputs)


@dataclasses.dataclass
class PartCall:
    """One call of a part: the part, its arguments, and what it returns, as structures.

    Export asks three times for the same shapes, of which free sizes make work: they are kept.
    """

    part: nn.Module
    called: Structure
    result: Structure | None = None
    known: dict[Any, list[torch.Tensor]] = dataclasses.field(default_factory=dict)


def is_part(module: nn.Module) -> bool:
    """Whether ``module`` is to stay whole."""
    return isinstance(module, CompiledModule) or takes_sequences(module)


@torch.library.custom_op("x86quant_capture::part", mutates_args=())
def _part(inputs: list[torch.Tensor], number: int) -> list[torch.Tensor]:
    seen: PartCall = SEEN.calls[number]
    args, kwargs = seen.called.fill(inputs)
    seen.result, found = take_apart(seen.part(*args, **kwargs))
    return [x.clone() if any(x is y for y in inputs) else x for x in found]


_OPAQUE = torch.ops.x86quant_capture.part.default


@_part.register_fake
def _(inputs: list[torch.Tensor], number: int) -> list[torch.Tensor]:
    seen: PartCall = SEEN.calls[number]
    fake = detect_fake_mode(inputs)
    assert fake is not None
    key = (fake, *(str((x.shape, x.dtype)) for x in inputs))
    if (known := seen.known.get(key)) is not None:
        return [torch.empty_like(x) for x in known]
    args, kwargs = seen.called.fill(inputs)
    if isinstance(seen.part, CompiledModule):
        result = _fake_graph(seen.part.graph_module, args)
    else:
        result = _fake_recurrent(seen.part, *args, **kwargs)
    seen.result, found = take_apart(result)
    found = [x.clone() if any(x is y for y in inputs) else x for x in found]
    seen.known[key] = found
    return found


def _fake_graph(gm: GraphModule, inputs: tuple[Any, ...]) -> Any:
    fake = detect_fake_mode(inputs)
    assert fake is not None
    tensors = {**dict(gm.named_parameters()), **dict(gm.named_buffers())}
    state: dict[str, torch.Tensor] = {
        k: fake.from_tensor(v, static_shapes=True) for k, v in tensors.items()
    }
    return thawed(torch.func.functional_call(gm, state, inputs))


def _fake_recurrent(layer: Any, input: torch.Tensor, hx: Any = None) -> Any:
    """Results of the right shapes, without the loop over steps that would fix their number."""
    directions = 2 if layer.bidirectional else 1
    width = layer.proj_size or layer.hidden_size
    batched = input.dim() == 3
    swapped = input.transpose(0, 1) if batched and layer.batch_first else input
    out = swapped.new_empty((*swapped.shape[:-1], width * directions))
    last = (layer.num_layers * directions, *swapped.shape[1:-1])
    h = input.new_empty((*last, width))
    states = (h, input.new_empty((*last, layer.hidden_size))) if _has_cells(layer) else h
    return (out.transpose(0, 1) if batched and layer.batch_first else out), states


def _has_cells(layer: nn.Module) -> bool:
    return isinstance(layer, nn.LSTM | DynamicLSTM)


@contextlib.contextmanager
def calls_seen() -> Iterator[None]:
    """A block in which calls of parts are noted."""
    SEEN.calls = []
    yield


@contextlib.contextmanager
def recurrent_opaque(model: nn.Module) -> Iterator[tuple[nn.Module, Callable[[GraphModule], None]]]:
    """A block in which a form of ``model`` is exported whose recurrent layers stay whole.

    Torch would trace each of their steps. With that form comes what lets a graph call the layers.
    """
    kinds = (nn.LSTM, nn.GRU)
    paths = {module: path for path, module in model.named_modules() if type(module) in kinds}
    if not paths or "" in paths.values():
        yield model, lambda _: None
        return

    def put_back(gm: GraphModule) -> None:
        for node in gm.graph.find_nodes(op="call_function", target=_OPAQUE):
            inputs, number = node.args
            seen: PartCall = SEEN.calls[number]
            gm.add_submodule(paths[seen.part], seen.part)
            with gm.graph.inserting_before(node):
                _, results = _layer_called(gm.graph, paths[seen.part], seen, inputs)
            for item in list(node.users):
                item.replace_all_uses_with(results[item.args[1]])
                gm.graph.erase_node(item)
            gm.graph.erase_node(node)

    memo: dict[int, Any] = {id(layer): OpaquePart(layer) for layer in paths}
    with calls_seen():
        yield with_shared_tensors(model, memo), put_back


_PREFIX = re.compile(r"^inner(\.|$)")


def exported_whole(
    model: nn.Module, form: CallForm, leaves: Sequence[torch.Tensor], sizes: Sizes
) -> Traced:
    """``model`` with its hooks as torch.export traces it, with the free sizes ``sizes``.

    Raises:
        UnsupportedError: it cannot be exported; says why.
    """
    parts = {module: path for path, module in model.named_modules() if is_part(module)}
    # A copy of the structure alone, with the same tensors.
    memo: dict[int, Any] = {id(part): OpaquePart(part) for part in parts}
    try:
        surroundings = with_shared_tensors(model, memo)
    except (TypeError, RuntimeError) as error:
        raise UnsupportedError(f"{type(model).__name__} cannot be copied: {error}") from error
    with calls_seen():
        traced = exported_once(surroundings, form, leaves, sizes, whole=True)
        gm = _PutBack(parts, leaves).graph_module(traced.graph_module)
    return dataclasses.replace(traced, graph_module=gm)


class _PutBack:
    """Puts parts back, whose paths are known."""

    def __init__(self, paths: Mapping[nn.Module, str], leaves: Sequence[torch.Tensor]) -> None:
        self._paths, self._leaves = paths, leaves

    def graph_module(self, flat: GraphModule) -> GraphModule:
        """The exported graph ``flat`` with the graphs of the parts in it."""
        graph = Graph()
        constants: dict[str, Any] = {}
        values: dict[Node, Any] = {}
        results: dict[Node, Any] = {}  # of the parts
        leaves = iter(self._leaves)
        for node in flat.graph.nodes:
            if node.op == "placeholder":
                new = graph.placeholder(str(node.target))
                example = next(leaves)
                new.meta.update(shape=tuple(example.shape), input_dtype=example.dtype)
                values[node] = new
            elif node.op == "output":
                graph.output(torch.fx.node.map_arg(node.args[0], lambda n: values[n]))
            elif node.target is _OPAQUE:
                inputs, number = node.args
                called = [values[x] for x in inputs]
                results[node] = self._called(graph, SEEN.calls[number], called, constants)
            elif node.args and isinstance(node.args[0], Node) and node.args[0] in results:
                values[node] = results[node.args[0]][node.args[1]]
            else:
                values[node] = _copied(graph, node, values)
                if node.op == "get_attr":
                    path = _PREFIX.sub("", str(node.target)) or "model"
                    if hasattr(GraphModule, path.partition(".")[0]):  # its own code, say
                        path = f"model_{path}"
                    values[node].target = path
                    constants[path] = attribute(flat, str(node.target))
        return _graph_module(constants, graph)

    def _called(
        self, graph: Graph, call: PartCall, inputs: Sequence[Node], constants: dict[str, Any]
    ) -> list[Node]:
        """The results of a part, in order, after what it does was added to ``graph``."""
        path = self._paths[call.part]
        if isinstance(call.part, CompiledModule):
            return self._inlined(graph, path, call.part, inputs, constants)
        constants[path] = call.part
        node, results = _layer_called(graph, path, call, inputs)
        node.meta["layer"] = path
        return results

    def _inlined(
        self,
        graph: Graph,
        path: str,
        part: CompiledModule,
        inputs: Sequence[Node],
        constants: dict[str, Any],
    ) -> list[Node]:
        """The nodes of a compiled part in ``graph``, and its results."""
        own = part.graph_module
        inner: dict[Node, Node] = {}
        given = iter(inputs)
        for node in own.graph.nodes:
            if node.op == "placeholder":
                inner[node] = next(given)
            elif node.op != "output":
                inner[node] = graph.node_copy(node, lambda n: inner[n])
                inner[node].meta = {**node.meta, "layer": f"{path}.{label(node)}"}
                if node.op in ("get_attr", "call_module"):
                    target = f"{path}.{node.target}"
                    inner[node].target = target
                    constants[target] = attribute(own, str(node.target))
        return [inner[node] for node in output_of(own.graph)[1]]


def _layer_called(
    graph: Graph, path: str, call: PartCall, inputs: Sequence[Node]
) -> tuple[Node, list[Node]]:
    """A call of the layer at ``path`` as it was seen, and its tensors in order."""
    args, kwargs = call.called.fill(inputs)
    node = graph.call_module(path, args, kwargs)
    assert call.result is not None
    return node, _items(graph, node, call.result)


def _items(graph: Graph, node: Node, structure: Structure) -> list[Node]:
    """The tensors of ``structure``, which ``node`` returns, in order."""
    if structure.kind is None:
        return [node]
    return [
        leaf
        for number, part in enumerate(structure.parts)
        for leaf in _items(graph, graph.call_function(operator.getitem, (node, number)), part)
    ]


def _copied(graph: Graph, node: Node, values: dict[Node, Any]) -> Node:
    new = graph.node_copy(node, lambda n: values[n])
    new.meta = {}
    if node.op != "get_attr" and (layer := _PREFIX.sub("", exported_layer(node))):
        new.meta["layer"] = layer
    own = own_call(new)
    if own is not None:  # the runtime reads arguments of our ops by name
        new.args, new.kwargs = (), own[1]
    return new


def _graph_module(constants: Mapping[str, Any], graph: Graph) -> GraphModule:
    """A graph module of its own with ``constants`` by path."""
    root = nn.Module()
    for path, value in constants.items():
        *parents, name = path.split(".")
        home = root
        for parent in parents:
            if parent not in home._modules:
                home.add_module(parent, nn.Module())
            home = home.get_submodule(parent)
        if isinstance(value, torch.Tensor):
            home.register_buffer(name, value.detach())
        else:
            setattr(home, name, value)
    gm = GraphModule(root, graph, class_name="CapturedGraph").eval()
    gm.graph.eliminate_dead_code()
    gm.recompile()
    return gm
