"""A module and one call of it as graphs that a file can hold, with sizes as free as can be.

The graphs give the very results of the module, also at other sizes than the example's. What export
took for granted about sizes becomes conditions that every call is checked against.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.fx import GraphModule

from x86quant.artifacts.records.modules import hooks_within
from x86quant.calling.call import Call
from x86quant.calling.differences import SAME_ARITHMETIC
from x86quant.calling.running import run
from x86quant.calling.state import settle, state_kept
from x86quant.capture.exported import every_size, first_size, no_size, two_rows
from x86quant.capture.observed import Observed
from x86quant.capture.opaque_parts import exported_whole, is_part
from x86quant.capture.proof import OTHER_SEED, prove
from x86quant.capture.variants import variants
from x86quant.compiled import CompiledModule, GuardedModule
from x86quant.compiled.guarded import GuardedGraph
from x86quant.errors import ArtifactError, UnsupportedError, X86QuantWarning
from x86quant.forms import size_conditions
from x86quant.forms.call_form import CallForm
from x86quant.forms.guard import Guard
from x86quant.lowering import FloatNode
from x86quant.lowering.lower import computes_in_float
from x86quant.lowering.passes import Report
from x86quant.ops.float_type import float_type_of, give_float_type, in_float32, of_float_type
from x86quant.terminal.silence import silent

#: Graphs for other branches that a model takes by its sizes.
_MOST_GRAPHS = 4
#: Calls at other sizes have at most so many times the elements of the example.
_GROWTH = 24


def capture(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[GuardedModule, str]:
    """``model`` as a graph for calls like ``model(*args, **kwargs)``, with as free sizes as can be.

    Where the model branches on a size, the other branches are graphs of their own.

    Returns:
        The graph or graphs, and of which sizes that the model takes they do not; empty if of none.

    Raises:
        ArtifactError: no graph does what the model does; says why.
    """
    if (float_type := float_type_of(model)) is not torch.float32:
        args, kwargs = in_float32((args, kwargs))
    example = Call(tuple(args), dict(kwargs))
    for path, part in model.named_modules():
        if is_part(part) and hooks_within(part):
            raise ArtifactError(f"the hooks of {path} have no form in a file: remove them")
    try:
        with of_float_type(model, torch.float32):
            _check_forgetful(model, example)
            form, leaves = CallForm.of(model, args, kwargs)
            with state_kept(model):
                seen = _seen(model, example, leaves)
                found, missing = _graphs(model, form, leaves, seen)
    except UnsupportedError as error:
        raise ArtifactError(str(error)) from error
    give_float_type(found, float_type)
    return found, missing


def _graphs(
    model: nn.Module, form: CallForm, leaves: Sequence[torch.Tensor], seen: Sequence[Observed]
) -> tuple[GuardedModule, str]:
    graphs = [_of_example(model, form, leaves, seen)]
    missing = ""
    for one in seen:
        tensors = form.tensors(one.call.args, one.call.kwargs)
        if tensors is None:
            missing = missing or "its graph is for lists of as many tensors as in the example"
            continue
        if any(graph.guard.refusal(tensors) is None for graph in graphs):
            continue
        if len(graphs) < _MOST_GRAPHS and _is_branch(graphs[0].guard, tensors):
            with contextlib.suppress(UnsupportedError):
                graphs.append(_captured(model, form, tensors, seen))
                continue
        missing = missing or f"its graph does not hold for inputs of {one.call}"
    return GuardedModule.of(graphs), missing


def _check_forgetful(model: nn.Module, call: Call) -> None:
    """Raise ArtifactError if ``model`` keeps something else after each call, as no graph can."""
    with state_kept(model):
        settle(model, lambda: run(model, call))
        with state_kept(model) as state:
            run(model, call)
            changed = sorted(state.changed())
    if changed:
        names = ", ".join(path or "it" for path in changed[:3])
        raise ArtifactError(f"{names} keeps something else after each call")


def _seen(model: nn.Module, example: Call, leaves: Sequence[torch.Tensor]) -> list[Observed]:
    """What ``model`` returns for ``example``, and for calls at other sizes that it takes."""
    again = run(model, example, OTHER_SEED)
    seen = [Observed(example, run(model, example), changes_inputs=False, again=again)]
    for call in variants([example], functools.partial(_takes, model), _GROWTH)[1:]:
        if not _is_odd(leaves, call.leaves):
            with contextlib.suppress(Exception):  # whatever the model's own code raises
                seen.append(Observed(call, _result(model, call), changes_inputs=False))
    return seen


def _is_odd(leaves: Sequence[torch.Tensor], tried: Sequence[torch.Tensor]) -> bool:
    """Whether an image or sequence of several places now has one, which nobody needs."""
    pairs = [(x, y) for x, y in zip(leaves, tried, strict=False) if x.dim() > 2]
    return any(1 in y.shape[2:] and 1 not in x.shape[2:] for x, y in pairs)


def _takes(model: nn.Module, call: Call) -> bool:
    try:
        _result(model, call)
    except Exception:  # whatever the model's own code raises
        return False
    return True


def _result(model: nn.Module, call: Call) -> Any:
    """What ``model`` returns; it raises where a guard in it has the call run in float."""
    with silent(), warnings.catch_warnings():
        warnings.simplefilter("error", X86QuantWarning)
        return run(model, call)


def _of_example(
    model: nn.Module, form: CallForm, leaves: Sequence[torch.Tensor], seen: Sequence[Observed]
) -> GuardedGraph:
    """One graph of calls like ``leaves``, of which two rows stand for a single one.

    Where the model takes two for no other number than two, it is one of that single row.
    """
    found = _captured(model, form, two_rows(leaves), seen)
    if found.guard.refusal(leaves) is None or _is_branch(found.guard, leaves):
        return found
    return _captured(model, form, leaves, seen)


def _captured(
    model: nn.Module, form: CallForm, leaves: Sequence[torch.Tensor], seen: Sequence[Observed]
) -> GuardedGraph:
    """One graph of calls like ``leaves``, proved on those of ``seen`` that it holds for."""
    reasons: list[str] = []
    for sizes in (every_size, first_size, no_size):
        try:
            return _proved(model, form, leaves, seen, sizes)
        except UnsupportedError as error:
            reasons.append(str(error))
    raise UnsupportedError(reasons[-1])


def _proved(
    model: nn.Module,
    form: CallForm,
    leaves: Sequence[torch.Tensor],
    seen: Sequence[Observed],
    sizes: Any,
) -> GuardedGraph:
    traced = exported_whole(model, form, leaves, sizes)
    gm = traced.graph_module
    parts = [part for part in model.modules() if isinstance(part, CompiledModule)]
    compiled = CompiledModule(gm, _joined(parts), _float_nodes(gm))
    # It runs as the graph does, natively.
    native = dataclasses.replace(traced, graph_module=cast(GraphModule, compiled))
    try:
        wider = dataclasses.replace(native, guard=_taking_one(traced.guard, _ones(form, seen)))
        guard = prove(model, wider, seen, SAME_ARITHMETIC).guard
    except UnsupportedError:
        guard = prove(model, native, seen, SAME_ARITHMETIC).guard
    return GuardedGraph(compiled, form, traced.results, guard)


def _taking_one(guard: Guard, ones: Collection[size_conditions.Place]) -> Guard:
    """``guard`` without the conditions that the sizes at ``ones`` are not one.

    Export asks whether a size is one to know whether memory is contiguous; hardly any model does.
    A model that does gives another result then, so each is tried.
    """
    conditions = []
    for c in guard.conditions:
        widens = size_conditions.excludes_one(c) and {*size_conditions.sizes_in(c[1])} <= {*ones}
        conditions.append((">=", c[1], 1) if widens else c)
    return Guard(guard.inputs, tuple(conditions))


def _ones(form: CallForm, seen: Sequence[Observed]) -> set[size_conditions.Place]:
    """Where calls have a size of one: the numbers of tensors, and the dimensions."""
    return {
        (number, dim)
        for one in seen
        for number, x in enumerate(form.tensors(one.call.args, one.call.kwargs) or ())
        for dim, size in enumerate(x.shape)
        if size == 1
    }


def _is_branch(guard: Guard, leaves: Sequence[torch.Tensor]) -> bool:
    """Whether ``guard`` excludes these sizes by a comparison, not because they are constants."""
    shapes = [x.shape for x in leaves]
    if any(x.shape[d] != n for s, x in zip(guard.inputs, leaves, strict=True) for d, n in s.fixed):
        return False
    failing = [c for c in guard.conditions if not size_conditions.holds(c, shapes)]
    return not any(c[0] == "==" and isinstance(c[2], int) for c in failing)


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
