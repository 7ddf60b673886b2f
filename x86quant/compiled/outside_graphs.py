"""``outside_graphs``: ``torch.compiler.disable``, at no cost until something is compiled.

That decorator imports the compiler, which takes as long as importing torch: a process that only
loads a model and runs it would spend most of its start on it.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


def outside_graphs(function: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
    """``function``, which torch.compile does not look into: it breaks the graph instead."""

    disabled: list[Any] = []  # once there is a compiler

    @functools.wraps(function)
    def call(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        if not disabled:
            disabled.append(torch.compiler.disable(function))  # type: ignore[no-untyped-call]
        result: _Result = disabled[0](*args, **kwargs)
        return result

    # What torch.compiler.disable writes on its functions, and the compiler reads.
    call._torchdynamo_disable = True  # type: ignore[attr-defined]
    return call
