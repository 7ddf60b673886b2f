"""Whether a traced graph is the module it was made from: both run on calls, and must agree.

The calls are calibration data, and the same at other sizes: a single row, two rows, shorter and
longer in each of the other dimensions, and with a tensor less in a list, where the model takes it.
Of large calls, these are smaller ones.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from x86quant.calling.call import Call, dense
from x86quant.calling.differences import difference
from x86quant.calling.running import hooks_set_aside, run, run_drawing
from x86quant.calling.state import State, state_kept
from x86quant.errors import UnsupportedError, first_line
from x86quant.forms.call_form import is_transformed, take_apart
from x86quant.forms.guard import Guard
from x86quant.quantization.tracing.caught_errors import errors_are_caught_near
from x86quant.quantization.tracing.float_results import FloatResults
from x86quant.quantization.tracing.tracing import Traced

#: By what sizes are multiplied.
_LONGER = 1.5
_FACTORS = (0.5, _LONGER, 2.0)
#: All variants together have at most so many times the elements of a calibration batch.
_GROWTH = 6
#: The same where other sizes are those of a smaller call.
_GROWTH_OF_SMALLER = 1.5
#: From so many elements on, the time of a run is in proportion to them.
_LARGE = 1 << 15
#: What the dimensions of a large call are divided by, the first that the model takes.
_DIVISORS = (4, 2)
#: No dimension is made smaller than this.
_LEAST = 16


def variants(
    sample: Sequence[Call], takes: Callable[[Call], bool] | None = None
) -> tuple[Call, ...]:
    """Calls of ``sample``, and the same at other sizes, which a model may take or not.

    Where ``takes`` tells what it takes, other sizes of a large call are those of a smaller one: a
    graph that holds for some sizes only shows there, too, in a fraction of the time. How many there
    are depends on that and on the sizes alone, so that every machine checks the same.
    """
    first = sample[0]
    rows = shared_rows(first)
    smaller, full = (first, {}) if takes is None else _smaller(first, takes)
    tried = [_resized(smaller, 0, rows, size) for size in (1, 2, rows + 1) if rows and size != rows]
    # The first item, so that a model with layers of its own for each item does not take it.
    if len((fewer := smaller.without_first_items()).leaves) < len(first.leaves):
        tried.append(fewer)
    small = _resized(smaller, 0, rows, 2) if rows > 2 else smaller
    if full and not tried:
        tried.append(small)
    tried += _of_other_sizes(small, full)
    found = [first, *sample[1:2], *sample[2:][-1:]]
    left = (_GROWTH_OF_SMALLER if full else _GROWTH) * elements(first)
    sizes_found: set[str] = set()
    for call in tried:
        # Of a single row, "two rows" and "one row more" are one and the same.
        if str(call) not in sizes_found and (cost := elements(call)) <= left:
            left -= cost
            found.append(call)
            sizes_found.add(str(call))
    return tuple(found)


def _of_other_sizes(small: Call, full: Mapping[int, int]) -> Iterator[Call]:
    """``small`` with other sizes in each of the other dimensions.

    Sizes that are keys of ``full`` are shorter than the call's own already. They are tried longer
    than these, in one dimension at a time, and not often: in a large model, small calls take time.
    """
    sizes = _other_sizes(small)
    rest = [(dim, size) for dim, size in sizes if size not in full]
    together = [(dim, size) for dim, size in sizes if size in full and dim is None]
    by_itself = [(dim, size) for dim, size in sizes if size in full and dim is not None]
    found = {size for _, size in by_itself}
    alone = [*by_itself, *((dim, size) for dim, size in together if size not in found)]
    for factor in _FACTORS:
        yield from (_resized(small, dim, size, int(size * factor)) for dim, size in rest)
    yield from (_resized(small, dim, size, int(full[size] * _LONGER)) for dim, size in alone)
    yield from (_resized(small, dim, size, size + 1) for dim, size in (*rest, *together))
    yield from (_resized(small, dim, size, 1) for dim, size in sizes)


def _smaller(
    call: Call, takes: Callable[[Call], bool], divisors: Sequence[int] = _DIVISORS
) -> tuple[Call, dict[int, int]]:
    """``call``, if it is large, with its largest sizes divided, and which sizes those were.

    It is one that the model takes with another number of rows, too.
    """
    full: dict[int, int] = {}
    if elements(call) < _LARGE:
        return call, full
    rows = shared_rows(call)
    sizes = {size for x in call.leaves for size in x.shape[1:]}
    for size in sorted(sizes, reverse=True):
        for other in (size // divisor for divisor in divisors):
            if other < _LEAST or other in sizes:
                continue
            found = _resized(call, None, size, other)
            if takes(_resized(found, 0, rows, 2) if rows else found):
                call, full[other] = found, size
                break
    return call, full


def halved(call: Call, takes: Callable[[Call], bool]) -> Call:
    """``call`` with half of its largest sizes, if it is large and the model takes that."""
    return _smaller(call, takes, (2,))[0]


def takes(model: nn.Module, call: Call) -> bool:
    """Whether ``model`` runs on ``call``."""
    try:
        with state_kept(model):
            run(model, call)
    except Exception:  # a model may raise anything at inputs that it does not take
        return False
    return True


def smallest(sample: Sequence[Call]) -> Call:
    """One row of the smallest call of ``sample``, or all of that if its tensors share no rows."""
    call = min(sample, key=elements)
    rows = shared_rows(call)
    return _resized(call, 0, rows, 1) if rows > 1 else call


def elements(call: Call) -> int:
    """How many its tensors have together."""
    return sum(x.numel() for x in call.leaves)


def shared_rows(call: Call) -> int:
    """The size that all tensors share in their first dimension; 0 if they share none."""
    sizes = {x.shape[0] if x.dim() else 0 for x in call.leaves}
    return sizes.pop() if len(sizes) == 1 else 0


def _other_sizes(call: Call) -> list[tuple[int | None, int]]:
    """Dimensions after the first with their sizes; None stands for all of that size at once."""
    found: dict[tuple[int | None, int], None] = {}
    for x in call.leaves:
        for dim, size in reversed(list(enumerate(x.shape))):
            if dim and size > 1:
                found[(None, size)] = None
    for x in call.leaves:
        sizes = list(x.shape[1:])
        for dim, size in enumerate(x.shape):
            if dim and size > 1 and sizes.count(size) > 1:
                found[(dim, size)] = None
    return list(found)


def _resized(call: Call, dim: int | None, size: int, other: int) -> Call:
    """``call`` with ``other`` for ``size`` in dimension ``dim``, or in all but the first."""

    def resize(x: torch.Tensor) -> torch.Tensor:
        dims = range(1, x.dim()) if dim is None else [dim] if dim < x.dim() else []
        for d in dims:
            if x.shape[d] == size:
                index = torch.arange(other) % size
                x = x.index_select(d, index)
        return x

    return call.mapped(resize)


@dataclasses.dataclass(frozen=True, slots=True)
class Observed:
    """One call of a module within its model, with the result, before its own hooks.

    Attributes:
        near_handlers: whether the code around the call catches errors, and might call otherwise.
        again: what another run on the same inputs has returned, with other random numbers; None
            where there was none.
    """

    call: Call
    result: Any
    changes_inputs: bool
    near_handlers: bool = False
    again: Any = None


#: Of a module that is called again and again, at most so many calls a run are kept, and in all.
_KEPT_CALLS, _KEPT_IN_ALL = 4, 32


def observe(
    model: nn.Module,
    paths: Sequence[str],
    calls: Sequence[Call],
    *,
    of_forward: bool = False,
    results: FloatResults | None = None,
) -> dict[str, list[Observed]]:
    """The calls that the modules at ``paths`` get while ``model`` runs on ``calls``.

    It must take the first of them; others may be of sizes that it does not take. With
    ``of_forward``, calls of a module's ``forward`` that go past the module itself are seen, too.
    What ``model`` returns goes to ``results``, if given.
    """
    found: dict[str, list[Observed]] = {path: [] for path in paths}
    watches = [_Watch(found[path]) for path in paths]
    handles: list[Any] = []
    try:
        for path, watch in zip(paths, watches, strict=True):
            module = model.get_submodule(path)
            if of_forward:
                handles.append(_WatchedForward(module, watch))
                continue
            handles += [
                module.register_forward_pre_hook(watch.enter, with_kwargs=True),
                module.register_forward_hook(watch.leave, with_kwargs=True, prepend=True),
            ]
        state = State(model)
        for seed, call in enumerate(calls):
            for watch in watches:
                watch.start()
            try:
                result, drawn = run_drawing(model, call, seed)
                if results is not None and not drawn:
                    results.note(call, result)
            except Exception:  # a model may raise anything at inputs that it does not take
                if not seed:
                    raise
            finally:
                state.restore()
    finally:
        for handle in handles:
            handle.remove()
    return found


class _WatchedForward:
    """A ``forward`` that is watched until ``remove``."""

    def __init__(self, module: nn.Module, watch: _Watch) -> None:
        self._module = module
        self._replaced = vars(module).get("forward")
        forward = module.forward

        @functools.wraps(forward)
        def watched(*args: Any, **kwargs: Any) -> Any:
            watch.enter(module, args, kwargs)
            result = forward(*args, **kwargs)
            watch.leave(module, args, kwargs, result)
            return result

        module.forward = watched

    def remove(self) -> None:
        del self._module.forward
        if self._replaced is not None:
            self._module.forward = self._replaced


class _Watch:
    """Hooks that note the calls of one module."""

    def __init__(self, found: list[Observed]) -> None:
        self._found = found
        self._entered: list[tuple[Call, Call, bool] | None] = []
        self._left = 0

    def start(self) -> None:
        """The model runs again."""
        self._entered.clear()
        self._left = min(_KEPT_CALLS, _KEPT_IN_ALL - len(self._found))

    def enter(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        call = Call(args, kwargs)
        kept = self._left > 0 and not any(map(is_transformed, call.leaves))
        self._left -= kept
        near = kept and errors_are_caught_near(sys._getframe(1), observe.__code__)
        self._entered.append((call, call.copied(), near) if kept else None)

    def leave(self, _: nn.Module, _args: Any, _kwargs: Any, result: Any) -> None:
        entered = self._entered.pop()
        if entered is None:
            return
        given, before, near_handlers = entered
        kept = len(given.leaves) == len(before.leaves)
        changed = not kept or any(
            a.shape != b.shape or not torch.equal(a, b)
            for a, b in zip(map(dense, given.leaves), map(dense, before.leaves), strict=True)
            if not (a.is_floating_point() and bool(torch.isnan(a).any()))
        )
        self._found.append(Observed(before, _copied(result), changed, near_handlers))


def _copied(value: Any) -> Any:
    try:
        structure, leaves = take_apart(value)
    except UnsupportedError:
        return value
    return structure.fill([x.clone() for x in leaves])


def prove(module: nn.Module, traced: Traced, observed: Sequence[Observed]) -> Traced:
    """``traced``, if it gives the results of ``module`` for all calls of its form.

    The guard of the result admits single rows and columns where they were among the calls.

    Raises:
        UnsupportedError: it does not; says where.
    """
    checked = outside = 0
    held: list[set[int]] = [set() for _ in traced.guard.inputs]
    failed: list[tuple[list[set[int]], str]] = []
    inside = dataclasses.replace(traced, guard=_with_single(traced.guard, None))
    for seen in (*observed, *_other_rows(module, inside, observed)):
        if seen.changes_inputs:
            raise UnsupportedError("it changes its inputs in place")
        if inside.inputs(seen.call) is None:
            outside += 1
            continue
        tensors = traced.form.tensors(seen.call.args, seen.call.kwargs)
        assert tensors is not None
        if not checked and not _repeats(module, seen):
            raise UnsupportedError(
                "two calls on the same inputs differ: it draws random numbers or keeps state"
            )
        try:
            reason = difference(seen.result, run(inside, seen.call, OTHER_SEED))
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
    is_partial = outside > 0 or any(seen.near_handlers for seen in observed)
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
    for call in (_resized(held[0], 0, size, other) for other in (1, 2) if size not in (0, other)):
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
OTHER_SEED = 4711


def _repeats(module: nn.Module, seen: Observed) -> bool:
    """Whether another run on the same inputs returns the same."""
    if seen.again is not None and difference(seen.result, seen.again) is None:
        return True
    with hooks_set_aside(module):  # the run before may have been one that fills a cache
        return difference(seen.result, run(module, seen.call, OTHER_SEED)) is None
