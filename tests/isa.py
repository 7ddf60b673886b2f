"""ISA levels for tests: a CPU of each, and how a subprocess is held to one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.native import capi
from x86quant import extension
from x86quant.hardware.cpu import Cpu, cpu
from x86quant.hardware.isa import LEVELS as _LEVELS

LEVELS = tuple(_LEVELS)


def at(level: str) -> Cpu:
    """A CPU of this level, with AVX-VNNI too where real ones of the level have it."""
    extra = {"avx_vnni"} if level == "amx_int8" else set()
    return Cpu("GenuineIntel", level, 6, 143, 0, _LEVELS[level].features | extra, level)


def bare() -> Cpu:
    """A CPU with none of the features."""
    return Cpu("GenuineIntel", "bare", 6, 0, 0, frozenset(), "none")


def has(level: str) -> bool:
    """Whether this process can be held to ``level``."""
    return _LEVELS[level].features <= cpu().features


def skip_unless_lower(level: str) -> None:
    """Skip a test that runs others held to ``level``, where those in this process show no less."""
    if not has(level):
        pytest.skip(f"this CPU has no {level}")
    if level == cpu().isa:
        pytest.skip(f"{level} is what the tests in this process run at")


def environment(level: str) -> dict[str, str]:
    """The environment of a subprocess held to ``level``."""
    return {**os.environ, "X86QUANT_ISA": level, "OMP_NUM_THREADS": "1"}


def in_bfloat16(isa: str) -> bool:
    """Whether attention of this level rounds to bfloat16 on this CPU."""
    return bool(_installed().lib.xq_attention_in_bfloat16(capi.ISAS[isa]))


def coded_keys(isa: str) -> int:
    """From how many keys on attention of this level multiplies codes on this CPU; 0: never."""
    return int(_installed().lib.xq_attention_coded_keys(capi.ISAS[isa]))


def _installed() -> capi.Library:
    return capi.Library(Path(extension.__file__).with_name("_C.so"))
