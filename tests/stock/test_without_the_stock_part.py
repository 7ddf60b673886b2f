"""Where the part for the stock engine was not built for this torch: all else works without it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from x86quant import extension

HIDE = """
import warnings
from pathlib import Path
import torch
import x86quant
from x86quant import extension
from x86quant.errors import ExtensionError, UnsupportedError

warnings.simplefilter("ignore")
extension.stock_library = lambda: Path("_stock_torch_0_1.so")
torch.manual_seed(0)
layers = (torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Conv2d(8, 4, 3))
model = torch.nn.Sequential(*layers).eval()
x = torch.randn(2, 3, 16, 16)
"""

REST = """
int8 = x86quant.quantize(model, [x, x + 1], speed_check=False, progress=False)
x86quant.assert_int8(int8, (x,))
assert {layer.kernel for layer in x86quant.explain(int8).layers} >= {"native"}
x86quant.save(int8, "m.safetensors")
assert torch.equal(x86quant.load("m.safetensors")(x), int8(x))
x86quant.export_program(int8, "m.xq", [x])
linear = torch.nn.Sequential(torch.nn.Linear(64, 64))
dynamic = x86quant.to_dynamic(linear)
x86quant.assert_int8(dynamic, (torch.randn(1, 64),))
"""

STOCK = """
from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx
try:
    x86quant.enable()
except ExtensionError as error:
    print(error)
assert not x86quant.is_enabled()
prepared = prepare_fx(model, x86quant.get_default_qconfig_mapping(), (x,))
prepared(x)
quantized = convert_fx(prepared)
fast = x86quant.compile(quantized, (x,))
fast(x)
assert {layer.kernel for layer in x86quant.explain(fast).layers} >= {"native"}
for name in ("fbgemm", "onednn"):
    with x86quant.override(name, caller="graph"):
        try:
            x86quant.compile(quantized, (x,))(x)
        except UnsupportedError as error:
            print(error)
"""


def without(code: str, folder: Path) -> str:
    command = [sys.executable, "-c", HIDE + code]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_models_quantize_run_and_are_kept(tmp_path: Path) -> None:
    without(REST, tmp_path)


def test_the_stock_engine_and_its_kernels_say_what_is_missing(tmp_path: Path) -> None:
    said = without(STOCK, tmp_path)
    assert said.count("part for the stock engine of torch") == 3, said
    assert said.count("_stock_torch_0_1.so") == 3, said
    assert "Reinstall with: pip install" in said


def test_it_is_there_in_an_ordinary_build() -> None:
    assert extension.why_no_stock() is None


def test_a_file_that_cannot_load_is_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    extension.load()
    broken = tmp_path / "_stock_torch_9_9.so"
    broken.write_text("no library")
    monkeypatch.setattr(extension, "stock_library", lambda: broken)
    extension._stock_refusal.cache_clear()
    try:
        reason = extension.why_no_stock()
    finally:
        extension._stock_refusal.cache_clear()
    assert reason is not None
    assert f"{broken} does not fit torch" in reason
