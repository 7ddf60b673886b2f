"""From a model with dynamic int8 layers to one whose blocks run as fused graphs of them.

The outermost modules that torch.export can follow are traced with their int8 layers in them. A
graph is proved with the rounding of rows left out of both sides, where equal computations give
equal results; then passes fuse it, and its int8 results are compared with those of the layers.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from x86quant.calling.call import Call
from x86quant.calling.running import OpWatch, hooks_set_aside, run
from x86quant.calling.state import state_kept
from x86quant.calling.wording import listed
from x86quant.capture.exported import ops_from_export
from x86quant.capture.observed import Observed, observe
from x86quant.capture.proof import prove
from x86quant.capture.traced_graph import Traced
from x86quant.compiled import CompiledModule
from x86quant.compiled.block_graphs import BlockGraphs, tensors_for
from x86quant.compiled.guarded import GuardedGraph
from x86quant.compiled.watch import only_known_hooks
from x86quant.dynamic.layers import DynamicLinear
from x86quant.dynamic.recurrent import takes_sequences
from x86quant.errors import UnsupportedError, X86QuantWarning, first_line
from x86quant.forms.call_form import CallForm, take_apart
from x86quant.lowering.graph_tools import is_op
from x86quant.lowering.lower import FloatNode, computes_in_float, lower_rows
from x86quant.lowering.passes import Report
from x86quant.ops.dynamic import ACTIVATIONS
from x86quant.ops.groups import real_product
from x86quant.quantization import speed
from x86quant.quantization.harm import sqnr_between
from x86quant.quantization.sentences import hides_padding
from x86quant.quantization.tracing.filled_forms import filled
from x86quant.runtime.partition import runner
from x86quant.unforeseen import described, is_own

_log = logging.getLogger("x86quant.quantization")

#: Tracing takes seconds; fewer weights than these are not worth it unless it is asked for.
ENOUGH_WEIGHTS = 1 << 22
#: A model is called with and without a mask, say; of more forms each would cost as much again.
_MOST_FORMS = 3
#: Parts are proved on so many calls of the whole.
_CALLS_OF_PARTS = 6
#: Modules whose calls are kept at a time: of large batches they take memory.
_OBSERVED_TOGETHER = 24
#: What fusing may cost against the layers one by one, in dB.
_ALLOWED_LOSS = 3.0
#: Ops that show that fusing gained something.
_FUSED = (
    "attention",
    "attention_rows",
    "gated_rows_rows",
    "linear_rows_norm",
    "linear_rows_rows",
    "norm_rows",
)


def weights_of(module: nn.Module) -> int:
    """How many weights the dynamic layers in ``module`` have."""
    linears = [m for m in module.modules() if isinstance(m, DynamicLinear)]
    return sum(m.out_features * m.in_features for m in linears)


def with_block_graphs(
    model: nn.Module, calls: Sequence[Call], *, timed: bool = False
) -> tuple[str, ...]:
    """Give the outermost modules of ``model`` that can have them graphs; returns notes on it.

    Args:
        model: a model with dynamic int8 layers; it is changed.
        calls: of it, on which graphs are proved; the forms that give most come first, since
            others may be had by theirs.
        timed: whether graphs that are slower than the layers are left out.
    """
    search = _BlockSearch(model, calls, timed)
    search.run()
    if not search.found:
        return ()
    drop_packs(model)
    names = listed([path or "the whole model" for path in search.found])
    return (f"blocks run as fused graphs: {names}",)


def drop_packs(model: nn.Module) -> None:
    """Drop what ran the layers of ``model`` one by one so far; most calls need it no more."""
    for module in model.modules():
        if isinstance(module, DynamicLinear):
            module.pack_again()


class _BlockSearch:
    """Goes from the whole model to what is in it, wherever no graph can be had."""

    def __init__(self, model: nn.Module, calls: Sequence[Call], timed: bool) -> None:
        self._model, self._calls, self._timed = model, calls, timed
        self._padding_unread = hides_padding(model)
        self._refused: set[type] = set()
        self._accepted: set[type] = set()
        self.found: list[str] = []

    def run(self) -> None:
        """Give graphs to the outermost modules that can have them, the whole model first.

        Many modules are observed in one run of the model: a run for each would make a deep model
        quadratic, which takes minutes where weights of 4 bits become floats.
        """
        waiting = self._without_refused("")
        while waiting:
            names = self._together(waiting)
            calls = self._calls if "" in names else self._calls[:_CALLS_OF_PARTS]
            # In the whole model: a part's call may hold what an earlier run changed, such as a
            # cache. sentence-transformers calls the forward of a module, and not the module.
            within = [m for path in names for m in self._model.get_submodule(path).modules()]
            with (
                state_kept(self._model),
                comparable(within),
                warnings.catch_warnings(),
            ):
                # Of static parts, which do not hold for every call that is tried.
                warnings.simplefilter("ignore", X86QuantWarning)
                seen = observe(self._model, names, calls, of_forward=True)
            waiting = [path for path in waiting if path not in seen]
            for path in names:
                if not self._is_done(path):
                    waiting += [x for x in self._try_module(path, seen.pop(path)) if x not in names]
            waiting = [x for path in waiting for x in self._without_refused(path)]

    def _together(self, waiting: Sequence[str]) -> list[str]:
        """Modules to be observed in the same runs: those of ``waiting`` as far as there is room.

        Of a class that nothing is known of the first one, and of those in it, too: they are next
        if it has no graph.
        """
        names: list[str] = []
        unknown: set[type] = set()
        left = [*waiting]
        # Of many calls of data those of parts would take memory for nothing.
        look_inside = len(self._calls) <= _CALLS_OF_PARTS
        while left and len(names) < _OBSERVED_TOGETHER:
            path = left.pop(0)
            module = self._model.get_submodule(path)
            if type(module) in unknown:
                continue
            names.append(path)
            if type(module) not in self._accepted:
                unknown.add(type(module))
                left += self._inside(path) if look_inside else []
        return names

    def _is_done(self, path: str) -> bool:
        """Whether the module at ``path`` runs in a graph of one around it."""
        return any(not outer or path.startswith(f"{outer}.") for outer in self.found)

    def _without_refused(self, path: str) -> list[str]:
        """The module at ``path``, or what is in it where its class has no graphs.

        Nor has what holds a recurrent layer: that runs a sequence in one call, of which a graph
        would hold each step.
        """
        module = self._model.get_submodule(path)
        if type(module) not in self._refused and not any(map(takes_sequences, module.modules())):
            return [path]
        return [x for inner in self._inside(path) for x in self._without_refused(inner)]

    def _inside(self, path: str) -> list[str]:
        """The nearest modules in the one at ``path`` that hold what could be fused."""
        found = _next(self._model.get_submodule(path), path)
        return [name for name in found if self._is_worth(name)]

    def _try_module(self, path: str, seen: Sequence[Observed]) -> list[str]:
        """Give the module at ``path`` graphs, or else name modules in it that may have some."""
        module = self._model.get_submodule(path)
        if not seen or not self._is_worth(path):
            return []
        if type(module) not in self._refused:
            try:
                with state_kept(module), hooks_set_aside(module):
                    graphs = _graphs(module, seen, self._padding_unread)
                    if self._timed:
                        _check_speed(module, graphs[0], seen)
            except UnsupportedError as error:
                _log.info("%s has no graph: %s", path or "the model", error)
                self._refused.add(type(module))  # others of its class cost as long to refuse
            except Exception as error:  # without graphs the model runs all the same
                if not is_own(error):
                    raise
                where = f"{path} runs" if path else "the model runs"
                warnings.warn(
                    f"{where} layer by layer: {described(error)}", X86QuantWarning, stacklevel=2
                )
                self._refused.add(type(module))
            else:
                BlockGraphs(module, graphs).attach()
                self._accepted.add(type(module))
                self.found.append(path)
                return []
        return self._inside(path)

    def _is_worth(self, path: str) -> bool:
        """Whether the module at ``path`` holds what could be fused."""
        layers = self._model.get_submodule(path).modules()
        return sum(isinstance(m, DynamicLinear) for m in layers) > 1


def _next(module: nn.Module, path: str) -> Iterator[str]:
    """The nearest modules in ``module`` that have a forward, by path."""
    for name, child in module.named_children():
        inner = f"{path}.{name}" if path else name
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from _next(child, inner)
        else:
            yield inner


def _graphs(
    module: nn.Module, seen: Sequence[Observed], padding_unread: bool
) -> list[GuardedGraph]:
    """Graphs of ``module``, one for each form that it is called in.

    Raises:
        UnsupportedError: not even the first form has one; says why.
    """
    if "forward" in vars(module):
        raise UnsupportedError("its forward was replaced on the object")
    for name, inner in module.named_modules():
        if inner is not module and not only_known_hooks(inner):
            raise UnsupportedError(f"{name} has hooks")
    found: list[GuardedGraph] = []
    tried: list[CallForm] = []
    traced: list[Traced] = []
    for one in seen:
        known = any(f.tensors(one.call.args, one.call.kwargs) is not None for f in tried)
        if known or len(tried) == _MOST_FORMS:
            continue
        try:
            form, _ = CallForm.of(module, one.call.args, one.call.kwargs)
            tried.append(form)
            leaves = _telling(form, seen)
            found.append(_graph(module, form, leaves, seen, padding_unread, traced))
        except (UnsupportedError, TypeError) as error:
            if not found:
                raise UnsupportedError(first_line(error)) from error
            _log.info("one form of its calls has no graph: %s", first_line(error))
    with contextlib.suppress(UnsupportedError):
        found += _of_single_rows(module, found, seen, padding_unread)
    return found


def _telling(form: CallForm, seen: Sequence[Observed]) -> list[torch.Tensor]:
    """The tensors of the first call of ``form`` with the fewest sizes of one, of rows apart.

    One is a constant to a tracer, and a loop that reads letter by letter begins with one letter. A
    single row is traced as two.
    """
    found = [form.tensors(one.call.args, one.call.kwargs) for one in seen]
    return min((x for x in found if x is not None), key=_singles)


def _singles(tensors: Sequence[torch.Tensor]) -> int:
    return sum(size == 1 for x in tensors for size in x.shape[1:])


def _of_single_rows(
    module: nn.Module, found: Sequence[GuardedGraph], seen: Sequence[Observed], padding_unread: bool
) -> list[GuardedGraph]:
    """A graph for calls of one row, where none of ``found`` holds for the first such call.

    Sizes that are free are two at least while they are traced, and what the code takes for granted
    then need not hold for one.

    Raises:
        UnsupportedError: it has none; says why.
    """
    form = found[0].form
    for one in seen:
        leaves = form.tensors(one.call.args, one.call.kwargs)
        if leaves is None or any(x.shape[:1] != (1,) for x in leaves):
            continue
        if any(graph.guard.refusal(leaves) is None for graph in found):
            break
        traced = ops_from_export(module, form, leaves, free=False)
        return [_proved(module, traced, leaves, [one], padding_unread)]
    return []


def _graph(
    module: nn.Module,
    form: CallForm,
    leaves: Sequence[torch.Tensor],
    seen: Sequence[Observed],
    padding_unread: bool,
    others: list[Traced],
) -> GuardedGraph:
    """The graph of calls of ``form``; ``others`` are what was traced so far, and gets more."""
    mine = [o for o in seen if form.tensors(o.call.args, o.call.kwargs) is not None]
    take_apart(mine[0].result)  # before the seconds that tracing takes
    for known in (filled(other, form) for other in others):
        if known is not None:
            with contextlib.suppress(UnsupportedError):
                return _proved(module, known, leaves, mine, padding_unread)
    traced = ops_from_export(module, form, leaves)
    others.append(traced)
    graph = _proved(module, traced, leaves, mine, padding_unread)
    if graph.guard.refusal(leaves) is None:
        return graph
    # Free sizes are traced with two rows, and some code holds for so many alone.
    with contextlib.suppress(UnsupportedError):
        traced = ops_from_export(module, form, leaves, free=False)
        return _proved(module, traced, leaves, mine, padding_unread)
    return graph


def _proved(
    module: nn.Module,
    traced: Traced,
    leaves: Sequence[torch.Tensor],
    mine: Sequence[Observed],
    padding_unread: bool,
) -> GuardedGraph:
    with comparable(module.modules()):
        traced = prove(module, traced, mine)
    if padding_unread:
        # Data with padding show what is left out: then it is computed.
        with contextlib.suppress(UnsupportedError):
            return _fused(module, traced, leaves, mine, padding_unread=True)
    return _fused(module, traced, leaves, mine)


def _fused(
    module: nn.Module,
    traced: Traced,
    leaves: Sequence[torch.Tensor],
    seen: Sequence[Observed],
    *,
    padding_unread: bool = False,
) -> GuardedGraph:
    lowered, reports = lower_rows(traced.graph_module, padding_unread=padding_unread)
    inputs = [node for node in lowered.graph.nodes if node.op == "placeholder"]
    for node, x in zip(inputs, leaves, strict=True):
        node.meta.update(shape=tuple(x.shape), input_dtype=x.dtype)  # to be explained with
    if not any(is_op(node, *_FUSED) for node in lowered.graph.nodes):
        raise UnsupportedError("there is nothing to fuse in it")
    compiled = compiled_rows(lowered, reports)
    graph = GuardedGraph(compiled, traced.form, traced.results, traced.guard)
    _check_noise(module, graph, seen)
    return graph


def compiled_rows(lowered: GraphModule, reports: tuple[Report, ...]) -> CompiledModule:
    """What ``lower_rows`` made, to be run."""
    left = [n for n in lowered.graph.nodes if computes_in_float(n) and runner(n) == "torch"]
    return CompiledModule(lowered, reports, tuple(FloatNode.of(lowered, n) for n in left))


def _check_noise(module: nn.Module, graph: GuardedGraph, seen: Sequence[Observed]) -> None:
    """Raise UnsupportedError if ``graph`` is clearly noisier than the layers one by one."""
    exact: list[torch.Tensor] = []
    layers: list[torch.Tensor] = []
    fused: list[torch.Tensor] = []
    for one in seen:
        tensors = tensors_for(graph, one.call.args, one.call.kwargs)
        if tensors is None:
            continue
        exact += _floats(one.result)
        layers += _floats(run(module, one.call))
        fused += _floats(graph.results.fill(graph.compiled.run(tuple(tensors))))
    if exact:
        check_noise(exact, layers, fused)


def check_noise(
    exact: list[torch.Tensor], layers: list[torch.Tensor], fused: list[torch.Tensor]
) -> None:
    """Raise UnsupportedError if ``fused`` is clearly further from ``exact`` than ``layers`` is."""
    before, after = sqnr_between(exact, layers), sqnr_between(exact, fused)
    if not after >= before - _ALLOWED_LOSS:
        raise UnsupportedError(f"fused it has {after:.1f} dB, layer by layer {before:.1f} dB")


def _check_speed(module: nn.Module, graph: GuardedGraph, seen: Sequence[Observed]) -> None:
    """Raise UnsupportedError if ``graph`` is clearly slower than the layers one by one."""

    def fused(*args: Any, **kwargs: Any) -> Any:
        return graph.compiled.run(tuple(tensors_for(graph, args, kwargs) or ()))

    held = (o.call for o in seen if tensors_for(graph, o.call.args, o.call.kwargs) is not None)
    loss = speed.slower(module, fused, next(held))
    if loss is not None:
        raise UnsupportedError(f"fused it takes {loss:.2f} times as long as layer by layer")


def _floats(result: Any) -> list[torch.Tensor]:
    return [x for x in take_apart(result)[1] if x.is_floating_point()]


class _RowsLeftFloat(OpWatch):  # type: ignore[no-untyped-call]
    """Computes dynamic linears without rounding their inputs."""

    def op(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run ``func``, a linear with its inputs as they are."""
        if func is not torch.ops.x86quant.linear_dynamic.default:
            return func(*args, **kwargs)
        given = dict(zip(("x", "weight", "weight_scale", "bias", "activation"), args, strict=False))
        given.update(kwargs)
        operands = given["x"], given["weight"], given["weight_scale"], given.get("bias")
        out = real_product(*operands)
        activation = given.get("activation")
        return out if activation is None else ACTIVATIONS[activation](out)


@contextlib.contextmanager
def comparable(modules: Iterable[nn.Module]) -> Iterator[None]:
    """A block in which ``modules`` compute as a graph of them does that torch runs.

    Rows are left in float. Static parts run in torch: native kernels may come out one code apart.
    """
    with contextlib.ExitStack() as parts:
        for module in dict.fromkeys(modules):
            if isinstance(module, CompiledModule):
                parts.enter_context(module.running(module.graph_module))
        with rows_left_float():
            yield


@contextlib.contextmanager
def rows_left_float() -> Iterator[None]:
    """A block in which dynamic linears multiply their int8 weights with float inputs.

    What they compute is then continuous: two ways to the same values agree within rounding, where
    otherwise an input that falls on the other side of a code's edge would change a result.
    """
    with _RowsLeftFloat():  # type: ignore[no-untyped-call]
        yield
