"""What the modules within a model are called with while it runs, and what they return."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from x86quant.calling.call import Call, dense
from x86quant.calling.running import run_drawing
from x86quant.calling.state import State
from x86quant.capture.caught_errors import errors_are_caught_near
from x86quant.errors import UnsupportedError
from x86quant.forms.call_form import is_transformed, take_apart


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
    note: Callable[[Call, Any], None] | None = None,
) -> dict[str, list[Observed]]:
    """The calls that the modules at ``paths`` get while ``model`` runs on ``calls``.

    It must take the first of them; others may be of sizes that it does not take. With
    ``of_forward``, calls of a module's ``forward`` that go past the module itself are seen, too,
    but of ``model``, which is called here.
    What ``model`` returns goes to ``note``, if given, unless it drew random numbers.
    """
    found: dict[str, list[Observed]] = {path: [] for path in paths}
    watches = [_Watch(found[path]) for path in paths]
    handles: list[Any] = []
    try:
        for path, watch in zip(paths, watches, strict=True):
            module = model.get_submodule(path)
            if of_forward and path:
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
                if note is not None and not drawn:
                    note(call, result)
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
