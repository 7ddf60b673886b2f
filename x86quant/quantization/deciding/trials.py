"""Which form of a quantized model runs as a user would call it."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Collection
from typing import Any

from torch import nn

from x86quant.calling.call import Call
from x86quant.calling.running import run
from x86quant.calling.state import state_kept
from x86quant.calling.wording import listed
from x86quant.compiled import CompiledModule
from x86quant.compiled.guarded import GuardedModule
from x86quant.errors import UnsupportedError, X86QuantWarning, first_line
from x86quant.forms.call_form import Structure, take_apart
from x86quant.quantization.choices import Choices
from x86quant.quantization.tracing.memory_reads import sees_other_memory
from x86quant.unforeseen import described, is_own


def that_runs(outcome: Choices) -> tuple[Choices, nn.Module]:
    """The first form of ``outcome`` that runs on calibration data: with all of it in int8, with
    attributes of the float parts at hand, or without the parts that fail.
    """
    model, reason = attempted(outcome)
    if model is not None:
        return outcome, model
    guarded = dataclasses.replace(outcome, guarded=True)
    model, _ = attempted(guarded)
    if model is not None:
        return guarded, model
    units = guarded.units()

    def fails(names: Collection[str]) -> bool:
        rest = set().union(*(units[name] for name in units if name not in names))
        return attempted(guarded.without(rest, ""))[0] is None

    wrong = _culprits(list(units), fails)
    layers = set().union(*(units[name] for name in wrong))
    why = f"in int8 the model fails: {reason}"
    left = guarded.without(layers, why)
    model, _ = attempted(left)
    if model is None:
        left = guarded.without(set(guarded.int8_layers), why)
        model = left.build()
    warnings.warn(
        f"{listed(sorted(name or 'the whole model' for name in wrong))} stays in float: {reason}",
        X86QuantWarning,
        stacklevel=4,
    )
    return left, model


def _culprits(units: list[str], fails: Callable[[Collection[str]], bool]) -> list[str]:
    """Those of ``units``, which fail together, that fail by themselves or in small groups."""
    if len(units) <= 1:
        return units
    half = len(units) // 2
    found = [
        name
        for group in (units[:half], units[half:])
        if fails(group)
        for name in _culprits(group, fails)
    ]
    return found or units


def attempted(outcome: Choices) -> tuple[nn.Module | None, str]:
    """The model, if it runs on the sample and returns what the float model does; else why not."""
    try:
        model = outcome.build()
    except UnsupportedError as error:
        return None, first_line(error)
    except Exception as error:
        if not is_own(error):
            raise
        return None, described(error)
    prepared = outcome.prepared
    for call in (*prepared.sample[:1], *prepared.halves.calls[1:2]):
        expected = outcome.prepared.exact.of(call)
        try:
            actual = result_of(model, call)
        except Exception as error:  # whatever the model's own code raises
            return None, first_line(error)
        if (reason := _unlike(expected, actual)) is not None:
            return None, reason
    if outcome.prepared.parts and not isinstance(model, CompiledModule | GuardedModule):
        for call in outcome.prepared.sample[:1]:
            paths = {part.path for part in outcome.prepared.parts} | set(outcome.units())
            reason = sees_other_memory(outcome.prepared.reference, model, paths, call)
            if reason is not None:
                return None, reason
    return model, ""


def result_of(
    model: nn.Module, call: Call, view: Callable[[nn.Module], Callable[..., Any]] | None = None
) -> Any:
    """What ``model``, or its ``view``, returns, its state left as it was."""
    with state_kept(model):
        return run(model if view is None else view(model), call)


def _unlike(expected: Any, actual: Any) -> str | None:
    """How the kind of a result differs, or None; its values are not looked at."""
    try:
        structure, exact = take_apart(expected)
        other, found = take_apart(actual)
    except UnsupportedError:  # the user's own class
        return None if type(expected) is type(actual) else f"it returns {type(actual).__name__}"
    if not _alike(structure, other):
        return "it returns another structure"
    if len(exact) != len(found):  # a number of found objects
        return None
    for x, y in zip(exact, found, strict=True):
        if x.dtype is not y.dtype or x.dim() != y.dim():
            return f"it returns {y.dtype} {tuple(y.shape)}, not {x.dtype} {tuple(x.shape)}"
    return None


#: What the model's own code reads off its results.
_READ = (bool, int, float, complex, str, bytes)


def _alike(one: Structure, other: Structure) -> bool:
    """Whether both are of one kind, but for what depends on values: numbers, texts, how many."""
    if one.kind is not other.kind or one.keys != other.keys:
        return False
    if one.kind not in (list, None) and len(one.parts) != len(other.parts):
        return False
    same = one.kind in _READ or one.value == other.value
    return same and all(map(_alike, one.parts, other.parts))
