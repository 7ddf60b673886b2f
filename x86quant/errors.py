"""Every exception x86quant raises on purpose.

::

    X86QuantError
    ├── CpuError           the CPU cannot do what was asked (X86QUANT_ISA, missing feature)
    │   └── CpuTooOldError     it lacks AVX2: models run in plain torch
    ├── RuleError          a rule table is unreadable or wrong; says file, line and remedy
    ├── InvalidInputError  an argument is wrong; says which layer and what to do (a ValueError)
    │   └── ArgumentsError     a call has other arguments than the model takes (a TypeError, too)
    ├── UnsupportedError   x86quant cannot do this with the model; says why, and what to do
    │   └── NoKernelError  no kernel can run this op; names every kernel and its reasons
    ├── MeasurementError   a file of measurements or shapes is wrong; says file, line and remedy
    ├── TuningError        tuning cannot start or go on (another one runs, the disk is full)
    ├── ArtifactError      a model cannot be saved, or a file is damaged, hostile or too new
    ├── FloatOpsError      assert_int8 found float compute that was not allowed (an AssertionError)
    └── ExtensionError     the compiled part is missing or does not fit the installed torch

``X86QuantWarning`` is the category of every warning.
"""

from __future__ import annotations

#: The environment variable that shows tracebacks of what nobody foresaw.
TRACEBACK_VARIABLE = "X86QUANT_TRACEBACK"


class X86QuantError(Exception):
    """Base of every error raised by x86quant."""


class CpuError(X86QuantError, RuntimeError):
    """The CPU, or the ISA level asked for, cannot do this."""


class CpuTooOldError(CpuError):
    """The CPU lacks AVX2, which every kernel needs: models run in plain torch."""


class RuleError(X86QuantError, ValueError):
    """A rule table is unreadable or wrong."""


class InvalidInputError(X86QuantError, ValueError):
    """An argument has the wrong shape, dtype or value."""


class ArgumentsError(InvalidInputError, TypeError):
    """A call's arguments are not those that the model takes.

    Also what Python raises for a function: some code tries a layer with an argument, and without
    if that fails.
    """


class UnsupportedError(X86QuantError, NotImplementedError):
    """x86quant cannot do this with the model."""


class NoKernelError(UnsupportedError):
    """No registered kernel can run this op. In a compiled model torch then does."""


class MeasurementError(X86QuantError, ValueError):
    """A file of measurements, or of shapes to measure, is unreadable or wrong."""


class TuningError(X86QuantError, RuntimeError):
    """A tuning run cannot start or go on."""


class ArtifactError(X86QuantError, ValueError):
    """A model cannot be saved; or a file is damaged, hostile or of another version."""


class FloatOpsError(X86QuantError, AssertionError):
    """Convolutions or matrix products ran in float where int8 was asserted."""


class ExtensionError(X86QuantError, ImportError):
    """The compiled extension is missing or does not load beside this torch."""


class X86QuantWarning(UserWarning):
    """Category of every warning x86quant gives."""


def first_line(error: BaseException) -> str:
    """The kind of any ``error`` and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
