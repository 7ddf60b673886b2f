"""A CPU shown as another one: what programs then see (``tools/masked_cpu.py``)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tools.masked_cpu import MASKS, environment, main, why_not

LEVELS = {
    "Broadwell": "avx2",
    "Zen 3": "avx2",
    "Zen 4": "avx512_vnni",
    "Alder Lake": "avx_vnni",
    "Skylake server": "avx512",
    "Cascade Lake": "avx512_vnni",
}

_SEEN = """
import json, torch
from x86quant.hardware.cpu import cpu
seen = cpu()
print(json.dumps([seen.vendor, seen.family, seen.model, seen.stepping, seen.name, seen.isa,
                  seen.l1d, seen.l2, torch.cpu.get_capabilities().get("avx512_f", False)]))
"""


def needs(name: str) -> None:
    if reason := why_not(name):
        pytest.skip(reason)


def run(name: str, folder: Path, code: str, *options: str) -> subprocess.CompletedProcess[str]:
    unset = {"X86QUANT_ISA", "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA"}
    env = {key: value for key, value in os.environ.items() if key not in unset}
    return subprocess.run(
        [sys.executable, *options, "-c", code],
        env={**env, **environment(name, folder)},
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("name", MASKS)
def test_programs_see_the_other_cpu(name: str, tmp_path: Path) -> None:
    needs(name)
    done = run(name, tmp_path, _SEEN)
    assert done.returncode == 0, done.stderr
    vendor, family, model, stepping, brand, isa, l1d, l2, avx512 = json.loads(done.stdout)
    mask = MASKS[name]
    assert (vendor, family, model, stepping) == (
        mask.vendor,
        mask.family,
        mask.model,
        mask.stepping,
    )
    assert brand == mask.brand
    assert isa == LEVELS[name]
    assert (l1d, l2) == (mask.caches[0] * 1024, mask.caches[1] * 1024)
    assert avx512 == ("avx512f" not in mask.lacks)


def test_programs_that_a_program_starts_see_it_too(tmp_path: Path) -> None:
    needs("Zen 3")
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {_SEEN!r}], check=True)"
    done = run("Zen 3", tmp_path, code)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)[0] == "AuthenticAMD"


def test_a_real_fault_is_the_programs_own(tmp_path: Path) -> None:
    """Handlers that a program sets are kept for its own faults, and CPUID is answered still."""
    needs("Zen 3")
    code = (
        "import faulthandler; faulthandler.enable()\n"
        "from x86quant.hardware.cpuid import identity\n"
        "assert identity()['vendor_id_raw'] == 'AuthenticAMD'\n"
        "faulthandler._sigsegv()"
    )
    done = run("Zen 3", tmp_path, code)
    assert done.returncode == -signal.SIGSEGV
    assert "Fatal Python error: Segmentation fault" in done.stderr
    without = run("Zen 3", tmp_path, "import ctypes; ctypes.string_at(0)", "-X", "faulthandler=0")
    assert without.returncode == -signal.SIGSEGV


def test_a_cpu_that_cannot_be_shown_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tools.masked_cpu._flags", lambda: frozenset({"cpuid_fault", "avx2"}))
    assert main(["Zen 4", "true"]) == 3
    assert "lacks avx512_vnni, avx512f" in capsys.readouterr().err
    monkeypatch.setattr("tools.masked_cpu._flags", frozenset)
    assert main(["Zen 3", "true"]) == 3
    assert "cannot let CPUID fault" in capsys.readouterr().err
