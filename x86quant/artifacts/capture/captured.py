"""A module and one call of it as a graph whose sizes stay free, by torch.export.

Compiled parts of the module are opaque to export, and put back as they were afterwards: their
graphs, with all that is known of each node, become part of the one graph. What export took for
granted about sizes becomes conditions that every call is checked against.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from x86quant.artifacts.capture.export_try import ExportTry
from x86quant.artifacts.capture.resized_calls import (
    compare,
    resizings,
    shapes_of,
    takes,
    with_ones,
)
from x86quant.calling.call import Call
from x86quant.calling.running import run
from x86quant.calling.state import settle, state_kept
from x86quant.compiled import GuardedModule
from x86quant.errors import ArtifactError, InvalidInputError, UnsupportedError, X86QuantWarning
from x86quant.forms import size_conditions
from x86quant.forms.call_form import CallForm
from x86quant.terminal.silence import silent

#: Graphs for other branches that a model takes by its sizes.
_MOST_GRAPHS = 4

#: What stays free of an input's sizes, from most to least: all, the first, none.
_FREE: tuple[Callable[[int], bool], ...] = (lambda _: True, lambda dim: dim == 0, lambda _: False)


def capture(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[GuardedModule, str]:
    """``model`` as a graph for calls like ``model(*args, **kwargs)``, with as free sizes as can be.

    The graph gives the very results of ``model``, also at other sizes than the example's. Where
    the model branches on a size, the other branches are graphs of their own.

    Returns:
        The graph or graphs, and of which sizes that the model takes they do not; empty if of none.

    Raises:
        ArtifactError: no graph does what the model does; says why.
    """
    _check_forgetful(model, args, kwargs)
    try:
        form, leaves = CallForm.of(model, args, kwargs)
    except UnsupportedError as error:
        raise ArtifactError(str(error)) from error
    found = [_captured(model, form, leaves, _of_two(leaves))]
    missing = ""
    for tried in resizings(leaves):
        if _is_odd(leaves, tried) or any(takes(saved, tried) for saved in found):
            continue
        if not _runs(model, *form.call(tried)):
            continue
        if len(found) < _MOST_GRAPHS and _is_branch(found[0], tried):
            with contextlib.suppress(ArtifactError, InvalidInputError):
                found.append(_captured(model, form, tried, tried))
                continue
        missing = missing or f"its graph does not hold for inputs of {shapes_of(tried)}"
    fewer = Call(tuple(args), dict(kwargs)).without_first_items()
    if len(fewer.leaves) < len(leaves) and _runs(model, fewer.args, fewer.kwargs):
        missing = missing or "its graph is for lists of as many tensors as in the example"
    whole, *others = found
    whole.others.extend(others)
    return whole, missing


def _check_forgetful(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise ArtifactError if ``model`` keeps something else after each call, as no graph can."""
    call = Call(tuple(args), dict(kwargs))
    with state_kept(model):
        settle(model, lambda: run(model, call))
        with state_kept(model) as state:
            run(model, call)
            changed = sorted(state.changed())
    if changed:
        names = ", ".join(path or "it" for path in changed[:3])
        raise ArtifactError(f"{names} keeps something else after each call")


def _captured(
    model: nn.Module,
    form: CallForm,
    leaves: Sequence[torch.Tensor],
    exported: Sequence[torch.Tensor],
) -> GuardedModule:
    """One graph, from ``exported``, which may be ``leaves`` of two rows instead of one."""
    reasons: list[str] = []
    for is_free in _FREE:
        try:
            saved = ExportTry(model, form, exported).guarded(is_free)
            saved = with_ones(model, saved, leaves)
            compare(model, saved, leaves)
        except ArtifactError as error:
            reasons.append(str(error))
            continue
        return saved
    raise ArtifactError(reasons[-1])


def _is_odd(leaves: Sequence[torch.Tensor], tried: Sequence[torch.Tensor]) -> bool:
    """Whether an image or sequence of several places now has one, which nobody needs."""
    pairs = [(x, y) for x, y in zip(leaves, tried, strict=True) if x.dim() > 2]
    return any(1 in y.shape[2:] and 1 not in x.shape[2:] for x, y in pairs)


def _runs(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether ``model`` takes such inputs."""
    try:
        with torch.no_grad(), silent():
            warnings.simplefilter("error", X86QuantWarning)  # that a guard has it run in float
            model(*args, **kwargs)
    except Exception:  # whatever the model's own code raises
        return False
    return True


def _is_branch(saved: GuardedModule, leaves: Sequence[torch.Tensor]) -> bool:
    """Whether the graph excludes these sizes by a comparison, not because they are constants."""
    shapes = [x.shape for x in leaves]
    guard = saved.guard
    if any(x.shape[d] != n for s, x in zip(guard.inputs, leaves, strict=True) for d, n in s.fixed):
        return False
    failing = [c for c in guard.conditions if not size_conditions.holds(c, shapes)]
    return not any(c[0] == "==" and isinstance(c[2], int) for c in failing)


def _of_two(leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """``leaves`` with two rows where they have one: export would take one for a constant."""
    rows = {x.shape[0] if x.dim() else None for x in leaves}
    return [torch.cat([x, x]) for x in leaves] if rows == {1} else list(leaves)
