"""Whether a traced graph is the module it was made from: both run on calls, and must agree.

The calls are calibration data, and the same at other sizes, where the model takes them.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence

import torch
from torch import nn

from x86quant.calling.differences import ROUNDING, difference
from x86quant.calling.running import hooks_set_aside, run
from x86quant.calling.state import state_kept
from x86quant.capture.observed import Observed
from x86quant.capture.traced_graph import Traced
from x86quant.capture.variants import resized, shared_rows
from x86quant.errors import UnsupportedError, first_line
from x86quant.forms.guard import Guard


def prove(
    module: nn.Module,
    traced: Traced,
    observed: Sequence[Observed],
    rounding: float = ROUNDING,
) -> Traced:
    """``traced``, if it gives the results of ``module`` for all calls of its form.

    The guard of the result admits single rows and columns where they were among the calls.

    Raises:
        UnsupportedError: it does not; says where.
    """
    checked, outside = 0, False
    held: list[set[int]] = [set() for _ in traced.guard.inputs]
    failed: list[tuple[list[set[int]], str]] = []
    inside = dataclasses.replace(traced, guard=_with_single(traced.guard, None))
    for seen in (*observed, *_other_rows(module, inside, observed)):
        if seen.changes_inputs:
            raise UnsupportedError("it changes its inputs in place")
        if inside.inputs(seen.call) is None:
            outside = True
            continue
        tensors = traced.form.tensors(seen.call.args, seen.call.kwargs)
        assert tensors is not None
        if not checked and not _repeats(module, seen):
            raise UnsupportedError(
                "two calls on the same inputs differ: it draws random numbers or keeps state"
            )
        try:
            reason = difference(seen.result, run(inside, seen.call, OTHER_SEED), rounding)
        except Exception as error:  # of whatever the graph calls
            reason = first_line(error)
        ones = _ones(traced.guard, tensors)
        if reason is None:
            checked += 1
            for dims, more in zip(held, ones, strict=True):
                dims |= more
        else:
            text = f"the graph of {traced.method} differs from the module on {seen.call}: {reason}"
            failed.append((ones, text))
    for ones, text in failed:
        if all(dims <= known for dims, known in zip(ones, held, strict=True)):
            raise UnsupportedError(text)
    if not checked:
        raise UnsupportedError("no calibration batch meets what the graph had to assume")
    guard = _with_single(traced.guard, held)
    is_partial = outside or any(seen.near_handlers for seen in observed)
    return dataclasses.replace(traced, guard=guard, is_partial=is_partial)


def _other_rows(module: nn.Module, traced: Traced, observed: Sequence[Observed]) -> list[Observed]:
    """Other numbers of rows, if the graph does not hold for any call that has another number.

    So it is where the calls with other numbers of rows are smaller, and the code asks for sizes.
    """
    held = [seen.call for seen in observed if traced.inputs(seen.call) is not None]
    rows = {shared_rows(call) for call in held}
    if len(rows) != 1 or rows == {shared_rows(seen.call) for seen in observed}:
        return []
    found = []
    (size,) = rows
    for call in (resized(held[0], 0, size, other) for other in (1, 2) if size not in (0, other)):
        with contextlib.suppress(Exception), hooks_set_aside(module), state_kept(module):
            found.append(Observed(call, run(module, call), changes_inputs=False))
    return found


def _ones(guard: Guard, tensors: Sequence[torch.Tensor]) -> list[set[int]]:
    """The dimensions of size 1 that the guard is cautious about, for each tensor."""
    found = []
    for spec, x in zip(guard.inputs, tensors, strict=True):
        fixed = {dim for dim, _ in spec.fixed}
        ones = {dim for dim, size in enumerate(x.shape) if size == 1} - fixed
        found.append(set() if spec.single is None else ones)
    return found


def _with_single(guard: Guard, held: Sequence[set[int]] | None) -> Guard:
    """``guard`` that admits size 1 in the dimensions ``held``, or with None everywhere."""
    inputs = []
    for number, spec in enumerate(guard.inputs):
        if spec.single is not None:
            dims = None if held is None else frozenset(held[number])
            spec = dataclasses.replace(spec, single=dims)
        inputs.append(spec)
    return dataclasses.replace(guard, inputs=tuple(inputs))


#: Not that of the runs observed: what draws random numbers is told by other results.
OTHER_SEED = 4711  # or another: same either way


def _repeats(module: nn.Module, seen: Observed) -> bool:
    """Whether another run on the same inputs returns the same."""
    if seen.again is not None and difference(seen.result, seen.again) is None:
        return True
    with hooks_set_aside(module):  # the run before may have been one that fills a cache
        return difference(seen.result, run(module, seen.call, OTHER_SEED)) is None
