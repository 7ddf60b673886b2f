"""Commands that take a model: finding it, errors, ``explain`` and ``bench``."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

import x86quant
from tests.bench_samples import measure_in_this_process
from x86quant.cli import loading, main

pytestmark = pytest.mark.filterwarnings("ignore:Please use quant_min and quant_max:UserWarning")

SHAPE = ["--shape", "1,3,8,8", "--threads", "1"]
QUICK = ["--rounds", "2", "--no-cold-start", "--backends", "x86quant,x86,fp32"]
SOURCE = """
import torch
from torch import nn
import x86quant

def plain():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1))

def branching():
    class Branches(nn.Module):
        def forward(self, x):
            return x if x.sum() > 0 else -x
    return Branches()

def parts():
    class Parts(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = plain(), nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU())
        def forward(self, x):
            y = self.first(x)
            if float(y.detach().abs().max()) > 1e9:
                y = -y
            return self.second(y)
    return Parts()

def converted():
    from x86quant.cli.loading import compile_model
    return compile_model(plain(), (torch.randn(1, 3, 8, 8),)).converted

def compiled():
    from x86quant.cli.loading import compile_model
    return compile_model(plain(), (torch.randn(1, 3, 8, 8),)).compiled

def broken():
    raise RuntimeError("out of luck\\nsecond line")

def number():
    return 3

instance = plain()
constant = 3
"""


@pytest.fixture(autouse=True)
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module ``cli_test_models`` in the current folder."""
    (tmp_path / "cli_test_models.py").write_text(SOURCE)
    (tmp_path / "cli_test_broken.py").write_text("1 / 0")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)  # undone afterwards, with what loading adds
    measure_in_this_process(monkeypatch, tmp_path)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cli_test_models", "there is no model 'cli_test_models'"),
        ("cli_test_nothing:x", "No module named 'cli_test_nothing'"),
        ("cli_test_broken:x", "ZeroDivisionError"),
        ("cli_test_models:missing", "no attribute 'missing'"),
        ("cli_test_models:broken", "RuntimeError: out of luck"),
        ("cli_test_models:number", "returned int, not an nn.Module"),
        ("cli_test_models:constant", "not callable"),
    ],
)
def test_errors_say_what_is_wrong_in_one_line(
    name: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", name, *SHAPE]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_model_that_does_not_fit_the_shape(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "cli_test_models:plain", "--shape", "1,5,8,8"]) == 2
    assert "fails on inputs of (1, 5, 8, 8)" in capsys.readouterr().err


def test_a_model_that_cannot_be_traced(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "cli_test_models:branching", *SHAPE]) == 2
    assert "cannot trace the model" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "1,x", "1,0", "-1"])
def test_bad_shapes(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        loading.shape(text)


@pytest.mark.parametrize("text", ["0", "-2", "two"])
def test_bad_numbers(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        loading.positive(text)


@pytest.mark.parametrize("name", ["plain", "converted", "compiled", "instance"])
def test_explain_takes_every_form(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", f"cli_test_models:{name}", *SHAPE, "--json"]) == 0
    captured = capsys.readouterr()
    ops = [layer["op"] for layer in json.loads(captured.out)["layers"]]
    assert ops == ["quantize", "conv", "conv", "dequantize"]
    # Said once: each starts as a float model, and none is quantized twice.
    assert captured.err.count("random data") == 1


def test_explain_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "cli_test_models:plain", *SHAPE]) == 0
    assert "conv2d 3→8 k3×3" in capsys.readouterr().out


def test_bench_as_text_with_profile_and_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.json"
    arguments = [*QUICK, "--profile", "--trace", str(trace)]
    assert main(["bench", "cli_test_models:plain", *SHAPE, *arguments]) == 0
    out = capsys.readouterr().out
    for wanted in ("PyTorch fp32", "PyTorch int8, x86", "x86quant int8", "between"):
        assert wanted in out
    assert json.loads(trace.read_text())["traceEvents"]


def test_a_model_of_several_parts_is_explained_and_profiled(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", "cli_test_models:parts", *SHAPE]) == 0
    explained = capsys.readouterr().out
    trace = tmp_path / "trace.json"
    arguments = ["--rounds", "2", "--no-cold-start", "--backends", "x86quant"]
    command = ["bench", "cli_test_models:parts", *SHAPE, *arguments, "--profile"]
    assert main([*command, "--trace", str(trace)]) == 0
    profiled = capsys.readouterr().out
    for layer in ("first.0", "first.2", "second.0"):
        assert layer in explained
        assert layer in profiled
    assert "outside of graphs" in profiled
    names = [event["name"] for event in json.loads(trace.read_text())["traceEvents"]]
    assert names[-1] == "outside of graphs"


def test_bench_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [*QUICK, "--json"]
    assert main(["bench", "cli_test_models:plain", *SHAPE, *arguments]) == 0
    facts = json.loads(capsys.readouterr().out)
    (run,) = facts["runs"]
    assert run["results"].keys() == {"x86quant", "x86", "fp32"}
    assert [len(r["seconds"]) for r in run["results"].values()] == [4] * 3
    assert run["setting"]["threads"] == 1
    assert facts["rounds"] == 2


def test_bench_times_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "cli_test_models:compiled", *SHAPE, *QUICK, "--json"]) == 0
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    assert [name for name, r in run["results"].items() if r["status"] == "ok"] == ["x86quant"]
    assert "this one is int8" in run["results"]["fp32"]["reason"]


def test_a_trace_without_a_folder_is_refused_before_measuring(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = [*SHAPE, "--trace", "missing/trace.json"]
    assert main(["bench", "cli_test_models:plain", *arguments]) == 2
    captured = capsys.readouterr()
    assert "there is no folder" in captured.err
    assert "[1/1]" not in captured.err


def test_load_object_reaches_nested_attributes() -> None:
    assert loading.load_object("x86quant:errors.CpuError") is x86quant.CpuError
