"""How an op is registered: one schema, one function for the CPU and for fake tensors."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import torch

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


def register(
    arguments: str,
    cpu: Callable[..., Any] | None = None,
    fake: Callable[..., Any] | None = None,
    returns: str = "Tensor",
) -> Callable[[_F], _F]:
    """Register the decorated function as ``x86quant::<its name>(arguments) -> returns``.

    The function is plain torch, so it serves fake tensors too: shapes, strides and errors of the
    fake kernel cannot drift from those of the real one. ``cpu`` is what runs real ones faster, and
    ``fake`` what tells the shape of a result with fewer questions about sizes: it has those of the
    function's parameters that it reads.
    """

    def decorate(function: _F) -> _F:
        name = function.__name__
        SCHEMAS[name] = f"{name}({arguments}) -> {returns}"
        if cpu is not None:
            FASTER.add(name)
        _LIBRARY.define(SCHEMAS[name], tags=(torch.Tag.pt2_compliant_tag,))
        _LIBRARY.impl(name, cpu or function, "CPU")
        shapes = function if fake is None else _with_all_arguments(fake, function)
        torch.library.register_fake(f"{NAMESPACE}::{name}", shapes, lib=_LIBRARY)
        return function

    return decorate


def _with_all_arguments(fake: Callable[..., Any], function: Callable[..., Any]) -> Any:
    """``fake``, called as ``function`` is, of whose arguments it gets those that it names."""
    signature, read = inspect.signature(function), list(inspect.signature(fake).parameters)
    if read == list(signature.parameters):
        return fake

    def call(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        return fake(*(given.arguments[name] for name in read))

    return call
