"""Instruction-set levels, and capping this process to one of them with ``X86QUANT_ISA``.

Imported by ``import x86quant`` itself, so it imports next to nothing.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from x86quant.errors import CpuError, CpuTooOldError

VARIABLE = "X86QUANT_ISA"
_X86_64 = ("x86_64", "AMD64")


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

# What values of the libraries' own variables leave of the CPU, for int8. Of two names the first
# that is not empty counts. A value that is not here caps nothing, or the library ignores it.
_LIBRARY_CAPS: dict[tuple[str, ...], dict[str, str]] = {
    ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"): {
        "SSE41": "avx2",
        "AVX": "avx2",
        "AVX2": "avx2",
        "AVX2_VNNI": "avx_vnni",
        "AVX2_VNNI_2": "avx_vnni",
        "AVX512_CORE": "avx512",
        "AVX512_CORE_VNNI": "avx512_vnni",
        "AVX512_CORE_BF16": "avx512_vnni",
        "AVX512_CORE_FP16": "avx512_vnni",
        "AVX10_1_512": "avx512_vnni",
        "AVX10_2": "avx512_vnni",
        "AVX10_2_512": "avx512_vnni",
    },
    # FBGEMM never uses AMX, so its AVX512-VNNI caps nothing.
    ("FBGEMM_ENABLE_INSTRUCTIONS",): {"AVX2": "avx2", "AVX512": "avx512", "AVX512_256": "avx512"},
}


def best_level(features: frozenset[str]) -> str:
    """The highest level whose features are all there.

    Raises:
        CpuTooOldError: there is not even AVX2.
    """
    for name, level in reversed(LEVELS.items()):
        if level.features <= features:
            return name
    import platform  # not needed where all is well

    if (machine := platform.machine()) not in _X86_64:
        raise CpuTooOldError(f"x86quant's kernels are for x86-64 CPUs, and this one is {machine}.")
    raise CpuTooOldError(
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
    given = os.environ.get(VARIABLE, "")
    wanted = given.strip().lower()
    if not wanted:
        return None
    if wanted not in LEVELS:
        raise CpuError(f"{VARIABLE}={given} is no level; use one of {', '.join(LEVELS)}.")
    return wanted


def library_caps() -> dict[str, str]:
    """Levels that oneDNN and FBGEMM are held to by their own variables: "NAME=value" -> level."""
    caps: dict[str, str] = {}
    for names, levels in _LIBRARY_CAPS.items():
        name = next((name for name in names if os.environ.get(name)), None)
        if name is not None and (level := levels.get(os.environ[name].upper())):
            caps[f"{name}={os.environ[name]}"] = level
    return caps


def apply_isa_cap() -> None:
    """Cap oneDNN, FBGEMM and ATen to ``X86QUANT_ISA``, where that is set.

    It wins over the libraries' own variables. They read these when they first look at the CPU,
    so this must run before the first operator does.
    """
    isa = forced_level()
    if isa is not None:
        os.environ.update(LEVELS[isa].environment)


def check_isa_cap(isa: str, aten: str) -> None:
    """See that the libraries were capped to ``isa``, as far as that can be seen.

    Args:
        isa: what ``X86QUANT_ISA`` says now.
        aten: what ATen uses. It tells AVX2 from AVX-512 only; oneDNN and FBGEMM tell nothing.

    Raises:
        CpuError: the variable came too late.
    """
    environment = dict(LEVELS[isa].environment)
    changed = sorted(name for name, value in environment.items() if os.environ.get(name) != value)
    if changed:
        raise CpuError(
            f"{VARIABLE}={isa} came too late: it was set after x86quant was imported, or "
            f"{', '.join(changed)} changed since. Set it before Python starts."
        )
    if environment["ATEN_CPU_CAPABILITY"] == "avx2" and aten == "AVX512":
        raise CpuError(
            f"{VARIABLE}={isa} came too late: torch had already looked at the CPU and uses "
            f"{aten}. Set it before Python starts, or import x86quant before the first operator."
        )


def cap_onednn_below_amx() -> None:
    """Keep oneDNN off AMX that is advertised and faults, leaving it all else.

    Like every cap, this holds only if oneDNN has not looked at the CPU yet.
    """
    if not any(name.startswith(("ONEDNN_", "DNNL_")) for name in library_caps()):
        os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX512_CORE_FP16"
