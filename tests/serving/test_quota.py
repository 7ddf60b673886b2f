"""The C++ library and the package read the same quotas, from files as Linux shows them."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from tests.cpp import program
from x86quant.hardware.allowance import cpu_quota

_MAIN = """
#include <cstdio>
#include "serving/quota.h"
int main(int count, char** roots) {
  for (int i = 1; i < count; ++i) std::printf("%.17g\\n", x86quant::serving::cpu_quota(roots[i]));
}
"""


def test_quotas(tmp_path: Path) -> None:
    cases = json.loads((Path(__file__).parents[1] / "allowances.json").read_text())
    roots = []
    for number, case in enumerate(cases):
        roots.append(tmp_path / str(number))
        for name, text in case["files"].items():
            path = roots[-1] / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    quotas = program(tmp_path, _MAIN, ["serving/quota.cpp"])
    told = subprocess.run([quotas, *roots], capture_output=True, text=True, check=True).stdout
    assert [float(line) or None for line in told.split()] == [cpu_quota(root) for root in roots]
    assert {case["quota"] for case in cases} > {None, 0.5}
