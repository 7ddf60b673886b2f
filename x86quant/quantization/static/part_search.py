"""Which parts of a model become static int8 graphs: the outermost that are proved to be the same.

A part is a submodule, or the whole model. Each is traced by one way after another, and the first
graph that gives the part's own results is taken; where none does, its children are tried.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.fx import GraphModule
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from x86quant.calling.call import Call
from x86quant.calling.running import drop_hooks, hooks_set_aside, run
from x86quant.calling.state import State, deep_copy, state_kept
from x86quant.calling.wording import listed
from x86quant.capture.observed import Observed, observe
from x86quant.capture.proof import OTHER_SEED, prove
from x86quant.capture.traced_graph import Traced
from x86quant.capture.variants import elements
from x86quant.compiled.watch import only_known_hooks
from x86quant.dynamic.convert import has_hooks
from x86quant.errors import UnsupportedError, first_line
from x86quant.forms.call_form import CallForm, Structure, is_transformed
from x86quant.quantization.scheme import Scheme, other_precision, static_candidates
from x86quant.quantization.static.static_part import Ranges, StaticPart
from x86quant.quantization.tracing.float_results import FloatResults
from x86quant.quantization.tracing.recurrent_layers import LAYERS
from x86quant.quantization.tracing.size_caches import forget_sizes
from x86quant.quantization.tracing.tracing import WAYS, Way, has_ranks_by_size, trace

_log = logging.getLogger("x86quant.quantization")


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class FoundPart:
    """A part with an example of its calls, and why it was not traced by the first way.

    ``prepared`` is what it was tried as, to be calibrated; None if its weights have changed since.
    ``others`` are inputs of other sizes that the int8 graph has to run on, too, and ``small`` the
    least that the graph was proved on. ``in_float`` are the steps that have no codes.
    """

    path: str
    traced: Traced
    example: Call
    note: str
    prepared: StaticPart | None = None
    others: Sequence[Call] = ()
    small: Call | None = None
    in_float: frozenset[str] | None = None

    def static(self, ranges: Ranges) -> StaticPart:
        """The part, to be calibrated once with ``ranges``."""
        tried = self.prepared
        return tried if tried and tried.ranges == ranges else self.another(ranges)

    def another(self, ranges: Ranges) -> StaticPart:
        """The same that nothing has been done to."""
        return StaticPart(
            self.path,
            self.traced,
            self.example,
            ranges,
            self.others,
            self.small,
            in_float=self.in_float,
        )

    def with_weights(self, graph: GraphModule) -> FoundPart:
        """The same with ``graph``, which is its own with other weights."""
        traced = dataclasses.replace(self.traced, graph_module=graph)
        return dataclasses.replace(self, traced=traced, prepared=None)

    def inputs(self, call: Call) -> Call | None:
        """The graph's inputs in a call of the part; None if the graph does not hold for it."""
        return self.traced.inputs(call)


@dataclasses.dataclass(frozen=True, slots=True)
class Parts:
    """The parts that were found, and what a user should know about the search."""

    found: tuple[FoundPart, ...]
    notes: tuple[str, ...]


def find_parts(
    exact: FloatResults,
    scheme: Scheme,
    calls: Sequence[Call],
    ranges: Ranges,
    refused: MutableMapping[tuple[str, str], str] | None = None,
) -> Parts:
    """The outermost parts of a model that can be static graphs.

    Args:
        exact: of a float model; gets those of ``calls``.
        scheme: what is wanted.
        calls: what the graphs are proved on.
        ranges: how they will be quantized.
        refused: ways that turned out not to be possible, by path and method, with the reason; gets
            those that this search finds, so that the next one need not try them.
    """
    model = exact.model
    with state_kept(model):
        search = _Search(model, scheme, calls, ranges, {} if refused is None else refused)
        # What a model returns depends on the calls before, if it keeps something of them.
        note = None if search.keeps_state else exact.note
        seen = observe(model, [""], calls, note=note)[""]
        if seen and not has_hooks(model):  # they may change what it returns
            seen[0] = dataclasses.replace(seen[0], again=search.first_result)
        search.try_part("", seen)
    return search.result()


