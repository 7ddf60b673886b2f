"""A float module as one graph of tensors: by torch.fx, or else by torch.export."""

from __future__ import annotations

import contextlib
import functools
import operator
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.fx import GraphModule, Node, Proxy
from torch.fx.proxy import TraceError
from torch.nn.utils.fusion import fuse_conv_bn_eval, fuse_linear_bn_eval

from x86quant.calling.call import Call
from x86quant.calling.state import deep_copy
from x86quant.capture.caught_errors import errors_are_caught
from x86quant.capture.exported import every_size, exported, first_size, no_size, two_rows
from x86quant.capture.opaque_parts import recurrent_opaque
from x86quant.capture.traced_graph import Traced
from x86quant.dynamic import DynamicMultiheadAttention, Int8Linear
from x86quant.errors import UnsupportedError, first_line
from x86quant.forms.call_form import CallForm, Structure, is_tensor, take_apart
from x86quant.forms.guard import Guard, GuardedInput
from x86quant.lowering.from_export import exported_layer
from x86quant.lowering.graph_tools import plain_name
from x86quant.lowering.mutation import without_mutations
from x86quant.quantization.tracing.channel_norms import spell_channel_norms
from x86quant.quantization.tracing.computed_weights import fold_constants
from x86quant.quantization.tracing.constant_products import spell_as_linears
from x86quant.quantization.tracing.exported_programs import FIXED_SIZES
from x86quant.quantization.tracing.known_ranks import BY_SIZE, RankedTracer
from x86quant.quantization.tracing.maxima import spell_maxima
from x86quant.quantization.tracing.norms_of_rows import fold_norms_of_rows
from x86quant.quantization.tracing.recommenders import recognise_recommender
from x86quant.quantization.tracing.recurrent_layers import part_recurrent
from x86quant.quantization.tracing.spelled_attention import spell_attention
from x86quant.quantization.tracing.spelled_ops import (
    spell,
    spell_batch_norms,
    spell_convolutions,
)
from x86quant.quantization.tracing.sums import spell_sums

_CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_WEIGHTED = (nn.Linear, *_CONVS, *_TRANSPOSED)
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)

#: Spellings that stock quantization does not know how to fuse.
_FUNCTIONS: dict[Any, Callable[..., Any]] = {torch.relu: F.relu}
_METHODS: dict[str, Callable[..., Any]] = {
    "relu": F.relu,
    "add": torch.add,
    "mul": torch.mul,
    "matmul": torch.matmul,
    "flatten": torch.flatten,
}
_PRODUCTS = frozenset([operator.mul, torch.mul, torch.ops.aten.mul.Tensor])
_QUOTIENTS = frozenset([operator.truediv, torch.div, torch.ops.aten.div.Tensor, "div"])
#: What gives a tensor of its own.
_MADE_ANEW = frozenset(["add", "matmul", "mul", "reciprocal", "sub"])
#: Layers that do nothing in evaluation mode.
_IDENTITIES = (nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)


#: From a module, an example of its calls, and perhaps a smaller one.
Way = Callable[[nn.Module, Call, Call | None], Traced]


def by_fx(module: nn.Module, example: Call, small: Call | None = None) -> Traced:
    """``module``, in evaluation mode, as torch.fx traces it, without writes in place.

    These are seen in a run on ``small``, if the graph holds for that, else on ``example``.

    Raises:
        UnsupportedError: it cannot be traced; says why.
    """
    form, leaves = CallForm.of(module, example.args, example.kwargs)
    tracer = _LayerTracer(form, leaves)
    try:
        graph = tracer.trace(module)
        if tracer.catches:
            raise UnsupportedError("its code catches errors, and goes on in another way then")
        gm = GraphModule(module, graph)
        for node in graph.nodes:
            node.meta["scope"] = tracer.node_name_to_scope[node.name][0]
        spell_batch_norms(gm, module)
        guard = _guard(form, leaves, tracer)
        inputs = leaves if small is None else _held_for(form, guard, small) or leaves
        gm = without_mutations(gm, inputs, compare=False)  # what is traced is proved
    except UnsupportedError as error:
        raise UnsupportedError(f"torch.fx: {error}") from error
    except Exception as error:  # tracing runs the user's own code, which may raise anything
        raise UnsupportedError(f"torch.fx cannot trace it ({_told(error)})") from error
    assert tracer.results is not None
    return Traced(gm, form, tracer.results, guard, "torch.fx")


