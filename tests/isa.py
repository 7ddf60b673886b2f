"""ISA levels for tests: what this CPU has, and how a subprocess is held to a lower one."""

from __future__ import annotations

import dataclasses
import os

import torch

# Level -> its features, and what caps oneDNN and FBGEMM at it. FBGEMM knows no AVX-VNNI.
_LEVELS = {
    "avx2": ({"avx2"}, "AVX2", "AVX2"),
    "avx_vnni": ({"avx2", "avx_vnni"}, "AVX2_VNNI", "AVX2"),
    "avx512": ({"avx2", "avx512"}, "AVX512_CORE", "AVX512"),
    "avx512_vnni": ({"avx2", "avx512", "avx512_vnni"}, "AVX512_CORE_VNNI", "AVX512_E1"),
    "amx_int8": (
        {"avx2", "avx512", "avx512_vnni", "amx_int8"},
        "AVX512_CORE_AMX",
        "AVX512_E1",
    ),
}
LEVELS = tuple(_LEVELS)


@dataclasses.dataclass(frozen=True)
class FakeCpu:
    """As much of a Cpu as kernels look at."""

    isa: str
    features: frozenset[str]

    @classmethod
    def at(cls, level: str) -> FakeCpu:
        return cls(level, frozenset(_LEVELS[level][0]))


def this_cpu() -> FakeCpu:
    """The CPU at the level in force: X86QUANT_ISA, else the highest that it has."""
    forced = os.environ.get("X86QUANT_ISA")
    return FakeCpu.at(forced or [level for level in LEVELS if has(level)][-1])


def has(level: str) -> bool:
    """Whether this machine can run ``level``."""
    present = {name for name, value in torch.cpu.get_capabilities().items() if value is True}
    if "avx512_f" in present:
        present.add("avx512")
    return _LEVELS[level][0] <= present


def environment(level: str) -> dict[str, str]:
    """The environment of a subprocess held to ``level``."""
    _, onednn, fbgemm = _LEVELS[level]
    return {
        **os.environ,
        "X86QUANT_ISA": level,
        "ONEDNN_MAX_CPU_ISA": onednn,
        "FBGEMM_ENABLE_INSTRUCTIONS": fbgemm,
        "OMP_NUM_THREADS": "1",
    }
