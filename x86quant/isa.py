"""Instruction-set levels, and capping this process to one of them with ``X86QUANT_ISA``.

Imported by ``import x86quant`` itself, so it imports next to nothing.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from x86quant.errors import CpuError

VARIABLE = "X86QUANT_ISA"


@dataclass(frozen=True)
class Level:
    """One instruction-set level.

    Attributes:
        features: what a CPU of this level has, and all that a CPU capped to it may use.
        environment: what caps each library to it; all are read when the library first asks.
    """

    features: frozenset[str]
    environment: tuple[tuple[str, str], ...]


def _level(features: str, onednn: str, fbgemm: str, aten: str) -> Level:
    environment = {
        "ONEDNN_MAX_CPU_ISA": onednn,
        "FBGEMM_ENABLE_INSTRUCTIONS": fbgemm,
        "ATEN_CPU_CAPABILITY": aten,
    }
    return Level(frozenset(features.split()), tuple(environment.items()))


# From the lowest to the highest; avx_vnni and avx512 are siblings. FBGEMM has no AVX-VNNI
# kernels and calls AVX512-VNNI "AVX512_E1".
LEVELS: dict[str, Level] = {
    "avx2": _level("avx2", "AVX2", "AVX2", "avx2"),
    "avx512": _level("avx2 avx512", "AVX512_CORE", "AVX512", "avx512"),
    "avx_vnni": _level("avx2 avx_vnni", "AVX2_VNNI", "AVX2", "avx2"),
    "avx512_vnni": _level("avx2 avx512 avx512_vnni", "AVX512_CORE_VNNI", "AVX512_E1", "avx512"),
    "amx_int8": _level(
        "avx2 avx512 avx512_vnni amx_int8", "AVX512_CORE_AMX", "AVX512_E1", "avx512"
    ),
}
# With 512-bit VNNI, the 256-bit kind adds nothing that a kernel here would use.
_ALSO_ALLOWED = {"avx512_vnni": {"avx_vnni"}, "amx_int8": {"avx_vnni"}}


def best_level(features: frozenset[str]) -> str:
    """The highest level whose features are all there.

    Raises:
        CpuError: there is not even AVX2.
    """
    for name, level in reversed(LEVELS.items()):
        if level.features <= features:
            return name
    raise CpuError(
        "x86quant needs a CPU with AVX2 (Intel Haswell, AMD Zen or later) and an operating "
        "system, or hypervisor, that lets programs use it."
    )


def capped_features(features: frozenset[str], isa: str) -> frozenset[str]:
    """Those of ``features`` that a process capped to ``isa`` may use."""
    return features & (LEVELS[isa].features | _ALSO_ALLOWED.get(isa, frozenset()))


def forced_level() -> str | None:
    """The level ``X86QUANT_ISA`` names, None when it is not set.

    Raises:
        CpuError: it names no level.
    """
    wanted = os.environ.get(VARIABLE)
    if not wanted:
        return None
    if wanted not in LEVELS:
        raise CpuError(f"{VARIABLE}={wanted} is no level; use one of {', '.join(LEVELS)}.")
    return wanted


def apply_isa_cap() -> None:
    """Cap oneDNN, FBGEMM and ATen to ``X86QUANT_ISA``, where that is set.

    They read these variables when they first look at the CPU, so this must run before the
    first operator does. ``x86quant.cpu()`` checks that it did.
    """
    isa = forced_level()
    if isa is not None:
        os.environ.update(LEVELS[isa].environment)
