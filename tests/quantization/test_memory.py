"""Memory that is freed while ``quantize`` runs."""

from __future__ import annotations

import ctypes
import resource
from pathlib import Path

import pytest
import torch

from x86quant.quantization.memory import memory_kept

pytestmark = pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "mallopt"), reason="this C library is not glibc"
)
_VALUES, _MB = 64 << 20, 1 << 20


def faults_of_a_large_tensor() -> int:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(_VALUES)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_it_is_taken_again_and_goes_back_at_the_end() -> None:
    before = resident()
    with memory_kept():
        faults = [faults_of_a_large_tensor() for _ in range(4)]
        assert faults[-1] < faults[0] / 10
        assert resident() > before + 200 * _MB
    assert resident() < before + 100 * _MB
