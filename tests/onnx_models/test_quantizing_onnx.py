"""``quantize`` of ONNX models, and the command."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import x86quant
from tests.onnx_models.small_models import by_onnx_runtime, convolutional, model, node, noise
from tests.onnx_models.test_graphs_of_onnx import quantized
from x86quant import InvalidInputError
from x86quant.cli import main


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "net.onnx"
    file.write_bytes(convolutional().SerializeToString())
    return file


convolutional_proto = convolutional()


def check(int8: torch.nn.Module, least: float = 20.0) -> None:
    """On batches of another size than calibration's, too."""
    x = noise(3, 3, 8, 8)
    (right,) = by_onnx_runtime(convolutional_proto, x=x)
    with torch.no_grad():
        found = int8(torch.from_numpy(x)).numpy()
    assert 10 * np.log10((right**2).sum() / ((found - right) ** 2).sum()) > least


@pytest.mark.parametrize("as_string", [True, False])
def test_a_path_becomes_one_int8_graph(path: Path, as_string: bool) -> None:
    path.write_bytes(convolutional_proto.SerializeToString())
    source = str(path) if as_string else path
    int8 = x86quant.quantize(source, torch.from_numpy(noise(32, 3, 8, 8)), speed_check=False)
    x86quant.assert_int8(int8, torch.zeros(1, 3, 8, 8))
    check(int8)


@pytest.mark.parametrize("kind", ["tuples", "dicts", "arrays", "array"])
def test_batches_of_every_kind(kind: str) -> None:
    x = noise(32, 3, 8, 8)
    parts = np.split(x, 4)
    data = {
        "tuples": [(part, np.zeros(8)) for part in parts],
        "dicts": [{"x": part} for part in parts],
        "arrays": parts,
        "array": x,
    }[kind]
    check(x86quant.quantize(convolutional_proto, data, speed_check=False))


def test_missing_inputs_are_named() -> None:
    data = [{"pixels": noise(4, 3, 8, 8)}]
    with pytest.raises(
        InvalidInputError, match=r"batch 0 lacks x: the inputs .* are x; it has pixels"
    ):
        x86quant.quantize(convolutional_proto, data)


def test_names_of_the_file_that_are_no_identifiers() -> None:
    constants = {"w": noise(8, 6)}
    nodes = [node("Add", "in.a in.b", "s"), node("MatMul", "s w", "y")]
    proto = model(nodes, {"in.a": ["n", 8], "in.b": ["n", 8]}, ["y"], constants)
    data = [{"in.b": noise(16, 8), "in.a": noise(16, 8)} for _ in range(3)]
    int8 = x86quant.quantize(proto, data, speed_check=False)
    a, b = noise(5, 8), noise(5, 8)
    (right,) = by_onnx_runtime(proto, **{"in.a": a, "in.b": b})
    found = int8(torch.from_numpy(a), torch.from_numpy(b)).detach().numpy()
    assert np.abs(found - right).max() < 0.1 * np.abs(right).max()


def test_a_file_for_batches_of_one_is_given_them(tmp_path: Path) -> None:
    proto = convolutional(1)
    data = torch.from_numpy(noise(8, 3, 8, 8))
    int8 = x86quant.quantize(proto, data, speed_check=False)
    x = noise(1, 3, 8, 8)
    (right,) = by_onnx_runtime(proto, x=x)
    assert np.abs(int8(torch.from_numpy(x)).numpy() - right).max() < 0.2 * np.abs(right).max()


def test_a_quantized_model_is_calibrated_anew() -> None:
    proto = quantized()
    int8 = x86quant.quantize(proto, torch.from_numpy(noise(16, 3, 6, 6)), speed_check=False)
    x86quant.assert_int8(int8, torch.zeros(1, 3, 6, 6))
    with pytest.raises(InvalidInputError, match="needs calibration data"):
        x86quant.quantize(proto)


def test_the_command(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.save(tmp_path / "data.npy", noise(16, 3, 8, 8))
    out = tmp_path / "net.x86q"
    command = ["quantize", str(path), "--data", str(tmp_path / "data.npy"), "--out", str(out)]
    assert main([*command, "--no-speed-check"]) == 0
    assert "static int8" in capsys.readouterr().out
    assert x86quant.load(out)(torch.zeros(2, 3, 8, 8)).shape == (2, 5)
