"""How an op is registered: its schema, its definition, and what stands beside that."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch

from x86quant.plain_ops import PLAIN

NAMESPACE = "x86quant"

#: Every registered schema, by op name, in order of registration.
SCHEMAS: dict[str, str] = {}
#: Ops that something faster than plain torch runs, where the extension is there.
FASTER: set[str] = set()

# torch.library is untyped.
_LIBRARY: Any = torch.library.Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]

_F = TypeVar("_F", bound=Callable[..., Any])

# Shared tails of schemas, so that the same argument has the same name and default everywhere.
X_QPARAMS = "float x_scale, int x_zp"
OUT_QPARAMS = "float out_scale, int out_zp"
CLAMP = "int lo=0, int hi=255"
LUT = "Tensor? lut=None"


Function = Callable[..., Any]


def register(
    arguments: str,
    *,
    checks: Sequence[Function] = (),
    shapes: Function | None = None,
    native: Function | None = None,
    returns: str = "Tensor",
) -> Callable[[_F], _F]:
    """Register the decorated function as ``x86quant::<its name>(arguments) -> returns``.

    The function is plain torch: the op's definition, which also serves fake tensors where no
    ``shapes`` are given. The others are functions of those of its parameters that they name, of all
    of them in order if they take any number, and of ``op``, the name of the op, if they ask for it.

    Args:
        arguments: the schema's.
        checks: raise what is wrong with the arguments, in every kernel and before anything else.
        shapes: an empty result of the right sizes, with fewer questions about sizes.
        native: the result by native code; None where there is none for such arguments.
        returns: the schema's.
    """

    def decorate(function: _F) -> _F:
        name = function.__name__
        SCHEMAS[name] = f"{name}({arguments}) -> {returns}"
        checked = [_reading(check, function) for check in checks]
        plain = _checked(function, checked)
        kernel, fake = plain, plain
        PLAIN[name] = plain
        if native is not None:
            FASTER.add(name)
            kernel = _checked(_or_else(_reading(native, function), function), checked)
        if shapes is not None:
            fake = _checked(_reading(shapes, function), checked)
        _LIBRARY.define(SCHEMAS[name], tags=(torch.Tag.pt2_compliant_tag,))
        _LIBRARY.impl(name, kernel, "CPU")
        torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_LIBRARY)
        return cast(_F, plain)

    return decorate


def _checked(function: Function, checks: Sequence[Function]) -> Function:
    """``function`` behind ``checks``."""
    if not checks:
        return function

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        for check in checks:
            check(*args, **kwargs)
        return function(*args, **kwargs)

    return call


def _or_else(native: Function, function: Function) -> Function:
    def call(*args: Any, **kwargs: Any) -> Any:
        result = native(*args, **kwargs)
        return function(*args, **kwargs) if result is None else result

    return call


def _reading(read: Function, function: Function) -> Function:
    """``read``, called as ``function`` is, of whose arguments it gets those that it names."""
    parameters = list(inspect.signature(function).parameters.values())
    places = {parameter.name: i for i, parameter in enumerate(parameters)}
    defaults = [parameter.default for parameter in parameters]
    names = list(inspect.signature(read).parameters)
    if "op" in names:
        read = functools.partial(read, op=function.__name__)
        names.remove("op")
    takes_any = any(p.kind is p.VAR_POSITIONAL for p in inspect.signature(read).parameters.values())
    wanted = [] if takes_any else [(name, places[name]) for name in names]

    def call(*args: Any, **kwargs: Any) -> Any:
        values = [*args, *defaults[len(args) :]]
        for name, value in kwargs.items():
            values[places[name]] = value
        return read(*values) if takes_any else read(**{n: values[place] for n, place in wanted})

    return call