def _told(error: Exception) -> str:
    """What ``error`` says of the traced code, in words where torch speaks of its own."""
    by_values = isinstance(error, TraceError) and "control flow" in str(error)
    return (
        "its code goes one way or another by values of tensors" if by_values else first_line(error)
    )


def _guard(form: CallForm, leaves: Sequence[torch.Tensor], tracer: RankedTracer) -> Guard:
    """What ``tracer`` had to assume of inputs such as ``leaves``."""
    fixed: list[list[tuple[int, int]]] = [[] for _ in leaves]
    for number, sizes in enumerate(_fixed_by_export(tracer.root, len(leaves))):
        fixed[number] += sizes
    for (number, dim), size in sorted(tracer.fixed.items()):
        if (dim, size) not in fixed[number]:
            fixed[number].append((dim, size))
    inputs = tuple(
        GuardedInput(name, x.dtype, x.dim(), tuple(sizes))
        for name, x, sizes in zip(form.names, leaves, fixed, strict=True)
    )
    return Guard(inputs, tracer.conditions)


def _fixed_by_export(root: object, inputs: int) -> list[tuple[tuple[int, int], ...]]:
    """The sizes that ``root`` was exported for alone, if it was."""
    nodes = root.graph.find_nodes(op="placeholder") if isinstance(root, GraphModule) else ()
    found = [node.meta.get(FIXED_SIZES, ()) for node in nodes]
    return found if len(found) == inputs else []


def _held_for(form: CallForm, guard: Guard, call: Call) -> list[torch.Tensor] | None:
    """The tensors of ``call``, if a graph with this guard holds for them."""
    tensors = form.tensors(call.args, call.kwargs)
    if tensors is None or guard.refusal(tensors) is not None:
        return None
    return tensors


def by_export(module: nn.Module, example: Call, _: Call | None = None) -> Traced:
    """``module``, in evaluation mode, as torch.export traces it, with sizes free where it can.

    Raises:
        UnsupportedError: it cannot be traced; says why.
    """
    form, leaves = CallForm.of(module, example.args, example.kwargs)
    with recurrent_opaque(module) as (surroundings, put_back):

        def spelled(gm: GraphModule) -> None:
            put_back(gm)
            _spelled(gm)

        return exported(surroundings, form, leaves, (every_size, first_size, no_size), spelled)


def _spelled(gm: GraphModule) -> None:
    for node in list(gm.graph.nodes):
        if node.op == "call_function":
            node.meta["scope"] = exported_layer(node).removeprefix("inner").removeprefix(".")
            spell(gm, node, "inner.")
    gm.graph.eliminate_dead_code()
    gm.recompile()


#: By method, from the one that keeps most of a module's structure to the one that follows most
#: code.
WAYS: Mapping[str, Way] = {"torch.fx": by_fx, "torch.export": by_export}


def _inputs(found: Traced, example: Call) -> list[torch.Tensor]:
    """What the graph takes of ``example``; of a single row two, where that is yet to be proved."""
    tensors = found.form.tensors(example.args, example.kwargs)
    twice = [] if tensors is None else two_rows(tensors)
    if tensors is None or found.guard.refusal(twice) is not None:
        return found.tensors(example)
    return twice


def trace(
    module: nn.Module, example: Call, way: Way | None = None, small: Call | None = None
) -> Traced:
    """``module`` by ``way``, or the first that can, spelled for stock quantization."""
    reasons = []
    for one in WAYS.values() if way is None else (way,):
        try:
            found = one(module, example, small)
        except UnsupportedError as error:
            reasons.append(str(error))
            continue
        if (node := _read_from_memory(found.graph_module)) is not None:
            raise UnsupportedError(
                f"{node.name} depends on how a tensor lies in memory, and in int8 it lies "
                "otherwise; call contiguous() on the tensor first"
            )
        fold_constants(found.graph_module)
        seen = functools.partial(_inputs, found, example)
        with _errors_of_its_graph(found):
            spell_channel_norms(found.graph_module, seen)
        spell_convolutions(found.graph_module, module)
        normalize(found.graph_module)
        fold_batch_norms(found.graph_module)
        with _errors_of_its_graph(found):
            fold_norms_of_rows(found.graph_module, seen)
            spell_attention(found.graph_module, seen)
            recognise_recommender(found.graph_module, seen())
            spell_sums(found.graph_module, seen)
        spell_as_linears(found.graph_module)
        spell_maxima(found.graph_module)
        part_recurrent(found.graph_module)
        _part_shared(found.graph_module)
        found.graph_module.recompile()
        return found
    raise UnsupportedError("; ".join(reasons))


