"""On a CPU that is no x86, under a system that is no Linux, models run in plain torch.

Both are pretended: what Python, py-cpuinfo and torch say of the machine is changed, and what only
Unix and Linux have is taken away.
"""

from __future__ import annotations

import sys

import pytest

from tests.stock_tensors import run_python
from x86quant.kernels.native import toolchain

ARM = """
import platform
import torch
import cpuinfo
from cpuinfo import cpuinfo as parts

platform.machine = lambda: "aarch64"
described = {"arch": "ARM_8", "brand_raw": "an ARM", "count": 4, "flags": ["asimd", "fp"]}
parts._get_cpu_info_from_proc_cpuinfo = cpuinfo.get_cpu_info = lambda: dict(described)
torch.cpu.get_capabilities = lambda: {"architecture": "aarch64", "num_physical_cores": 4}
"""

NO_UNIX = """
import os, sys, tempfile

for name in ("fcntl", "resource", "pwd", "grp", "termios"):
    sys.modules[name] = None
del os.sched_getaffinity, os.getuid
"""

WORK = """
import warnings
from torch import nn
import x86quant
from x86quant.cli import main

with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 5)).eval()
    x = torch.randn(4, 3, 8, 8)
    for mode in ("static", "dynamic"):
        quantized = x86quant.quantize(net, [x], mode=mode, progress=False)
        with torch.no_grad():
            y = quantized(x)
            assert float((y - net(x)).abs().max()) < 0.1 * float(y.abs().max())
            with tempfile.TemporaryDirectory() as folder:
                x86quant.save(quantized, folder + "/net.x86q")
                assert torch.equal(x86quant.load(folder + "/net.x86q")(x), y)
assert main(["info"]) == 0
print({str(w.message) for w in caught if issubclass(w.category, x86quant.X86QuantWarning)})
"""


@pytest.mark.parametrize("system", [NO_UNIX, "import tempfile\n"], ids=["not unix", "linux"])
def test_models_run_in_plain_torch(system: str) -> None:
    done = run_python("import torch, cpuinfo\n" + system + ARM + WORK)
    assert done.returncode == 0, done.stderr
    sentence = "x86quant's kernels are for x86-64 CPUs, and this one is aarch64."
    assert sentence in done.stdout.splitlines()[-1]
    assert "needs a CPU with AVX2" not in done.stdout
    assert f"{sentence} Models run in plain torch" in done.stdout


def test_the_compiled_part_is_left_out_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    assert toolchain.why_not() is None or "compiler" in str(toolchain.why_not())
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(toolchain.platform, "machine", lambda: "arm64")
        assert "this one is arm64" in str(toolchain.why_not())
    monkeypatch.setattr(sys, "platform", "darwin")
    assert "this is darwin" in str(toolchain.why_not())