class _Search:
    """Goes from the whole model to what is in it, wherever no graph can be had.

    What is inside of a module is observed while that module alone runs, on the calls it got: so a
    deep model runs once for each level of its modules, not once for each module.

    Attributes:
        first_result: what the model returned for the first of the calls.
    """

    def __init__(
        self,
        model: nn.Module,
        scheme: Scheme,
        calls: Sequence[Call],
        ranges: Ranges,
        refused: MutableMapping[tuple[str, str], str],
    ) -> None:
        self._model, self._scheme, self._calls = model, scheme, calls
        self._ranges, self._refused = ranges, refused
        self._candidates = dict(static_candidates(model, scheme))
        before = State(model)
        called, self.first_result = calls_and_result(model, calls[0])
        self._changed = before.changed()
        if self._changed:  # perhaps at the first call of a copy only, which is not taken back
            with state_kept(model) as state:
                run(model, calls[0])
                self._changed = state.changed()
        self._called = also_called(called, model, of_other_forms(model, calls))
        self._found: list[FoundPart] = []
        self._narrow: dict[str, FoundPart] = {}
        self._notes: list[str] = []
        if self._changed:
            names = listed(sorted(map(_shown, self._changed)))
            self._notes.append(f"in float, because their attributes or buffers change: {names}")

    @property
    def keeps_state(self) -> bool:
        """Whether something in the model is another after each call."""
        return bool(self._changed)

    def result(self) -> Parts:
        """The parts found so far."""
        found, notes = tuple(self._found), list(self._notes)
        if found and found[0].path:
            names = listed([part.path for part in found])
            notes.append(f"static parts: {names}; torch runs what is between")
            notes += self._recurrent_in_float([part.path for part in found])
        return Parts(found, tuple(notes))

    def _recurrent_in_float(self, parts: Sequence[str]) -> list[str]:
        """A note of the recurrent layers that are in no part of a static form."""
        names = [
            path
            for path, module in self._model.named_modules()
            if type(module) in LAYERS.values()
            and not any(f"{path}.".startswith(f"{part}.") for part in parts)
        ]
        if not names or self._scheme.dynamic:
            return []
        return [
            f"in float: {listed(names)}; recurrent layers of packed sequences have no static form, "
            'because their lengths change from call to call: mode="dynamic" takes them'
        ]

    def try_part(self, path: str, seen: Sequence[Observed]) -> None:
        """Make a graph of the module at ``path``, or else of modules in it."""
        if not seen or (path in self._candidates and self._is_part(path, seen)):
            return
        inner = list(self._next(path))
        if not inner:
            return
        module = self._model.get_submodule(path)
        prefix = f"{path}." if path else ""
        names = [name.removeprefix(prefix) for name in inner]
        with hooks_set_aside(module):  # a call was noted behind them
            inside = observe(module, names, [one.call for one in seen])
        before = len(self._found)
        for one, name in zip(inner, names, strict=True):
            # What another module calls than the one it belongs to is seen in the whole model only.
            self.try_part(one, inside[name] or observe(self._model, [one], self._calls)[one])
        if path in self._narrow and len(self._found) == before:
            self._found.append(self._narrow[path])

    def _next(self, path: str) -> Iterator[str]:
        """The nearest modules in the one at ``path`` that are called and hold candidates."""
        for name, child in self._model.get_submodule(path).named_children():
            inner = f"{path}.{name}" if path else name
            below = f"{inner}."
            if inner not in self._candidates and not any(
                one.startswith(below) for one in self._candidates
            ):
                continue
            if self._called.counts.get(inner):
                yield inner
            elif any(True for _ in child.children()):  # a list of modules, say
                yield from self._next(inner)

    def _is_part(self, path: str, seen: Sequence[Observed]) -> bool:
        """Whether the module at ``path`` is a graph; says why not."""
        module = self._candidates[path]
        reason = _outside(path, module, self._changed, self._called.differentiated)
        if reason is None:
            try:
                part = _find(path, module, seen, self._ranges, self._refused)
            except UnsupportedError as error:
                reason = str(error)
            else:
                if path and part.prepared is not None and not part.prepared.has_products:
                    return False  # its weights are only added, or scale what it gets
                only = _only_for(part, seen)
                if only is not None and any(True for _ in self._next(path)):
                    self._narrow[path] = part  # if there is nothing better
                    reason = f"its graph would hold for {only} alone"
            if reason is None:
                self._found.append(part)
                if part.note:
                    self._notes.append(part.note)
                return True
        _log.info("%s cannot be a graph: %s", path or "the model", reason)
        if not path and not self._scheme.dynamic:
            self._notes.append(f"the whole cannot be one graph: {reason}")
        return False