@contextlib.contextmanager
def _errors_of_its_graph(found: Traced) -> Iterator[None]:
    """Passes within run the graph: where it fails, the module may have caught an error."""
    try:
        yield
    except UnsupportedError:
        raise
    except Exception as error:
        raise UnsupportedError(
            f"the graph of {found.method} fails where the module does not ({first_line(error)})"
        ) from error


#: What sees how its first argument lies in memory.
_READS = frozenset(["as_strided", "as_strided_", "is_contiguous", "storage_offset", "stride"])


def _read_from_memory(gm: GraphModule) -> Node | None:
    """The first node that sees how a tensor lies in memory, where the code does not say how."""
    for node in gm.graph.nodes:
        if not node.op.startswith("call_") or plain_name(node) not in _READS:
            continue
        read = node.args[0] if node.args else node.kwargs.get("input")
        if not isinstance(read, Node) or plain_name(read) != "contiguous":
            found: Node = node
            return found
    return None


def has_ranks_by_size(gm: GraphModule) -> bool:
    """Whether the ranks of what ``gm`` computes depend on sizes."""
    return any(n.op.startswith("call_") and plain_name(n) in BY_SIZE for n in gm.graph.nodes)


class _LayerTracer(RankedTracer):
    """Sees through everything but torch's own layers and x86quant's.

    Attributes:
        results: the structure of the traced function's result.
        catches: whether the code would catch what an op may raise at other sizes.
    """

    def __init__(self, form: CallForm, example: Sequence[torch.Tensor]) -> None:
        super().__init__(example)
        self.catches = False
        self.results: Structure | None = None
        self._form = form
        self._thread = threading.get_ident()

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if isinstance(m, Int8Linear | DynamicMultiheadAttention):
            return True
        return super().is_leaf_module(m, module_qualified_name)

    def create_node(self, *args: Any, **kwargs: Any) -> Node:
        """A node of the graph."""
        # Not raised here, where that code would catch it.
        self.catches = self.catches or (not self.computes and errors_are_caught(sys._getframe(1)))
        return super().create_node(*args, **kwargs)

    def call_module(
        self,
        m: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        # torch.fx patches modules for every thread.
        if threading.get_ident() != self._thread or self.computes:
            return forward(*args, **kwargs)
        return super().call_module(m, forward, args, kwargs)

    def create_args_for_root(
        self,
        root_fn: Any,
        is_module: bool,
        concrete_args: dict[str, Any] | tuple[Any, ...] | None = None,
    ) -> tuple[Any, list[Any]]:
        """A placeholder for each tensor; whatever else was given is a constant."""
        inputs = [self.create_proxy("placeholder", name, (), {}) for name in self._form.names]
        args, kwargs = self._form.call(inputs)

        def run() -> tuple[Any, ...]:
            result = root_fn(self.root, *args, **kwargs)
            self.results, leaves = take_apart(result, _is_traced)
            return tuple(leaves)

        return run, []


def _is_traced(value: object) -> bool:
    return isinstance(value, Proxy) or is_tensor(value)


def normalize(gm: GraphModule) -> None:
    """Spell functions the way stock quantization knows and fuses them; not yet recompiled."""
    modules = dict(gm.named_modules(remove_duplicate=False))
    for node in list(gm.graph.nodes):
        if node.op == "call_module":
            _normalize_module(gm, node, modules[str(node.target)])
        if node.op == "call_function" and node.target in _FUNCTIONS:
            node.target = _FUNCTIONS[node.target]
        elif node.op == "call_method" and node.target in _METHODS:
            node.op, node.target = "call_function", _METHODS[node.target]
        if (same := _times_one(node)) is not None:
            node.replace_all_uses_with(same)
            gm.graph.erase_node(node)
    gm.delete_all_unused_submodules()


def _times_one(node: Node) -> Node | None:
    """What ``node`` multiplies by one, or divides by it: by a factor of a configuration, say.

    Where nobody else holds that: a result may not be the memory of an input, or of another result.
    """
    if len(node.args) != 2 or node.kwargs:
        return None
    x, factor = node.args
    if node.target in _PRODUCTS and not isinstance(x, Node):
        x, factor = factor, x
    known = node.target in _PRODUCTS or node.target in _QUOTIENTS
    if not known or type(factor) not in (int, float) or factor != 1 or not isinstance(x, Node):
        return None
    return x if plain_name(x) in _MADE_ANEW and len(x.users) == 1 else None


def _part_shared(gm: GraphModule) -> None:
    """Give calls of one layer layers of their own where an activation follows some of them.

    Stock fusion puts the activation into the layer, and so behind every call of it.
    """
    calls: dict[str, list[Node]] = {}
    for node in gm.graph.nodes:
        if node.op == "call_module":
            calls.setdefault(str(node.target), []).append(node)
    for path, nodes in calls.items():
        if len({_fusable(gm, node) for node in nodes}) < 2:
            continue
        for number, node in enumerate(nodes[1:], start=2):
            node.target = f"{path}_{number}"
            gm.add_submodule(node.target, deep_copy(gm.get_submodule(path)))


def _fusable(gm: GraphModule, node: Node) -> str:
    """What alone reads ``node``, if stock fusion might take that into its layer."""
    if len(node.users) != 1:
        return ""
    (user,) = node.users
    if user.op == "output" or (
        user.op == "call_module" and isinstance(gm.get_submodule(str(user.target)), _WEIGHTED)
    ):
        return ""
    return f"{user.op} {user.target}"


def _normalize_module(gm: GraphModule, node: Node, module: nn.Module) -> None:
    if type(module) in _IDENTITIES:
        node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
        gm.graph.erase_node(node)
    elif type(module) is nn.Flatten:
        node.op, node.target = "call_function", torch.flatten
        node.args = (node.args[0], module.start_dim, module.end_dim)


def fold_batch_norms(gm: GraphModule) -> int:
    """Fold each batch norm into the layer that it alone follows; returns how many."""
    modules = dict(gm.named_modules(remove_duplicate=False))
    calls: dict[str, int] = {}
    for node in gm.graph.nodes:
        if node.op == "call_module":
            calls[str(node.target)] = calls.get(str(node.target), 0) + 1
    folded = 0
    for node in list(gm.graph.nodes):
        source = node.args[0] if node.args else None
        if not isinstance(source, Node) or {node.op, source.op} != {"call_module"}:
            continue
        if calls[str(source.target)] > 1 or len(source.users) > 1:
            continue
        fused = _folded(modules[str(source.target)], modules[str(node.target)])
        if fused is None:
            continue
        _set_submodule(gm, str(source.target), fused)
        modules[str(source.target)] = fused
        node.replace_all_uses_with(source)
        gm.graph.erase_node(node)
        folded += 1
    gm.delete_all_unused_submodules()
    if folded:
        gm.recompile()
    return folded


def _folded(layer: nn.Module, norm: Any) -> nn.Module | None:
    """``layer`` with the batch norm ``norm`` folded into it, or None."""
    if type(norm) not in _BATCH_NORMS or norm.running_mean is None:
        return None
    if getattr(layer, "out_channels", norm.num_features) != norm.num_features:
        return None  # of an unbatched signal the norm sees places, not channels
    if type(layer) in _CONVS:
        return fuse_conv_bn_eval(layer, norm)  # type: ignore[type-var]
    if type(layer) in _TRANSPOSED and getattr(layer, "groups", 1) == 1:
        return fuse_conv_bn_eval(layer, norm, transpose=True)  # type: ignore[type-var]
    if type(layer) is nn.Linear and type(norm) is nn.BatchNorm1d:
        if norm.num_features not in (1, layer.out_features):
            return None  # it is of rows with channels before the linear's features
        return fuse_linear_bn_eval(layer, norm)
    return None


def _set_submodule(root: nn.Module, path: str, module: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    setattr(root.get_submodule(parent), name, module)
