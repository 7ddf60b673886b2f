"""One try to export a module as a graph, with its compiled parts put back in their places."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.export import Dim, ExportedProgram
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental import _config as symbolic_config

from x86quant.artifacts.capture.opaque_parts import (
    SEEN,
    OpaquePart,
    PartCall,
    calls_seen,
    is_part,
    thawed,
)
from x86quant.artifacts.records.modules import hooks_within
from x86quant.calling.flat_call import FlatCall
from x86quant.calling.state import with_shared_tensors
from x86quant.compiled import CompiledModule, GuardedModule
from x86quant.errors import ArtifactError, UnsupportedError, X86QuantError
from x86quant.forms.call_form import CallForm, Structure, take_apart
from x86quant.forms.exported_guard import guard_of
from x86quant.lowering import FloatNode
from x86quant.lowering.from_export import exported_layer
from x86quant.lowering.functional import functionalized
from x86quant.lowering.graph_tools import attribute, label, own_call
from x86quant.lowering.lower import computes_in_float
from x86quant.lowering.passes import Report
from x86quant.terminal.silence import silent

_PREFIX = re.compile(r"^inner(\.|$)")


class ExportTry:
    """One try to export a model."""

    def __init__(self, model: nn.Module, form: CallForm, leaves: Sequence[torch.Tensor]) -> None:
        self._form = form
        self._leaves = leaves
        found = {m: path for path, m in model.named_modules() if is_part(m)}
        self._parts = [part for part in found if isinstance(part, CompiledModule)]
        self._paths = found
        if hooked := [path for part, path in found.items() if hooks_within(part)]:
            raise ArtifactError(f"the hooks of {hooked[0]} have no form in a file: remove them")
        # A copy of the structure alone, with the same tensors.
        memo: dict[int, Any] = {id(part): OpaquePart(part) for part in found}
        try:
            self._flat = FlatCall(with_shared_tensors(model, memo), form, hooks=True).eval()
        except (TypeError, RuntimeError) as error:
            raise ArtifactError(f"{type(model).__name__} cannot be copied: {error}") from error

    def guarded(self, is_free: Callable[[int], bool]) -> GuardedModule:
        """The graph, with the sizes free that ``is_free`` allows."""
        program = self._exported(is_free)
        _check_pure(program)
        flat = program.module(check_guards=False)
        assert isinstance(flat, GraphModule)
        gm = self._put_back(flat)
        try:
            guard = guard_of(program, self._form.names, self._leaves, doubts_one=False)
        except UnsupportedError as error:
            raise ArtifactError(str(error)) from error
        compiled = CompiledModule(gm, _joined(self._parts), _float_nodes(gm))
        return GuardedModule(compiled, None, self._form, self._flat.results, guard, strict=True)

    def _exported(self, is_free: Callable[[int], bool]) -> ExportedProgram:
        shapes = tuple(
            {dim: Dim.AUTO if is_free(dim) else Dim.STATIC for dim in range(x.dim())}
            for x in self._leaves
        )
        try:
            with (
                calls_seen(),
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
                found = functionalized(program)
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
        names = iter(self._form.names)
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
        args, kwargs = call.called.fill(inputs)
        node = graph.call_module(path, args, kwargs)
        node.meta["layer"] = path
        assert call.result is not None
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
        return [inner[node] for node in _results_of(own)]


def _items(graph: Graph, node: Node, structure: Structure) -> list[Node]:
    """The tensors of ``structure``, which ``node`` returns, in order."""
    if structure.kind is None:
        return [node]
    return [
        leaf
        for number, part in enumerate(structure.parts)
        for leaf in _items(graph, graph.call_function(operator.getitem, (node, number)), part)
    ]


def _results_of(gm: GraphModule) -> list[Node]:
    """The nodes in what a graph returns, in order."""
    (output,) = (node for node in gm.graph.nodes if node.op == "output")
    return take_apart(thawed(output.args[0]), lambda x: isinstance(x, Node))[1]


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
