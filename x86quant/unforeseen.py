"""Errors of x86quant's own, which nobody foresaw: a model goes on in float and says so.

What a user's code raises is passed on as it is, and so is everything if ``X86QUANT_TRACEBACK`` is
set, as it is in tests.
"""

from __future__ import annotations

import os
import sysconfig
import traceback
from pathlib import Path

import torch

from x86quant.errors import TRACEBACK_VARIABLE, X86QuantError, first_line

_OWN = Path(__file__).parent
_TORCH = Path(torch.__file__).parent
_PYTHON = Path(sysconfig.get_paths()["stdlib"])


def is_own(error: Exception) -> bool:
    """Whether ``error`` is one of x86quant's own, to be described instead of raised.

    That is so if of the code that led to it the last was x86quant's, not counting torch's and
    Python's.
    """
    if isinstance(error, X86QuantError) or os.environ.get(TRACEBACK_VARIABLE):
        return False
    for frame, _ in reversed([*traceback.walk_tb(error.__traceback__)]):
        name = frame.f_code.co_filename
        path = Path(name)
        if path.is_relative_to(_OWN):
            return True
        pythons = path.is_relative_to(_PYTHON) and "site-packages" not in path.parts
        generated = name.startswith("<")
        if not generated and not pythons and not path.is_relative_to(_TORCH):
            return False
    return False


def described(error: Exception) -> str:
    """One sentence about such an error."""
    return (
        f"x86quant failed in a way that nobody foresaw ({first_line(error)}); with "
        f"{TRACEBACK_VARIABLE}=1 it shows the traceback, which is worth a report"
    )
