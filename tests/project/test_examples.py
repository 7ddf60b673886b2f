"""The examples run as they are; ``retune.py``, which measures, runs in CI alone."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import x86quant
from tests.tiny_encoder import write_tiny_encoder

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(autouse=True)
def _restored():
    engine = torch.backends.quantized.engine
    yield
    torch.backends.quantized.engine = engine
    x86quant.disable()


@pytest.mark.filterwarnings("ignore::Warning")
@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("fx_static", "largest difference from the float model: 0.0"),
        ("fx_qat", "int8 gets 100% right"),
        ("torch_compile", "2 convolutions and matrix products in int8, 0 in float"),
        ("torchao_config", "torchao's codes on our kernels: "),
        ("dlrm --quick", "2 bits   AUC 0."),
        ("lstm --epochs 1 --rounds 2", "dynamic int8, 2 layers"),
    ],
)
def test_an_example_runs(
    command: str, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    name, *arguments = command.split()
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    assert said in capsys.readouterr().out


def test_the_example_of_onnx_runs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "argv", ["to_onnx", str(tmp_path / "net.onnx")])
    runpy.run_path(str(EXAMPLES / "to_onnx.py"), run_name="__main__")
    said = capsys.readouterr().out
    assert "results further away than a step: 0 of " in said


def test_the_example_of_the_service_runs(tmp_path: Path) -> None:
    folder = write_tiny_encoder(tmp_path)
    command = [sys.executable, str(EXAMPLES / "encoder_service.py"), str(folder), "--text", "a cat"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "1 embeddings of 32 numbers" in done.stdout
    assert " 1.000  a cat" in done.stdout
    assert "ended with 0" in done.stdout


def test_a_model_saved_here_runs_on_another_cpu() -> None:
    command = [sys.executable, "-W", "ignore", str(EXAMPLES / "another_cpu.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "on avx2:" in done.stdout
    assert "largest difference between the two: 0" in done.stdout
