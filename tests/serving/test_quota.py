"""The C++ library and the package read the same quotas, from files as Linux shows them."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from x86quant.hardware.allowance import cpu_quota
from x86quant.kernels.native import toolchain

_SERVING = Path(__file__).parents[2] / "kernels" / "serving"
_MAIN = """
#include <cstdio>
#include "quota.h"
int main(int count, char** roots) {
  for (int i = 1; i < count; ++i) std::printf("%.17g\\n", x86quant::serving::cpu_quota(roots[i]));
}
"""


def test_quotas(tmp_path: Path) -> None:
    compiler = shlex.split(toolchain.compiler())
    if shutil.which(compiler[0]) is None:
        pytest.skip("no C++ compiler here")
    cases = json.loads((Path(__file__).parents[1] / "allowances.json").read_text())
    roots = []
    for number, case in enumerate(cases):
        roots.append(tmp_path / str(number))
        for name, text in case["files"].items():
            path = roots[-1] / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    (tmp_path / "main.cpp").write_text(_MAIN)
    sources = [str(tmp_path / "main.cpp"), str(_SERVING / "quota.cpp")]
    program = tmp_path / "quotas"
    flags = [toolchain.STANDARD, "-I", str(_SERVING), "-o", str(program)]
    subprocess.run([*compiler, *flags, *sources], check=True)
    told = subprocess.run([program, *roots], capture_output=True, text=True, check=True).stdout
    assert [float(line) or None for line in told.split()] == [cpu_quota(root) for root in roots]
    assert {case["quota"] for case in cases} > {None, 0.5}
