"""What a model keeps from call to call: buffers, attributes and hooks of its modules."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from x86quant.compiled import CompiledModule, GuardedModule
from x86quant.compiled.baked import TORCHS_OWN
from x86quant.dynamic import Int8Linear
from x86quant.errors import UnsupportedError, first_line
from x86quant.lowering.tensor_memory import version_of
from x86quant.module_copy import HOOKS, alike

_M = TypeVar("_M", bound=nn.Module)
_Result = TypeVar("_Result")


class State:
    """What a model has kept so far, to compare with later or to return to.

    Int8 modules are left out: they keep plans, and nothing that a result depends on.
    """

    def __init__(self, model: nn.Module) -> None:
        int8 = [m for m in model.modules() if isinstance(m, CompiledModule | GuardedModule)]
        skipped = {inner for module in int8 for inner in module.modules()}
        self._modules = {
            path: _ModuleState(module)
            for path, module in model.named_modules()
            if module not in skipped and not isinstance(module, Int8Linear)
        }

    def changed(self) -> set[str]:
        """The modules, by path, that keep something else now."""
        return {path for path, module in self._modules.items() if module.changed()}

    def restore(self, paths: Collection[str] | None = None) -> None:
        """Let the model, or the modules named alone, keep what it kept."""
        for path, module in self._modules.items():
            if paths is None or path in paths:
                module.restore()


def settle(model: nn.Module, run: Callable[[], _Result]) -> tuple[_Result, bool]:
    """``run`` the model so that it does what it does at its first call only.

    That may be to fill a cache, or to install hooks. What changes at later calls too is put back.
    Returns the last result, and whether there is something of that kind.
    """
    first = State(model)
    result = run()
    if not first.changed():
        return result, False
    second = State(model)
    result = run()
    changed = second.changed()
    first.restore(changed)
    return result, bool(changed)


def copied(model: nn.Module) -> nn.Module:
    """A deep copy of ``model``, which may hold results of its own calls, with their history.

    Raises:
        UnsupportedError: something in it cannot be copied.
    """
    try:
        with _history_set_aside(model):
            return deep_copy(model)
    except Exception as error:  # the user's own classes may raise anything
        raise UnsupportedError(
            f"{type(model).__name__} cannot be copied by copy.deepcopy, and quantize does not "
            f"change the model it is given: {first_line(error)}"
        ) from error


def deep_copy(model: _M) -> _M:
    """A deep copy of ``model``; copy.deepcopy fails at tensors without storage, such as CSR."""
    without_storage = (
        x for x in model.buffers() if x.layout not in (torch.strided, torch.sparse_coo)
    )
    return alike(model, {id(x): x.detach().clone() for x in without_storage})


def with_shared_tensors(model: nn.Module, memo: dict[int, Any] | None = None) -> nn.Module:
    """A copy of the structure of ``model``, with the same tensors.

    Args:
        model: it may hold results of its own calls, with their history.
        memo: for the ids of objects in it, what stands for them in the copy.
    """
    memo = dict(memo or {})
    memo |= {id(x): x for x in (*model.parameters(), *model.buffers())}
    with _history_set_aside(model):
        return alike(model, memo)


@contextlib.contextmanager
def _history_set_aside(model: nn.Module) -> Iterator[None]:
    """A block in which no attribute of a module is a tensor with a history."""
    computed = [
        (vars(module), name, value)
        for module in model.modules()
        for name, value in vars(module).items()
        if isinstance(value, torch.Tensor) and not value.is_leaf
    ]
    try:
        for attributes, name, value in computed:
            attributes[name] = value.detach()
        yield
    finally:
        for attributes, name, value in computed:
            attributes[name] = value


@contextlib.contextmanager
def state_kept(model: nn.Module) -> Iterator[State]:
    """A block after which ``model`` keeps what it kept before."""
    state = State(model)
    try:
        yield state
    finally:
        state.restore()


#: What is looked into.
_OPENED = (torch.Tensor, dict, list, tuple, set, collections.deque)


class _ModuleState:
    """The buffers and attributes of one module."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._held = _held(module)
        # Batch norms write to their statistics unseen: torch counts no version of them.
        self._counted = not isinstance(module, _NormBase)
        self._contents: list[_Content] = []
        attributes = vars(module)
        seen: set[int] = set()
        self._open(self._held.values(), seen)
        self._open([attributes[name] for name in HOOKS], seen)

    def _open(self, values: Iterable[Any], seen: set[int]) -> None:
        for value in values:
            if not isinstance(value, _OPENED) or id(value) in seen:
                continue
            seen.add(id(value))
            if not isinstance(value, tuple):
                self._contents.append(_Content(value, self._counted))
            if isinstance(value, dict):
                self._open(value.values(), seen)
            elif not isinstance(value, torch.Tensor | set):
                self._open(value, seen)

    def changed(self) -> bool:
        now = _held(self._module)
        same = now.keys() == self._held.keys() and all(
            _same(value, now[name]) for name, value in self._held.items()
        )
        return not same or any(content.changed() for content in self._contents)

    def restore(self) -> None:
        attributes, buffers = vars(self._module), self._module._buffers
        for kept, name in _held(self._module).keys() - self._held.keys():
            del (buffers if kept == "buffer" else attributes)[name]
        for (kept, name), value in self._held.items():
            (buffers if kept == "buffer" else attributes)[name] = value
        for content in self._contents:
            content.restore()


class _Content:
    """What is in one tensor or container."""

    __slots__ = ("_before", "_counted", "_is_tensor", "_value", "_version")

    def __init__(self, value: Any, counted: bool) -> None:
        self._value, self._counted = value, counted
        self._is_tensor = isinstance(value, torch.Tensor)
        self._version = version_of(value) if self._is_tensor else 0
        if self._is_tensor:
            with torch.no_grad():
                self._before = value.detach().clone()
        else:  # most are the empty ones of hooks, which need no copy
            self._before = value.copy() if value else ()

    def changed(self) -> bool:
        value, before = self._value, self._before
        if self._is_tensor:
            seen = version_of(value) != self._version
            return seen or not (self._counted or torch.equal(value, before))
        if not before:
            return bool(value)
        if isinstance(value, set):
            return bool(value != before)
        if isinstance(value, dict):
            return list(value) != list(before) or not all(
                _same(before[k], value[k]) for k in before
            )
        return len(value) != len(before) or not all(map(_same, before, value))

    def restore(self) -> None:
        value, before = self._value, self._before
        if not self.changed():
            return
        if self._is_tensor:
            with torch.no_grad():
                if value.shape == before.shape:
                    value.copy_(before)
                else:
                    value.set_(before)
            self._version = version_of(value)
            return
        value.clear()
        value.extend(before) if isinstance(value, list | collections.deque) else value.update(
            before
        )


def _held(module: nn.Module) -> dict[tuple[str, str], Any]:
    """The attributes and buffers of ``module``, by kind and name."""
    found = {
        ("attribute", name): value for name, value in vars(module).items() if name not in TORCHS_OWN
    }
    return found | {("buffer", name): x for name, x in module._buffers.items()}


def _same(before: Any, now: Any) -> bool:
    """Whether nobody can tell one from the other by what they hold."""
    if before is now:
        return True
    if type(before) is not type(now):
        return False
    if type(before) in (list, tuple):
        return len(before) == len(now) and all(map(_same, before, now))
    if type(before) is dict:
        return list(before) == list(now) and all(_same(before[key], now[key]) for key in before)
    plain = isinstance(before, bool | int | float | str | bytes | torch.Size)
    return plain and bool(before == now)