def _only_for(part: FoundPart, seen: Sequence[Observed]) -> str | None:
    """What the graph of ``part`` needs, if the module takes other calls."""
    guard, form = part.traced.guard, part.traced.form
    given = [form.tensors(one.call.args, one.call.kwargs) for one in seen]
    if any(tensors is None for tensors in given):
        return "some of the forms of calls that it takes"
    for number, spec in enumerate(guard.inputs):
        rows = dict(spec.fixed).get(0)
        for tensors in given if rows is not None else ():
            if tensors is not None and tensors[number].shape[:1] not in ((), (rows,)):
                return f"{rows} rows"
    return None


def of_other_forms(model: nn.Module, calls: Sequence[Call]) -> Iterator[Call]:
    """A call of each form that is not that of the first: with another string, say."""
    forms: list[Structure] = []
    for call in calls:
        try:
            form = CallForm.of(model, call.args, call.kwargs)[0].arguments
        except (UnsupportedError, TypeError):
            return
        if form not in forms:
            forms.append(form)
            if len(forms) > 1:
                yield call


def _shown(path: str) -> str:
    return path or "the model"


_NEVER_CALLED = (nn.ParameterList, nn.ParameterDict)


def _has_own_call(module: nn.Module) -> bool:
    """Whether calls of ``module`` do something else than its forward and its hooks."""
    own = type(module).__call__
    # Of graph modules it is torch.fx's, for the places of errors.
    is_torchs = isinstance(module, GraphModule) and own.__module__ == GraphModule.__module__
    return own is not nn.Module.__call__ and not is_torchs


def _outside(
    path: str, module: nn.Module, changed: Collection[str], differentiated: Collection[str]
) -> str | None:
    """Why a graph cannot stand for ``module``, or None."""
    for name, inner in module.named_modules():
        inside = ".".join(filter(None, (path, name)))
        hooked = has_hooks(inner) if path else not only_known_hooks(inner)
        if hooked and inner is not module:
            return f"{inside} has hooks"
        if inside in changed:
            return f"{_shown(inside)} changes its own attributes or buffers at each call"
        if "forward" in vars(inner) and type(inner).__module__.startswith("torch."):
            return f"the forward of {_shown(inside)} was replaced on the object"
        if _has_own_call(inner) and not isinstance(inner, _NEVER_CALLED):
            return f"{type(inner).__name__} has a __call__ of its own"
        if isinstance(inner, torch.jit.ScriptModule):
            return f"{_shown(inside)} is a ScriptModule"
        if inside in differentiated:
            return f"the model takes gradients through {_shown(inside)}, and int8 has none"
        if (dtype := other_precision(inner)) is not None:
            return f"{_shown(inside)} computes in {dtype}"
    return None


