"""On a CPU without AVX2 the package imports, says what is missing, and runs in plain torch.

Such a CPU is pretended here, and real under ``python -m tests.emulated --cpu Nehalem``.
"""

from __future__ import annotations

import pytest

from tests.stock_tensors import run_python

# What torch says of a CPU is believed; taking AVX2 from it makes this an older one.
OLD = """
import warnings
import torch

capabilities = torch.cpu.get_capabilities()
torch.cpu.get_capabilities = lambda: {**capabilities, "avx2": False}
import x86quant
"""

NET = """
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=8), nn.Flatten(),
                    nn.Linear(8 * 36, 5)).eval()
x = torch.randn(4, 3, 10, 10)

def close(a, b):
    return float((a - b).abs().max()) < 0.1 * float(b.abs().max())
"""


def run_old(code: str) -> str:
    """The output of ``code`` on a CPU without AVX2."""
    done = run_python(OLD + code)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_imports_and_says_what_is_missing() -> None:
    said = run_old(
        """
try:
    x86quant.cpu()
except x86quant.CpuTooOldError as error:
    print(error)
from x86quant.cli import main
assert main(["info"]) == 0
assert main(["info", "--json"]) == 0
"""
    )
    sentence = said.splitlines()[0]
    assert "needs a CPU with AVX2" in sentence
    assert said.count(sentence) == 3
    assert "Models run in plain torch" in said


@pytest.mark.parametrize("mode", ["static", "dynamic", "weight_only"])
def test_quantize_runs_in_plain_torch(mode: str) -> None:
    said = run_old(
        NET
        + f"""
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    quantized = x86quant.quantize(net, [x], mode={mode!r}, progress=False)
    with torch.no_grad():
        assert close(quantized(x), net(x))
print([str(w.message) for w in caught if issubclass(w.category, x86quant.X86QuantWarning)])
"""
    )
    assert "plain" in said
    assert "needs a CPU with AVX2" in said


def test_compile_save_and_load_run_in_plain_torch() -> None:
    run_old(
        NET
        + """
import tempfile
from torch.ao.quantization import get_default_qconfig_mapping
from torch.ao.quantization.quantize_fx import convert_to_reference_fx, prepare_fx

prepared = prepare_fx(net, get_default_qconfig_mapping("onednn"), (x,))
prepared(x)
converted = convert_to_reference_fx(prepared)
compiled = x86quant.compile(converted, (x,))
with torch.no_grad():
    y = compiled(x)
    assert close(y, converted(x))
    with tempfile.TemporaryDirectory() as folder:
        x86quant.save(compiled, folder + "/net.safetensors")
        assert torch.equal(x86quant.load(folder + "/net.safetensors")(x), y)
"""
    )


def test_wrong_levels_are_still_errors() -> None:
    done = run_python(OLD + "x86quant.cpu()", X86QUANT_ISA="avx9")
    assert "avx9 is no level" in done.stderr


def test_loading_the_compiled_part_runs_nothing_newer() -> None:
    """Whoever loads it without asking first is not ended; only an emulated CPU can show this."""
    done = run_python(
        """
from pathlib import Path
import torch, x86quant
torch.ops.load_library(Path(x86quant.__file__).with_name("_C.so"))
"""
    )
    assert done.returncode == 0, done.stderr
