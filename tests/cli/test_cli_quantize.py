"""``x86quant quantize``: data from callables and files, a saved model, and errors in one line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import x86quant
from x86quant.cli import main
from x86quant.quantization import speed

SOURCE = """
import torch
from torch import nn

def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1))

def encoder():
    torch.manual_seed(0)
    return nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 4))

def wide():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 8))

def rows():
    return torch.randn(16, 32, generator=torch.Generator().manual_seed(0))

def batches():
    for seed in range(4):
        yield torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(seed)), torch.zeros(2)

def tokens():
    return torch.randn(4, 5, 6, generator=torch.Generator().manual_seed(0))

def hard_to_please(model):
    return 1.0 if isinstance(model, nn.Sequential) else 0.0
"""


@pytest.fixture(autouse=True)
def _module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cli_quantize_source.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))


def quantize(model: str, *more: str) -> int:
    return main(["quantize", f"cli_quantize_source:{model}", "--out", "out.x86q", *more])


def test_batches_from_a_callable(capsys):
    assert quantize("net", "--data", "cli_quantize_source:batches") == 0
    shown = capsys.readouterr()
    assert "static int8, 2 layers" in shown.out
    assert "wrote out.x86q" in shown.err
    loaded = x86quant.load("out.x86q")
    assert loaded(torch.zeros(1, 3, 8, 8)).shape == (1, 4, 6, 6)


def test_weights_of_four_bits(capsys):
    data = ("--data", "cli_quantize_source:rows")
    assert quantize("wide", *data, "--mode", "dynamic", "--weight-bits", "4") == 0
    loaded = x86quant.load("out.x86q")
    nibbles = [x for x in loaded.state_dict().values() if x.dtype == torch.uint8]
    assert [tuple(x.shape) for x in nibbles] == [(64, 16), (8, 32)], "two codes a byte"


@pytest.mark.parametrize("form", ["npy", "pt", "pt list"])
def test_data_from_files_and_json(form, capsys):
    x = np.random.default_rng(0).normal(size=(8, 3, 8, 8)).astype(np.float32)
    name = "data.npy" if form == "npy" else "data.pt"
    if form == "npy":
        np.save(name, x)
    else:
        tensor = torch.from_numpy(x)
        torch.save(tensor if form == "pt" else [tensor[:4], tensor[4:]], name)
    arguments = ("--data", name, "--json", "--float-layer", "2", "--observer", "minmax")
    assert quantize("net", *arguments) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["float_layers"] == {"2": "as asked"}
    assert facts["observer"] == "minmax"
    assert facts["bytes"] == Path("out.x86q").stat().st_size


def test_dynamic_models_are_saved_too(capsys):
    assert quantize("encoder", "--data", "cli_quantize_source:tokens") == 0
    assert "dynamic int8" in capsys.readouterr().out
    x = torch.randn(2, 5, 6)
    assert x86quant.load("out.x86q")(x).shape == (2, 5, 4)


def test_a_metric_that_is_missed_is_status_1(capsys):
    arguments = ("--data", "cli_quantize_source:batches", "--metric")
    assert quantize("net", *arguments, "cli_quantize_source:hard_to_please") == 1
    assert "target not met" in capsys.readouterr().out
    assert Path("out.x86q").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "needs calibration data"),
        (["--data", "nothing.npy"], "nothing.npy"),
        (["--data", "bad.npy"], "cannot read bad.npy"),
        (["--data", "bad.pt"], "cannot read bad.pt"),
        (["--data", "cli_quantize_source:nowhere"], "no attribute 'nowhere'"),
        (["--data", "cli_quantize_source:batches", "--max-drop", "1"], "needs a metric"),
        (["--data", "cli_quantize_source:batches", "--out", "no/where.x86q"], "no folder"),
    ],
)
def test_errors_are_one_line(arguments, message, capsys):
    Path("bad.npy").write_bytes(b"not an array")
    Path("bad.pt").write_bytes(b"not a tensor")
    assert quantize("net", *arguments) == 2
    shown = capsys.readouterr().err.strip().splitlines()
    assert len(shown) == 1
    assert message in shown[0]
    assert not Path("out.x86q").exists()


def test_a_model_that_is_faster_in_float_is_saved_in_float(capsys, monkeypatch):
    monkeypatch.setattr(speed, "can_tell", lambda: True)
    monkeypatch.setattr(speed, "slower", lambda *_, **__: 2.0)
    data = ("--data", "cli_quantize_source:batches")
    assert quantize("net", *data) == 0
    assert "this is the float model: int8 takes 2.00 times as long" in capsys.readouterr().out
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Conv2d(8, 4, 1))
    x = torch.randn(1, 3, 8, 8)
    assert torch.equal(x86quant.load("out.x86q")(x), model(x))
    assert quantize("net", *data, "--no-speed-check") == 0
    assert "static int8, 2 layers" in capsys.readouterr().out
