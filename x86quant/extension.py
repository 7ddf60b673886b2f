"""Loads the compiled part, ``x86quant._C``, once, when something first needs it."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch

from x86quant.errors import ExtensionError
from x86quant.hardware.cpu import cpu

_REBUILD = "Reinstall with: pip install --no-build-isolation --force-reinstall --no-deps x86quant"


@functools.cache
def load() -> None:
    """Register the compiled ops under ``torch.ops.x86quant``."""
    library = Path(__file__).with_name("_C.so")
    if not library.exists():
        raise ExtensionError(
            f"x86quant was installed without its compiled part ({library} is missing). "
            f"Install a C++ compiler first. {_REBUILD}"
        )
    try:
        torch.ops.load_library(library)  # type: ignore[no-untyped-call]
    except OSError as error:
        raise ExtensionError(
            f"{library} does not fit torch {torch.__version__}: {error}. {_REBUILD}"
        ) from error
    torch.ops.x86quant.set_native_isa(cpu().isa)


@functools.cache
def try_run() -> Callable[[int, tuple[Any, ...]], tuple[torch.Tensor, ...] | None]:
    """What runs a program by its address, past torch's dispatcher.

    It returns None for inputs that the program is not for, and where somebody watches the ops that
    run: a tracer, a mode, a transform.
    """
    return cast(Callable[[int, tuple[Any, ...]], tuple[torch.Tensor, ...] | None], _direct().try_run)


def watch(*dictionaries: dict[str, Any]) -> object:
    """Remembers the tensors in ``dictionaries`` as they are now, for ``unchanged``."""
    return _direct().watch(*dictionaries)


@functools.cache
def unchanged() -> Callable[[object], bool]:
    """What tells whether no tensor under a ``watch`` was replaced or written to since."""
    return cast(Callable[[object], bool], _direct().unchanged)


@functools.cache
def _direct() -> Any:
    """The functions of the extension that Python calls without torch's dispatcher."""
    load()
    return importlib.import_module("x86quant._C")
