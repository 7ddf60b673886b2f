"""A module and one call of it as a graph whose sizes stay free, by torch.export.

Compiled parts of the module are opaque to export, and put back as they were afterwards: their
graphs, with all that is known of each node, become part of the one graph. What export took for
granted about sizes becomes conditions that every call is checked against.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import dataclasses
import operator
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch._guards import detect_fake_mode
from torch.export import Dim, ExportedProgram
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental import _config as symbolic_config

from x86quant.artifacts import size_conditions
from x86quant.artifacts.modules import hooks_within
from x86quant.artifacts.saved import SavedBySizes, SavedModule
from x86quant.artifacts.signatures import Signature, call_of, split_result
from x86quant.artifacts.size_conditions import Condition, excludes_one
from x86quant.artifacts.structures import Leaf, fill, split
from x86quant.compiled import CompiledModule
from x86quant.compiled.structure import is_tensor
from x86quant.dynamic.recurrent import DynamicLSTM, DynamicRecurrent
from x86quant.errors import ArtifactError, InvalidInputError, X86QuantError
from x86quant.lowering import FloatNode
from x86quant.lowering.from_export import exported_layer
from x86quant.lowering.graph_tools import attribute, label, own_call
from x86quant.lowering.lower import computes_in_float
from x86quant.lowering.passes import Report
from x86quant.terminal.silence import silent

#: Graphs for other branches that a model takes by its sizes.
_MOST_GRAPHS = 4

#: What stays free of an input's sizes, from most to least: all, the first, none.
_FREE: tuple[Callable[[int], bool], ...] = (lambda _: True, lambda dim: dim == 0, lambda _: False)

_PREFIX = re.compile(r"^model(\.|$)")
#: The parts of the model that is being exported in this thread, and what its result looked like.
_SEEN = threading.local()


def capture(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[SavedModule | SavedBySizes, str]:
    """``model`` as a graph for calls like ``model(*args, **kwargs)``, with as free sizes as can be.

    The graph gives the very results of ``model``, also at other sizes than the example's. Where
    the model branches on a size, the other branches are graphs of their own.

    Returns:
        The graph or graphs, and of which sizes that the model takes they do not; empty if of none.

    Raises:
        ArtifactError: no graph does what the model does; says why.
    """
    signature, leaves = call_of(model, args, kwargs)
    found = [_captured(model, signature, leaves, _of_two(leaves))]
    missing = ""
    for tried in _resizings(leaves):
        if _is_odd(leaves, tried) or any(saved.takes(tried) for saved in found):
            continue
        if not _runs(model, signature, tried):
            continue
        if len(found) < _MOST_GRAPHS and _is_branch(found[0], tried):
            with contextlib.suppress(ArtifactError, InvalidInputError):
                found.append(_captured(model, signature, tried, tried))
                continue
        missing = missing or f"its graph does not hold for inputs of {_shapes(tried)}"
    return found[0] if len(found) == 1 else SavedBySizes(found), missing


def _captured(
    model: nn.Module,
    signature: Signature,
    leaves: Sequence[torch.Tensor],
    exported: Sequence[torch.Tensor],
) -> SavedModule:
    """One graph, from ``exported``, which may be ``leaves`` of two rows instead of one."""
    reasons: list[str] = []
    for is_free in _FREE:
        try:
            saved = _Capture(model, signature, exported).saved(is_free)
            saved = _with_ones(model, saved, leaves)
            _compare(model, saved, leaves)
        except ArtifactError as error:
            reasons.append(str(error))
            continue
        return saved
    raise ArtifactError(reasons[-1])


def _is_odd(leaves: Sequence[torch.Tensor], tried: Sequence[torch.Tensor]) -> bool:
    """Whether an image or sequence of several places now has one, which nobody needs."""
    pairs = [(x, y) for x, y in zip(leaves, tried, strict=True) if x.dim() > 2]
    return any(1 in y.shape[2:] and 1 not in x.shape[2:] for x, y in pairs)


def _runs(model: nn.Module, signature: Signature, leaves: Sequence[torch.Tensor]) -> bool:
    """Whether ``model`` takes inputs of these sizes."""
    args, kwargs = signature.example(leaves)
    try:
        with torch.no_grad():
            model(*args, **kwargs)
    except Exception:  # whatever the model's own code raises
        return False
    return True


def _is_branch(saved: SavedModule, leaves: Sequence[torch.Tensor]) -> bool:
    """Whether the graph excludes these sizes by a comparison, not because they are constants."""
    shapes = [x.shape for x in leaves]
    failing = [c for c in saved.signature.conditions if not size_conditions.holds(c, shapes)]
    return not any(c[0] == "==" and isinstance(c[2], int) for c in failing)


def _of_two(leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """``leaves`` with two rows where they have one: export would take one for a constant."""
    rows = {x.shape[0] if x.dim() else None for x in leaves}
    return [torch.cat([x, x]) for x in leaves] if rows == {1} else list(leaves)


class _Flat(nn.Module):
    """Takes the tensors of a call one by one and returns those of the result."""

    def __init__(self, model: nn.Module, signature: Signature) -> None:
        super().__init__()
        self.model = model
        self._signature = signature

    def forward(self, *leaves: torch.Tensor) -> Any:
        args, kwargs = self._signature.example(leaves)
        result = self.model(*args, **kwargs)
        _SEEN.result, found = split_result(result)  # not kept here: export undoes what it changes
        return tuple(found)


class _Part(nn.Module):
    """Stands for a compiled part, or a recurrent layer, while its surroundings are exported."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        # Not a child: export would take its tensors apart.
        self._hidden = [part]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        part = self._hidden[0]
        tensors: list[torch.Tensor] = []
        called = split((args, kwargs), tensors, is_tensor, "an argument of a part")
        # Its result's structure is known once the fake kernel has run.
        seen = _PartCall(part, called)
        _SEEN.calls.append(seen)
        outputs = torch.ops.x86quant_artifacts.part(list(tensors), len(_SEEN.calls) - 1)
        return fill(seen.result, outputs)