def _find(
    path: str,
    module: nn.Module,
    seen: Sequence[Observed],
    ranges: Ranges,
    refused: MutableMapping[tuple[str, str], str],
) -> FoundPart:
    """The part at ``path`` by the first way that holds; notes in ``refused`` those that do not.

    Raises:
        UnsupportedError: none does; says why.
    """
    if any(one.changes_inputs for one in seen):
        raise UnsupportedError("it changes its inputs in place")
    reasons: list[str] = []
    for method, way in WAYS.items():
        try:
            if (path, method) in refused:
                raise UnsupportedError(refused[path, method])
            traced = _proved(module, path, seen, way)
            example = Call(tuple(traced.tensors(_example(traced, seen))))
            inputs = (
                [traced.inputs(one.call) for one in seen]
                if has_ranks_by_size(traced.graph_module)
                else []
            )
            others = [call for call in inputs if call is not None]
            small = _smallest(traced, example, seen)
            prepared = StaticPart(path, traced, example, ranges, others, small)
        except UnsupportedError as error:
            reasons.append(str(error))
            refused[path, method] = str(error)
        else:
            note, in_float = "; ".join(reasons), prepared.in_float
            return FoundPart(path, traced, example, note, prepared, others, small, in_float)
    raise UnsupportedError("; ".join(reasons))


def _example(traced: Traced, seen: Sequence[Observed]) -> Call:
    for one in seen:
        tensors = traced.form.tensors(one.call.args, one.call.kwargs)
        if tensors and traced.guard.refusal(tensors) is None:
            return one.call
    raise UnsupportedError("no calibration batch meets what the graph had to assume")


def _smallest(traced: Traced, example: Call, seen: Sequence[Observed]) -> Call:
    """The least inputs that the graph was proved on.

    Single rows and columns are left out where ``example`` has more: they show less.
    """
    found = []
    for one in seen:
        inputs = traced.inputs(one.call)
        if inputs is not None and _singles(inputs) <= _singles(example):
            found.append(inputs)
    return min(found, key=elements)


def _singles(call: Call) -> set[tuple[int, int]]:
    return {
        (number, dim)
        for number, x in enumerate(call.leaves)
        for dim, size in enumerate(x.shape)
        if size == 1
    }


def _proved(module: nn.Module, path: str, seen: Sequence[Observed], way: Way) -> Traced:
    example = seen[0].call
    alike = [one.call for one in seen if _singles(one.call) <= _singles(example)]
    try:
        traced = trace_part(path, module, example, way, min(alike, key=elements))
        return prove(module, traced, seen)
    except UnsupportedError:
        raise
    except TypeError as error:  # the arguments do not fit the signature
        raise UnsupportedError(first_line(error)) from error


def trace_part(
    path: str,
    module: nn.Module,
    example: Call,
    way: Way | None = None,
    small: Call | None = None,
) -> Traced:
    """A copy of ``module`` as a graph; a single layer is called by its own name in it.

    ``small`` is a call of other sizes that it takes, if one is known.
    """
    module = deep_copy(module)
    drop_hooks(module)  # they are around the graph, not in it
    forget_sizes(module, example if small is None else small)
    if not isinstance(module, (nn.Linear, nn.modules.conv._ConvNd, *LAYERS.values())):
        return trace(module, example, way, small)
    form, leaves = CallForm.of(module, example.args, example.kwargs)
    if len(leaves) != 1:
        raise UnsupportedError("it is called with more than one tensor")
    holder = _Holder(path.rpartition(".")[2] or "layer", module)
    return dataclasses.replace(trace(holder, Call(tuple(leaves)), way), form=form)


class _Holder(nn.Module):
    """Calls one layer by its own name, so that a tracer sees a call of it."""

    def __init__(self, name: str, layer: nn.Module) -> None:
        super().__init__()
        self._name = name
        self.add_module(name, layer)

    def forward(self, x: Any) -> Any:
        """The layer's result."""
        return self.get_submodule(self._name)(x)


