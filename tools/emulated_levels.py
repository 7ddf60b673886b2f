"""Runs tests at levels that this CPU lacks: AVX-VNNI on AVX2, AMX on AVX512-VNNI.

    python -m tools.emulated_levels
    python -m tools.emulated_levels tests/runtime/test_runtime.py -k dynamic
    python -m tools.emulated_levels tests -n auto

The whole extension is built once more, with the instructions of these levels as functions
(``kernels/native/emulated_tiles.h``), beside a copy of the package whose ``cpu()`` claims to see
them; pytest runs there, with the tests of native kernels unless others are named. Only the native
kernels are emulated: oneDNN and FBGEMM look at the real CPU. What it shows is right or wrong; the
time it takes says nothing.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUILD = Path(tempfile.gettempdir()) / f"x86quant-emulated-{os.getuid()}"
TESTS = (
    "tests/kernels/test_native_kernels.py",
    "tests/kernels/test_native_ops.py",
    "tests/kernels/test_row_kernels.py",
    "tests/kernels/test_attention_kernels.py",
    "tests/kernels/test_float_kernels.py",
    "tests/kernels/test_graph_kernels.py",
    "tests/runtime/test_runtime.py",
    "tests/runtime/test_steps.py",
)


# What is emulated needs what the kernels around it use.
_CLAIM = """

# Of tools/emulated_levels.py, in its copy of the package alone.
_EMULATED = {"avx_vnni": "avx2", "amx_int8": "avx512_vnni"}
_seen_by_libraries = _confirmed_by_torch


def _confirmed_by_torch(found: Cpu, capabilities: Mapping[str, Any]) -> Cpu:
    found = _seen_by_libraries(found, capabilities)
    claimed = {new for new, needed in _EMULATED.items() if needed in found.features}
    features = found.features | claimed
    return dataclasses.replace(found, features=features, isa=best_level(features))


def _confirmed_by_probe(found: Cpu) -> Cpu:
    return found
"""


def main(arguments: list[str]) -> int:
    """Build, run pytest with ``arguments``, and return its status."""
    lib = BUILD / "lib"
    folders = [f"--build-base={BUILD / 'base'}", f"--build-lib={lib}"]
    flags = f"{os.environ.get('CFLAGS', '')} -DXQ_EMULATED".strip()
    subprocess.run(
        [sys.executable, "setup.py", "-q", "build", *folders],
        cwd=ROOT, env={**os.environ, "CFLAGS": flags}, check=True,
    )  # fmt: skip
    detection = lib / "x86quant" / "hardware" / "cpu.py"
    text = (ROOT / "x86quant" / "hardware" / "cpu.py").read_text()
    detection.write_text(text + _CLAIM)
    # Some tests read sources.
    shutil.copytree(ROOT / "kernels", lib / "x86quant" / "kernels", dirs_exist_ok=True)
    for folder in ("tests", "benchmarks", "examples", "tools", "docs"):
        shutil.rmtree(lib / folder, ignore_errors=True)
        shutil.copytree(ROOT / folder, lib / folder)
    for file in ("pyproject.toml", "README.md", "CONTRIBUTING.md", "CHANGELOG.md"):
        shutil.copy(ROOT / file, lib)
    environment = {**os.environ, "PYTHONPATH": str(lib), "X86QUANT_TESTS_EMULATE": "1"}
    test = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *(arguments or TESTS)]
    return subprocess.run(test, cwd=lib, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