@dataclasses.dataclass
class _PartCall:
    """One call of a part: the part, its arguments, and what it returns, as structures."""

    part: nn.Module
    called: Any
    result: Any = None


def _is_part(module: nn.Module) -> bool:
    return isinstance(module, CompiledModule | nn.RNNBase | DynamicRecurrent)


def _result_of(gm: GraphModule) -> tuple[Any, list[Node]]:
    """The structure of what a graph returns, and the nodes in it."""
    (output,) = (node for node in gm.graph.nodes if node.op == "output")
    nodes: list[Node] = []
    value = _thawed(output.args[0])
    return split(value, nodes, lambda x: isinstance(x, Node), "its result"), nodes


def _thawed(value: Any) -> Any:
    """``value`` with plain containers in place of a graph's immutable ones."""
    if isinstance(value, tuple):
        return tuple(map(_thawed, value))
    if isinstance(value, list):
        return [_thawed(item) for item in value]
    if isinstance(value, dict):
        return {key: _thawed(item) for key, item in value.items()}
    return value


@torch.library.custom_op("x86quant_artifacts::part", mutates_args=())
def _part(inputs: list[torch.Tensor], number: int) -> list[torch.Tensor]:
    raise AssertionError("it stands for a part while a model is exported, and never runs")


@_part.register_fake
def _(inputs: list[torch.Tensor], number: int) -> list[torch.Tensor]:
    seen: _PartCall = _SEEN.calls[number]
    args, kwargs = fill(seen.called, inputs)
    if isinstance(seen.part, CompiledModule):
        result = _fake_graph(seen.part.graph_module, args)
    else:
        result = _fake_recurrent(seen.part, *args, **kwargs)
    found: list[torch.Tensor] = []
    seen.result = split(result, found, is_tensor, "its result")
    return [x.clone() if any(x is y for y in inputs) else x for x in found]


def _fake_graph(gm: GraphModule, inputs: tuple[Any, ...]) -> Any:
    fake = detect_fake_mode(inputs)
    assert fake is not None
    tensors = {**dict(gm.named_parameters()), **dict(gm.named_buffers())}
    state: dict[str, torch.Tensor] = {
        k: fake.from_tensor(v, static_shapes=True) for k, v in tensors.items()
    }
    return _thawed(torch.func.functional_call(gm, state, inputs))


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


