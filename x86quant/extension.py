"""Loads the compiled parts once, when something first needs them.

``x86quant._C`` is what everything needs; it runs beside any torch. What the stock engine needs
besides, and the kernels that are torch's own, is a part that belongs to one torch, whose version is
in its name. Another, for one torch and one Python, only makes some calls faster.
"""

from __future__ import annotations

import functools
import importlib
import re
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

from x86quant.errors import CpuTooOldError, ExtensionError, X86QuantWarning
from x86quant.hardware.cpu import cpu

#: The versions of torch that this version of x86quant is tested with.
TESTED = ("2.13", "2.14")

_REBUILD = "Reinstall with: pip install --no-build-isolation --force-reinstall --no-deps x86quant"


@functools.cache
def load() -> None:
    """Load the compiled parts, and register the ops of the stock one where that loads."""
    _load_main()
    _stock_refusal()


def need_stock() -> None:
    """The same; an error that says what is missing unless the stock part has loaded."""
    load()
    if (reason := _stock_refusal()) is not None:
        raise ExtensionError(reason)


def why_no_stock() -> str | None:
    """Why kernels of the stock part cannot run; None if they can, or if nothing compiled can."""
    try:
        load()
    except ExtensionError:  # says more, where it matters
        return None
    return _stock_refusal()


def stock_library() -> Path:
    """Where the stock part for the torch at hand is, if there is one."""
    torch_minor = "_".join(torch.__version__.split(".")[:2])
    return Path(__file__).with_name(f"_stock_torch_{torch_minor}.so")


@functools.cache
def _stock_refusal() -> str | None:
    """Load the stock part, behind the main one; why it does not load, or None."""
    library = stock_library()
    without = "Routing of the stock engine and its FBGEMM and oneDNN kernels need it; all else runs"
    if not library.exists():
        return (
            f"x86quant's part for the stock engine of torch {torch.__version__} is missing "
            f"({library.name}). {without}. {_REBUILD}"
        )
    try:
        torch.ops.load_library(library)  # type: ignore[no-untyped-call]
    except OSError as error:
        what = error.__cause__ or error
        return f"{library} does not fit torch {torch.__version__}: {what}. {without}. {_REBUILD}"
    return None


def _load_main() -> None:
    try:
        here = cpu()
    except CpuTooOldError as error:
        raise ExtensionError(str(error)) from error
    library = Path(__file__).with_name("_C.so")
    if not library.exists():
        raise ExtensionError(
            f"x86quant was installed without its compiled part ({library} is missing). "
            f"Install a C++ compiler first. {_REBUILD}"
        )
    try:
        main = _main()
    except (ImportError, AttributeError) as error:  # of the linker; of what torch lacks
        raise ExtensionError(
            f"{library} does not fit torch {torch.__version__}: {error}. {_REBUILD}"
        ) from error
    if (warning := untested_torch(torch.__version__)) is not None:
        warnings.warn(warning, X86QuantWarning, stacklevel=3)
    in_use = main.set_native_cpu(here.isa, here.l1d or 0, here.l2 or 0)
    if in_use != here.isa:
        warnings.warn(
            f"The native kernels use {in_use} instead of {here.isa}: the CPU lacks a part of what "
            "they need for that (AVX512-VBMI, which a virtual machine may hide), or the operating "
            "system refuses it. The results are the same, more slowly.",
            X86QuantWarning,
            stacklevel=3,
        )


def _main() -> Any:
    return importlib.import_module("x86quant._C")


def is_loaded() -> bool:
    """Whether something has needed it."""
    return load.cache_info().currsize > 0


def untested_torch(present: str) -> str | None:
    """What to say where the torch at hand is newer than those that this was tested with."""
    if _numbers(present) <= max(map(_numbers, TESTED)):
        return None
    return (
        f"This version of x86quant is tested with torch {' and '.join(TESTED)}, and this is torch "
        f"{present}: its compiled part uses only what torch promises to keep, so it should run. "
        "If something fails, look for a newer x86quant, or install "
        f"torch {TESTED[-1]}"
    )


def _numbers(version: str) -> tuple[int, ...]:
    """``2.13.0+cpu`` as (2, 13)."""
    return tuple(int(re.match(r"\d*", part)[0] or 0) for part in version.split(".")[:2])  # type: ignore[index]


def native() -> Any:
    """The main compiled part: programs, packed weights, and kernels on tensors.

    Raises:
        ExtensionError: it is missing, or does not load.
    """
    load()
    return _main()


def fast() -> Any:
    """What tells whether a model changed: of the part for this torch and Python, if there is one.

    ``Watch``, ``unchanged_since`` and ``parts_up_to``, as ``kernels/fast/fast.h`` has them; without
    that part slower ones (``kernels/python/watch.cpp``).
    """
    main = native()
    return _fast_part() or main


@functools.cache
def _fast_part() -> Any | None:
    if "t" in getattr(sys, "abiflags", ""):  # free-threaded: other threads may write what it reads
        return None
    torch_minor = "_".join(torch.__version__.split(".")[:2])
    python = str(sys.implementation.cache_tag).replace("-", "_")
    try:
        return importlib.import_module(f"x86quant._fast_torch_{torch_minor}_{python}")
    except ImportError:  # missing, or not for this very torch
        return None
