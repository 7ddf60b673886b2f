"""The levels at which native kernels are tested, and the library that ships."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from tests.native import capi
from x86quant import extension
from x86quant.hardware import amx_probe

# Of the CPU itself, whatever X86QUANT_ISA says: the library that is tested here does not read it.
CPU_FLAGS = {name for name, there in torch.cpu.get_capabilities().items() if there is True}


#: By what tools/emulated_levels.py builds.
EMULATED = (
    {"avx_vnni", "amx_tile", "amx_int8"} if os.environ.get("X86QUANT_TESTS_EMULATE") else set()
)


NEEDED = {
    "avx2": {"avx2", "fma3"},
    "avx_vnni": {"avx2", "fma3", "avx_vnni"},
    "avx512": {"avx512_f", "avx512_bw", "avx512_vl", "avx512_dq"},
    "avx512_vnni": {"avx512_f", "avx512_bw", "avx512_vl", "avx512_dq", "avx512_vnni"},
    "amx_int8": {"avx512_vnni", "avx512_vbmi", "amx_tile", "amx_int8"},
}


ISAS = [
    isa
    for isa, flags in NEEDED.items()
    if flags - EMULATED <= CPU_FLAGS and (isa != "amx_int8" or EMULATED or amx_probe.permitted())
]


@pytest.fixture(scope="session")
def lib() -> capi.Library:
    library = capi.Library(Path(extension.__file__).with_name("_C.so"))  # what ships
    assert library.enable_amx() == ("amx_int8" in ISAS)
    return library