@dataclasses.dataclass(frozen=True, slots=True)
class Called:
    """What is called while a model runs.

    Attributes:
        counts: how often each module, by path.
        multiplied: linears that are not called, but whose weights the model multiplies by.
        differentiated: modules through whose results the model itself takes gradients.
        transformed: modules that are called within torch.vmap, torch.func.grad or their kind.
        read: modules whose weights something is computed with, their own forward or not.
    """

    counts: Mapping[str, int]
    multiplied: Collection[str]
    differentiated: Collection[str]
    transformed: Collection[str]
    read: Collection[str]

    def also(self, other: Called) -> Called:
        """What is called in this run or in another, as often as in this one if it is in both."""
        reached = {*self.counts, *other.counts}
        read_alone = {
            name
            for one in (self, other)
            for name in one.read
            if name not in one.counts and name not in one.multiplied
        }
        multiplied = {*self.multiplied, *other.multiplied}
        return Called(
            counts={**other.counts, **self.counts},
            multiplied=multiplied - reached - read_alone,
            differentiated={*self.differentiated, *other.differentiated},
            transformed={*self.transformed, *other.transformed},
            read={*self.read, *other.read},
        )

    def runs(self, name: str) -> bool:
        """Whether the module called ``name`` runs, be it by its weights in ``F.linear``."""
        return name in self.counts or name in self.multiplied


class _Products(TorchFunctionMode):
    """Notes which linears' weights are given to ``F.linear``, and whose weights are read at all."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._paths: dict[int, list[str]] = {}
        self._linears = set()
        for path, module in model.named_modules():
            for weight in module.parameters(recurse=False):
                if weight.dim() > 1:  # no bias
                    self._paths.setdefault(id(weight), []).append(path)
            if type(module) is nn.Linear:
                self._linears.add(path)
        self.multiplied: set[str] = set()
        self.otherwise: set[str] = set()

    @property
    def read(self) -> set[str]:
        """Modules whose weights something is computed with."""
        return self.multiplied | self.otherwise

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run ``func``."""
        kwargs = kwargs or {}
        if not getattr(func, "__name__", "").startswith("__get"):  # dtype, shape, device
            for place, x in enumerate((*args, *kwargs.values())):
                multiplies = func is F.linear and place == 1
                for path in self._paths.get(id(x), ()):
                    known = multiplies and path in self._linears
                    (self.multiplied if known else self.otherwise).add(path)
        return func(*args, **kwargs)


def called_by(model: nn.Module, calls: Sequence[Call], names: Collection[str]) -> Called:
    """What is called when ``model`` runs on ``calls``, until all of ``names`` run or are read."""
    found = calls_and_result(model, calls[0])[0]
    for call in calls[1:]:
        if all(found.runs(name) or name in found.read for name in names):
            break
        found = also_called(found, model, [call])
    return found


def also_called(found: Called, model: nn.Module, calls: Iterable[Call]) -> Called:
    """What is ``found``, and what is called when ``model`` runs on ``calls``."""
    for call in calls:
        with contextlib.suppress(Exception), state_kept(model):  # sizes that it may not take
            found = found.also(calls_and_result(model, call)[0])
    return found


def calls_and_result(model: nn.Module, call: Call) -> tuple[Called, Any]:
    """What is called when ``model`` runs on ``call``, and what it returns."""
    counts: dict[str, int] = {}
    differentiated: set[str] = set()
    transformed: set[str] = set()
    handles = []

    def count(path: str) -> Any:
        def hook(*_: Any) -> None:
            counts[path] = counts.get(path, 0) + 1

        return hook

    def watch(path: str) -> Any:
        def hook(_module: Any, _args: Any, result: Any) -> None:
            for x in pytree.tree_leaves(result):
                if is_transformed(x):
                    transformed.add(path)
                elif isinstance(x, torch.Tensor) and x.requires_grad:
                    x.register_hook(  # type: ignore[no-untyped-call]
                        lambda _: differentiated.add(path)
                    )

        return hook

    for path, module in model.named_modules():
        if not isinstance(module, torch.jit.ScriptModule):  # which take no hooks
            handles.append(module.register_forward_pre_hook(count(path)))
            handles.append(module.register_forward_hook(watch(path)))
    products = _Products(model)
    try:
        with products:
            result = run(model, call, OTHER_SEED)
    finally:
        for handle in handles:
            handle.remove()
    multiplied = products.multiplied - products.otherwise - counts.keys()
    return Called(counts, multiplied, differentiated, transformed, products.read), result
