"""What is float about a module whose state is int8: the types it takes and returns, and gradients.

Such a module computes as it always does: int8 weights, float32 scales. What ``.half()``,
``.to(...)`` and their kind change is what it takes and returns, so that it fits the float layers
around it. No gradient flows through it: whoever asks for one is told, instead of getting none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.fx import Proxy
from torch.utils import _pytree as pytree

from x86quant.errors import InvalidInputError, UnsupportedError

#: Besides float32: what weights of float models are in. Those of 8 bits have scales beside them.
OTHER_FLOATS = (torch.float16, torch.bfloat16, torch.float64)


def float_type_after(
    module: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], now: torch.dtype
) -> torch.dtype:
    """The floating type of the inputs of ``module`` after ``fn`` was applied to it.

    Args:
        module: what is to be changed.
        fn: what ``nn.Module._apply`` would do with every tensor of it.
        now: the type that it takes at present.

    Raises:
        InvalidInputError: ``fn`` moves tensors to another device, or makes no real numbers of them.
    """
    name = type(module).__name__
    try:
        probe = fn(torch.zeros(1, dtype=now))
    except (RuntimeError, AssertionError, NotImplementedError, TypeError) as error:
        raise InvalidInputError(f"{name} runs on the CPU only and stays there: {error}") from error
    if probe.device.type != "cpu":
        raise InvalidInputError(
            f"{name} runs on the CPU only and cannot be moved to {probe.device}; "
            "leave it out, or move the float model before it is quantized"
        )
    if not probe.dtype.is_floating_point:
        raise InvalidInputError(
            f"{name} takes and returns real numbers and cannot be turned into {probe.dtype}; "
            "use a floating type, such as torch.bfloat16"
        )
    return probe.dtype


def taken_types(float_type: torch.dtype) -> tuple[torch.dtype, ...]:
    """The types that inputs may have besides float32: the module's own, and that of autocast."""
    if torch.is_autocast_enabled("cpu"):
        return (float_type, torch.get_autocast_dtype("cpu"))
    return (float_type,)


def in_float_type(results: Any, float_type: torch.dtype) -> Any:
    """``results`` with their floating tensors in ``float_type``; as they are if it is float32."""
    if float_type is torch.float32:
        return results
    return pytree.tree_map_only(
        torch.Tensor, lambda x: x.to(float_type) if x.is_floating_point() else x, results
    )


def in_float32(values: Any) -> Any:
    """``values`` with their floating tensors in float32; what occurs twice stays one tensor."""
    found: dict[int, torch.Tensor] = {}

    def converted(x: torch.Tensor) -> torch.Tensor:
        if not x.is_floating_point():
            return x
        if id(x) not in found:
            found[id(x)] = x.float()
        return found[id(x)]

    return pytree.tree_map_only(torch.Tensor, converted, values)


class Int8Module(nn.Module):
    """A module whose state is int8 codes and float32 scales, whatever type it takes and returns.

    ``.half()`` and the like change that type only.
    """

    _float_type = torch.float32

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        float_type = float_type_after(self, fn, self._float_type)
        if float_type != self._float_type:
            self._float_type = float_type
            return self
        if fn(torch.zeros(1, dtype=torch.float32)).dtype is not torch.float32:
            return self  # it was told so before
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]

    def _converts(self, x: Any) -> bool:
        """Whether ``x`` is to be converted to float32, and the result back to its type."""
        if isinstance(x, Proxy) and self._float_type is not torch.float32:
            name = str(self._float_type).removeprefix("torch.")
            raise UnsupportedError(
                f"{type(self).__name__} takes {name} besides float32, which torch.fx does not see"
            )
        return (
            isinstance(x, torch.Tensor)
            and x.dtype is not torch.float32
            and x.dtype in taken_types(self._float_type)
        )


# --- any module that computes in float32 ---


def float_type_of(module: nn.Module) -> torch.dtype:
    """The floating type that ``module`` returns, as ``give_float_type`` or ``.to`` told it."""
    if isinstance(module, Int8Module):
        return module._float_type
    told = (hook for hook in module._forward_hooks.values() if isinstance(hook, _ResultsIn))
    return next((hook.float_type for hook in told), torch.float32)


def give_float_type(module: nn.Module, float_type: torch.dtype) -> None:
    """Let ``module``, which computes in float32, take and return ``float_type``."""
    if isinstance(module, Int8Module):
        if module._float_type is not float_type:  # else it would be its tensors that are converted
            module.to(float_type)
        return
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for number in [n for n, hook in hooks.items() if is_type_hook(hook)]:
            del hooks[number]
            module._forward_pre_hooks_with_kwargs.pop(number, None)
    if float_type is not torch.float32:
        module.register_forward_pre_hook(_inputs_in_float32, with_kwargs=True)
        module.register_forward_hook(_ResultsIn(float_type))


@contextlib.contextmanager
def of_float_type(module: nn.Module, float_type: torch.dtype) -> Iterator[None]:
    """A block in which ``module`` takes and returns ``float_type``."""
    before = float_type_of(module)
    give_float_type(module, float_type)
    try:
        yield
    finally:
        give_float_type(module, before)


def is_type_hook(hook: object) -> bool:
    """Whether ``hook`` is one of those by which a module takes and returns another type."""
    return hook is _inputs_in_float32 or isinstance(hook, _ResultsIn)


def _inputs_in_float32(module: nn.Module, args: Any, kwargs: Any) -> Any:
    return in_float32((args, kwargs))


class _ResultsIn:
    def __init__(self, float_type: torch.dtype) -> None:
        self.float_type = float_type

    def __call__(self, module: nn.Module, args: Any, results: Any) -> Any:
        return in_float_type(results, self.float_type)


# --- gradients ---


def asks_for_gradient(x: Any) -> bool:
    """Whether a float model would keep what it needs for the gradient of ``x``."""
    return (
        isinstance(x, torch.Tensor)  # a proxy of torch.fx is none
        and x.requires_grad
        and torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
    )


def without_gradient(results: Any, name: str, *inputs: torch.Tensor) -> Any:
    """``results`` of the int8 module called ``name``, through which ``backward`` raises."""
    return pytree.tree_map_only(
        torch.Tensor,
        lambda x: _Refusing.apply(name, x, *inputs) if x.is_floating_point() else x,  # type: ignore[no-untyped-call]
        results,
    )


class _Refusing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: str, result: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
        ctx.name = name
        return result.view_as(result)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise UnsupportedError(
            f"no gradient flows through {ctx.name}, which computes in int8; train the float model "
            "(or with x86quant.prepare_qat) and quantize it then, freeze what stands before this "
            "layer by requires_grad_(False), or call it under torch.no_grad()"
        )