class _Capture:
    """One try to export a model."""

    def __init__(
        self, model: nn.Module, signature: Signature, leaves: Sequence[torch.Tensor]
    ) -> None:
        self._signature = signature
        self._leaves = leaves
        found = {m: path for path, m in model.named_modules() if _is_part(m)}
        self._parts = [part for part in found if isinstance(part, CompiledModule)]
        self._paths = found
        if hooked := [path for part, path in found.items() if hooks_within(part)]:
            raise ArtifactError(f"the hooks of {hooked[0]} have no form in a file: remove them")
        # A copy of the structure alone, with the same tensors.
        memo: dict[int, Any] = {id(part): _Part(part) for part in found}
        memo |= {id(t): t for t in (*model.parameters(), *model.buffers())}
        try:
            self._flat = _Flat(copy.deepcopy(model, memo), signature).eval()
        except (TypeError, RuntimeError) as error:
            raise ArtifactError(f"{type(model).__name__} cannot be copied: {error}") from error

    def saved(self, is_free: Callable[[int], bool]) -> SavedModule:
        """The graph, with the sizes free that ``is_free`` allows."""
        program = self._exported(is_free)
        _check_pure(program)
        flat = program.module(check_guards=False)
        assert isinstance(flat, GraphModule)
        gm = self._put_back(flat)
        conditions = _conditions(program, len(self._leaves))
        signature = dataclasses.replace(self._signature, result=_SEEN.result, conditions=conditions)
        return SavedModule(gm, _joined(self._parts), _float_nodes(gm), signature)

    def _exported(self, is_free: Callable[[int], bool]) -> ExportedProgram:
        shapes = tuple(
            {dim: Dim.AUTO if is_free(dim) else Dim.STATIC for dim in range(x.dim())}
            for x in self._leaves
        )
        try:
            with (
                _calls_seen(),
                torch.no_grad(),
                silent(),
                # One and zero are sizes like others: no branch for them is taken unseen.
                symbolic_config.patch(  # type: ignore[attr-defined]
                    backed_size_oblivious=True
                ),
            ):
                program: ExportedProgram = torch.export.export(
                    self._flat, tuple(self._leaves), dynamic_shapes=(shapes,), strict=False
                )
                # Without decompositions this only makes ops that write in place ones that do not.
                found: ExportedProgram = program.run_decompositions({})
        except X86QuantError as error:
            raise ArtifactError(str(error)) from error
        # Export wraps and raises nearly anything, among it errors of the model's own code.
        except Exception as error:
            lines = str(error).strip().splitlines() or [""]
            raise ArtifactError(
                f"torch.export fails with {type(error).__name__}: {lines[0][:200]}"
            ) from error
        return found

    def _put_back(self, flat: GraphModule) -> GraphModule:
        """The exported graph with the graphs of the parts in it, and named inputs."""
        graph = Graph()
        constants: dict[str, Any] = {}
        values: dict[Node, Any] = {}
        results: dict[Node, Any] = {}  # of the parts
        names = iter(self._signature.names)
        leaves = iter(self._leaves)
        for node in flat.graph.nodes:
            if node.op == "placeholder":
                new = graph.placeholder(next(names))
                example = next(leaves)
                new.meta.update(shape=tuple(example.shape), input_dtype=example.dtype)
                values[node] = new
            elif node.op == "output":
                graph.output(torch.fx.node.map_arg(node.args[0], lambda n: values[n]))
            elif node.target is torch.ops.x86quant_artifacts.part.default:
                inputs, number = node.args
                called = [values[x] for x in inputs]
                results[node] = self._called(graph, _SEEN.calls[number], called, constants)
            elif node.args and isinstance(node.args[0], Node) and node.args[0] in results:
                values[node] = results[node.args[0]][node.args[1]]
            else:
                values[node] = _copied(graph, node, values)
                if node.op == "get_attr":
                    path = _PREFIX.sub("", str(node.target)) or "model"
                    values[node].target = path
                    constants[path] = attribute(flat, str(node.target))
        return _graph_module(constants, graph)

    def _called(
        self, graph: Graph, call: _PartCall, inputs: Sequence[Node], constants: dict[str, Any]
    ) -> list[Node]:
        """The results of a part, in order, after what it does was added to ``graph``."""
        path = self._paths[call.part]
        if isinstance(call.part, CompiledModule):
            return self._inlined(graph, path, call.part, inputs, constants)
        constants[path] = call.part
        args, kwargs = fill(call.called, inputs)
        node = graph.call_module(path, args, kwargs)
        node.meta["layer"] = path
        return _items(graph, node, call.result)

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
        return [inner[node] for node in _result_of(own)[1]]


