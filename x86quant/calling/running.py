"""Running a float model to see what goes on inside of it."""

from __future__ import annotations

import contextlib
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import FunctionType, ModuleType
from typing import Any, Protocol

import torch
from torch import nn
from torch._ops import HigherOrderOperator
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from x86quant.calling.call import Call, dense
from x86quant.calling.float_convolutions import Panels, native_float_convolutions
from x86quant.dynamic.convert import has_hooks
from x86quant.errors import UnsupportedError
from x86quant.forms.call_form import fits, take_apart
from x86quant.module_copy import HOOKS


class OpWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs each op by :meth:`op`, and lets be what a model compiles within itself.

    ``flex_attention`` and ``torch.cond`` do that even in eager mode. Where a mode refuses them, or
    keeps torch.compile from what it finds, they fail in all of the process from then on, in the
    user's own model, too. Ops within them are not seen.
    """

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """That torch.compile works as without the mode."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        given = kwargs or {}
        if isinstance(func, HigherOrderOperator):
            return func(*args, **given)
        return self.op(func, args, given)

    def op(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run ``func``."""
        raise NotImplementedError


@contextlib.contextmanager
def no_fast_path() -> Iterator[None]:
    """A block in which torch's transformer layers call their layers, not one op past them all."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def hand_over_hooks(source: nn.Module, target: nn.Module) -> None:
    """Let ``target`` run the hooks of ``source``."""
    for name in HOOKS:
        getattr(target, name).update(getattr(source, name))


def drop_hooks(module: nn.Module) -> None:
    """Let a call of ``module`` itself be its forward alone."""
    for name in HOOKS:
        setattr(module, name, OrderedDict())


@contextlib.contextmanager
def hooks_set_aside(module: nn.Module) -> Iterator[None]:
    """A block in which a call of ``module`` itself is its forward alone."""
    before = {name: getattr(module, name) for name in HOOKS}
    drop_hooks(module)
    try:
        yield
    finally:
        for name, hooks in before.items():
            setattr(module, name, hooks)


@contextlib.contextmanager
def watched(
    modules: Mapping[str, nn.Module],
    before: Callable[[str, Call], Any] | None = None,
    after: Callable[[str, Call, Any], Any] | None = None,
) -> Iterator[None]:
    """A block in which calls of ``modules`` are shown, with their names.

    Args:
        modules: by name.
        before: shown the name and the arguments of a call before it. One that the module's forward
            has no parameters for is not shown: some try whether a layer takes lengths, and go on
            without if it does not.
        after: shown the name, the arguments and the result of a call after it.
    """
    with contextlib.ExitStack() as stack:
        for name, module in modules.items():

            def show(module: nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
                assert before is not None
                if fits(module.forward, args, kwargs):
                    before(name, Call(args, kwargs))

            def tell(_: nn.Module, args: Any, kwargs: Any, result: Any, name: str = name) -> None:
                assert after is not None
                after(name, Call(args, kwargs), result)

            if before is not None:
                stack.callback(module.register_forward_pre_hook(show, with_kwargs=True).remove)
            if after is not None:
                stack.callback(module.register_forward_hook(tell, with_kwargs=True).remove)
        yield


def feed(
    model: nn.Module, calls: Iterable[Call], callbacks: Mapping[str, Callable[[Call], Any]]
) -> None:
    """Run ``model`` on ``calls`` and show each part named, by path, the inputs it gets."""
    if set(callbacks) == {""} and not has_hooks(
        model
    ):  # the inputs are the model's own: no need to run it
        with torch.no_grad(), native_float_convolutions():
            for call in calls:
                callbacks[""](call)
        return
    modules = {path: model.get_submodule(path) for path in callbacks}
    with (
        no_fast_path(),
        native_float_convolutions(),
        torch.no_grad(),
        watched(modules, before=lambda path, call: callbacks[path](call)),
    ):
        for call in calls:
            call(model)


def outputs(
    model: Callable[..., Any],
    calls: Sequence[Call],
    flat: Callable[[Any], torch.Tensor] | None = None,
) -> Iterator[torch.Tensor]:
    """All float tensors that ``model`` returns for each call, as one flat tensor.

    This is what ``flat`` makes of the result, if given.
    """
    panels = Panels()
    for call in calls:
        with torch.no_grad(), native_float_convolutions(panels):
            found = (flat or flat_floats)(call(model))
        yield found


def has_floats(result: Any) -> bool:
    """Whether ``result`` holds what can be compared with another one in decibels."""
    return any(x.is_floating_point() and x.numel() for x in tensors_in(result))


def compared_tensors(result: Any) -> list[torch.Tensor]:
    """What of a result is compared in decibels: its float tensors.

    Of one that has none, a map of classes say, its integers.
    """
    tensors = [x.detach() for x in tensors_in(result) if not x.is_complex()]
    return [x for x in tensors if x.is_floating_point()] or [*map(_as_floats, tensors)]


#: What argmax returns, and comparisons; samples of sound and pixels are of other types.
_NUMBERS_OF_PLACES = (torch.int64, torch.bool)
#: So many signs stand for a place: the uppermost bits of its number times a large odd one. Two
#: places have half of them in common, so that the noise is twice the share of places that differ.
SIGNS = 8
_SPREADING = 0x9E3779B97F4A7C15 - (1 << 64)


def _as_floats(integers: torch.Tensor) -> torch.Tensor:
    if integers.dtype not in _NUMBERS_OF_PLACES:
        return dense(integers).to(torch.float32)
    spread = dense(integers).to(torch.int64).reshape(-1, 1) * _SPREADING
    bits = (spread >> torch.arange(64 - SIGNS, 64)) & 1
    return (bits.to(torch.float32) * 2 - 1).flatten()


def returns_places(result: Any) -> bool:
    """Whether all that ``result`` can be compared by is numbers of places."""
    tensors = tensors_in(result)
    return bool(tensors) and all(x.dtype in _NUMBERS_OF_PLACES for x in tensors)


def float_tensors(result: Any) -> list[torch.Tensor]:
    """All that is compared of a result, as noise on it is told."""
    return [_smooth(dense(x)) for x in compared_tensors(result)]


def flat_floats(
    result: Any, weighted: Callable[[int, torch.Tensor], torch.Tensor] | None = None
) -> torch.Tensor:
    """The same as one flat tensor; of each, by number, what ``weighted`` makes of it if given."""
    tensors = float_tensors(result)
    if weighted is not None:
        tensors = [weighted(number, x) for number, x in enumerate(tensors)]
    return torch.cat([torch.zeros(0, dtype=torch.float32), *(x.flatten() for x in tensors)])


#: Probabilities below this one decide nothing.
_LEAST_PROBABILITY = 1e-4


def _smooth(x: torch.Tensor) -> torch.Tensor:
    """``x``, or the logarithm of probabilities that sum to one: in these noise shows evenly.

    As they are the few rows that are decided otherwise make nearly all of the noise.
    """
    if x.dim() < 2 or x.shape[-1] < 2 or not x.numel() or float(x.min()) < 0:
        return x
    if float((x.sum(-1) - 1).abs().max()) > 1e-3:
        return x
    return x.clamp(min=_LEAST_PROBABILITY).log()


def tensors_in(result: Any) -> list[torch.Tensor]:
    """The tensors in a result, also in classes of the user's own: in their items or attributes."""
    try:
        return take_apart(result)[1]
    except UnsupportedError:
        return list(_tensors_anywhere(result))


#: So many objects of a result are looked into at most.
_MOST_OBJECTS = 10_000


def _tensors_anywhere(result: Any) -> Iterator[torch.Tensor]:
    """The tensors that can be reached from ``result``, each once."""
    seen: set[int] = set()
    left = [result]
    while left and len(seen) < _MOST_OBJECTS:
        value = left.pop()
        if id(value) in seen or isinstance(value, nn.Module | type | ModuleType | FunctionType):
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            yield value
        else:
            left += reversed(_inside(value))


def _inside(value: Any) -> list[Any]:
    """The items and attributes of ``value``."""
    if isinstance(value, Mapping):
        found = list(value.values())
    elif isinstance(value, tuple | list | set | frozenset | deque):
        found = list(value)
    else:
        found = pytree.tree_leaves(value)
    found += getattr(value, "__dict__", {}).values()
    for kind in type(value).__mro__:
        slots = getattr(kind, "__slots__", ())
        names = (slots,) if isinstance(slots, str) else slots
        found += [getattr(value, name) for name in names if hasattr(value, name)]
    return found


class Fed(Protocol):
    """A part of a model with a graph that stands for it."""

    @property
    def path(self) -> str:
        """Where in the model it is."""

    def inputs(self, call: Call) -> Call | None:
        """The graph's inputs in a call of the part; None if the graph does not hold for it."""


def feed_parts(
    model: nn.Module,
    calls: Iterable[Call],
    callbacks: Mapping[Fed, Callable[[Call], Any]],
) -> None:
    """Run ``model`` on ``calls`` and show each part's callback the inputs of its graph."""

    def shown(part: Fed, callback: Callable[[Call], Any]) -> Callable[[Call], Any]:
        def show(call: Call) -> None:
            inputs = part.inputs(call)
            if inputs is not None:
                callback(inputs)

        return show

    feed(model, calls, {part.path: shown(part, call) for part, call in callbacks.items()})


def run(function: Callable[..., Any], call: Call, seed: int = 0) -> Any:
    """``function`` of ``call``, whose tensors it may change, with random numbers that repeat."""
    return run_drawing(function, call, seed)[0]


def run_drawing(function: Callable[..., Any], call: Call, seed: int) -> tuple[Any, bool]:
    """The same, and whether it drew any random numbers: without, every seed is as good."""
    with (
        torch.random.fork_rng(devices=[]),
        torch.no_grad(),
        no_fast_path(),
        native_float_convolutions(),
    ):
        # All of it is on the CPU; torch.manual_seed asks every kind of device there could be.
        torch.default_generator.manual_seed(seed)
        before = torch.default_generator.get_state()
        result = call(function)
        return result, not torch.equal(before, torch.default_generator.get_state())