def _items(graph: Graph, node: Node, structure: Any) -> list[Node]:
    """The leaves of ``structure``, which ``node`` returns, in order."""
    if isinstance(structure, Leaf):
        return [node]
    return [
        leaf
        for number, part in enumerate(structure)
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


def _check_pure(program: ExportedProgram) -> None:
    signature = program.graph_signature
    changed = [*signature.buffers_to_mutate.values(), *signature.user_inputs_to_mutate.values()]
    if changed:
        raise ArtifactError(f"a call changes {', '.join(changed)}")


def _joined(parts: Sequence[CompiledModule]) -> tuple[Report, ...]:
    """What each pass did to all parts together."""
    found: dict[str, Report] = {}
    for report in (report for part in parts for report in part.reports):
        before = found.get(report.name)
        changed = report.changed + (before.changed if before else 0)
        found[report.name] = Report(report.name, changed, report.description)
    return tuple(found.values())


def _float_nodes(gm: GraphModule) -> tuple[FloatNode, ...]:
    return tuple(FloatNode.of(gm, node) for node in gm.graph.nodes if computes_in_float(node))


# --- sizes -----------------------------------------------------------------------------------


def _conditions(program: ExportedProgram, inputs: int) -> tuple[Condition, ...]:
    """What export took for granted about sizes.

    Raises:
        ArtifactError: a condition has no form in a file.
    """
    found: dict[str, Condition] = {}

    def add(condition: Condition) -> None:
        found.setdefault(str(condition), condition)

    places: dict[str, Condition] = {}
    placeholders = [n for n in program.graph.nodes if n.op == "placeholder"][-inputs:]
    ranges = {str(symbol): bounds for symbol, bounds in program.range_constraints.items()}
    for number, node in enumerate(placeholders):
        for dim, size in enumerate(node.meta["val"].shape):
            here = ["size", number, dim]
            name = str(size)
            if isinstance(size, int):
                add(["==", here, size])
            elif name in places:
                add(["==", here, places[name]])
            elif size.node.expr.is_symbol:
                places[name] = here
                if name in ranges:
                    least, most = (_finite(b) for b in (ranges[name].lower, ranges[name].upper))
                    if least:
                        add([">=", here, least])
                    if most is not None:
                        add(["<=", here, most])
    for code in program._guards_code or ():
        condition = size_conditions.parse(code, _place_of)
        if condition is None:
            raise ArtifactError(f"a condition on its sizes has no form in a file: {code[:200]}")
        add(condition)
    return size_conditions.check(list(found.values()), inputs)


def _finite(bound: Any) -> int | None:
    return int(bound) if bound.is_Integer else None


def _place_of(node: ast.AST) -> int | None:
    """The number of the input that export calls ``L['leaves'][3]``."""
    if not isinstance(node, ast.Subscript) or not isinstance(node.slice, ast.Constant):
        return None
    number = node.slice.value
    return number if isinstance(node.value, ast.Subscript) and type(number) is int else None


# --- comparing -------------------------------------------------------------------------------


def _compare(model: nn.Module, saved: SavedModule, leaves: Sequence[torch.Tensor]) -> None:
    """Raise ArtifactError unless ``saved`` gives the results of ``model``, at any size tried."""
    for tried in _variants(saved, leaves):
        try:
            _compare_one(model, saved, tried)
        except InvalidInputError:
            if tried is leaves:
                raise ArtifactError("its graph refuses the example") from None


def _compare_one(model: nn.Module, saved: SavedModule, leaves: Sequence[torch.Tensor]) -> None:
    """Raise ArtifactError unless ``saved`` does with ``leaves`` what ``model`` does.

    What ``model`` itself refuses ``saved`` may refuse in other words.
    """
    args, kwargs = saved.signature.example(leaves)
    with torch.no_grad():
        try:
            expected = model(*args, **kwargs)
        except Exception as error:  # whatever the model's own code raises for such sizes
            raise InvalidInputError(str(error)) from error
        try:
            found = saved(*args, **kwargs)
        except InvalidInputError:
            raise
        except Exception as error:
            raise ArtifactError(
                f"its graph fails on inputs of {_shapes(leaves)}: {error}"
            ) from error
    if not same_results(expected, found):
        raise ArtifactError(f"its graph gives other results on inputs of {_shapes(leaves)}")


def _with_ones(model: nn.Module, saved: SavedModule, leaves: Sequence[torch.Tensor]) -> SavedModule:
    """``saved`` without the conditions that a size is not one, where it holds for one as well.

    Export asks whether a size is one to know whether memory is contiguous; hardly any model does.
    A model that does gives another result here.
    """
    for condition in filter(excludes_one, saved.signature.conditions):
        _, number, dim = condition[1]
        size = leaves[number].shape[dim]
        tried = [_resized(x, {dim}, size, 1) for x in leaves]
        # Sizes that must be equal become one together.
        ones = [
            ["size", i, d] for i, x in enumerate(tried) for d, n in enumerate(x.shape) if n == 1
        ]
        wider = saved.with_ones(ones)
        if not wider.takes(tried):
            continue
        try:
            _compare_one(model, wider, tried)
        except X86QuantError:
            continue
        saved = wider
    return saved


def _variants(
    saved: SavedModule, leaves: Sequence[torch.Tensor]
) -> Iterator[Sequence[torch.Tensor]]:
    """``leaves``, and such of other sizes that the conditions allow."""
    yield leaves
    yield from filter(saved.takes, _resizings(leaves))


def _resizings(leaves: Sequence[torch.Tensor]) -> Iterator[Sequence[torch.Tensor]]:
    """``leaves`` with each of their sizes changed in turn, in one dimension and in all of them."""
    sizes = sorted({(dim, size) for x in leaves for dim, size in enumerate(x.shape) if size})
    for dim, size in sizes:
        for other in dict.fromkeys((1, size + 1, size - 1, 2 * size)):
            if other < 1 or other == size:
                continue
            alone = [_resized(x, {dim}, size, other) for x in leaves]
            everywhere = [_resized(x, set(range(x.dim())), size, other) for x in leaves]
            yield alone
            if [x.shape for x in alone] != [x.shape for x in everywhere]:
                yield everywhere


def _resized(x: torch.Tensor, dims: set[int], size: int, other: int) -> torch.Tensor:
    """``x`` repeated or cut from ``size`` to ``other`` along those of ``dims`` that have it."""
    for dim in dims:
        if dim < x.dim() and x.shape[dim] == size:
            x = x.index_select(dim, torch.arange(other) % size)
    return x


def _shapes(leaves: Sequence[torch.Tensor]) -> str:
    return ", ".join(str(tuple(x.shape)) for x in leaves)


def same_results(one: Any, other: Any) -> bool:
    """Whether two results have equal structures, and equal values up to float rounding."""
    (a, xs), (b, ys) = split_result(one), split_result(other)
    return _alike(a, b) and len(xs) == len(ys) and all(map(_equal, xs, ys))


def _alike(a: Any, b: Any) -> bool:
    return type(a) is type(b) and a == b


#: Float products of torch may add up in another order from call to call.
_ROUNDING = 1e-5


def _equal(a: Any, b: Any) -> bool:
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return bool(a == b)
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if not a.is_floating_point() or torch.equal(a, b):
        return torch.equal(a, b)
    largest = float(a.nan_to_num(0.0, 0.0, 0.0).abs().max())
    return torch.allclose(a, b, rtol=0.0, atol=_ROUNDING * largest, equal_nan=True)


@contextlib.contextmanager
def _calls_seen() -> Iterator[None]:
    """A block in which calls of parts are noted."""
    _SEEN.calls = []
    yield
