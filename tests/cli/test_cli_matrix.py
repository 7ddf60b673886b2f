"""Every command on every kind of model: an answer, or one line that says why not."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import x86quant
from tests.bench_samples import measure_in_this_process
from x86quant.cli import main

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("as_in_use")]

SOURCE = """
import torch
from torch import nn
import x86quant

def conv():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1))

def encoder():
    torch.manual_seed(0)
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1)

class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.lstm(x)[0])

def lstm():
    return Tagger()

def bert():
    import transformers
    return transformers.BertModel(transformers.BertConfig(
        vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=16, max_position_embeddings=16))

def converted():
    from x86quant.cli.loading import compile_model
    return compile_model(conv(), (torch.randn(1, 3, 8, 8),)).converted

def weight_only():
    return x86quant.to_dynamic(encoder().eval(), weight_only=True)

def nothing():
    return nn.ReLU()

def wrong_batches():
    return [torch.randn(1, 5, 8, 8)]

def raises(model):
    raise KeyError("scores")

def fails():
    raise KeyError("scores")

def wordy(model):
    return "good"
"""

PICTURE, SEQUENCE = ["--shape", "1,3,8,8"], ["--shape", "2,5,8"]
QUICK = ["--rounds", "1", "--no-cold-start", "--backends", "x86quant,x86,fp32"]
IDS = ["--input", "input_ids=2x5:int64"]
MODELS = {
    "conv": PICTURE,
    "encoder": SEQUENCE,
    "lstm": SEQUENCE,
    "bert": IDS,
    "converted": PICTURE,
    "weight_only": SEQUENCE,
    "nothing": SEQUENCE,
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "cli_matrix.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "cli_matrix", raising=False)
    measure_in_this_process(monkeypatch, tmp_path)
    return tmp_path


def check(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> int:
    """Exit status 0, or one line of error."""
    code = main(arguments)
    error = capsys.readouterr().err
    assert "Traceback" not in error
    if code:
        told = [line for line in error.splitlines() if line.startswith(f"x86quant {arguments[0]}:")]
        assert len(told) == 1, error
        assert error.strip().splitlines()[-1] == told[0]
    return code


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("command", ["explain", "bench", "report"])
def test_every_command_on_every_model(
    command: str, name: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if name == "bert":
        pytest.importorskip("transformers")
    more = QUICK if command == "bench" else []
    code = check([command, f"cli_matrix.py:{name}", *MODELS[name], "--threads", "1", *more], capsys)
    if name in ("conv", "encoder", "bert", "converted", "weight_only"):
        assert code == 0


def test_saved_models_know_their_inputs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    sys.path.insert(0, str(folder))
    import cli_matrix  # type: ignore[import-not-found]

    compiled = x86quant.compile(cli_matrix.converted(), (torch.randn(1, 3, 8, 8),))
    x86quant.save(compiled, "net.x86q")
    for arguments in (["explain"], ["bench", *QUICK], ["report"]):
        assert check([arguments[0], "net.x86q", *arguments[1:]], capsys) == 0
    assert check(["explain", "nothing.x86q", *PICTURE], capsys) == 2
    (folder / "broken.x86q").write_bytes(b"x" * 100)
    assert check(["explain", "broken.x86q", *PICTURE], capsys) == 2


def test_a_folder_of_transformers(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    import torch

    sys.path.insert(0, str(folder))
    import cli_matrix

    model = cli_matrix.bert().eval()
    model.save_pretrained(folder / "bert")
    assert check(["quantize", "bert", "--out", "bert.x86q"], capsys) == 0
    ids = torch.tensor([[1, 2, 3]])
    loaded = x86quant.load("bert.x86q")
    assert torch.equal(
        loaded(ids).last_hidden_state, x86quant.to_dynamic(model)(ids).last_hidden_state
    )
    (folder / "empty").mkdir()
    assert check(["explain", "empty", *IDS], capsys) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["quantize", "cli_matrix:conv", "--data", "cli_matrix:wrong_batches", "--out", "a"], ""),
        (["quantize", "cli_matrix:conv", "--out", "."], "is a folder"),
        (["report", "cli_matrix:conv", *PICTURE, "--out", "."], "is a folder"),
        (["bench", "cli_matrix:conv", *PICTURE, "--trace", "."], "is a folder"),
        (["explain", "cli_matrix:conv"], "give the model's inputs"),
        (["explain", "./nowhere.py:conv", *PICTURE], "no file ./nowhere.py"),
        (
            ["quantize", "cli_matrix:conv", "--out", "a", "--data", "cli_matrix:fails"],
            "--data cli_matrix:fails failed: KeyError",
        ),
        (
            ["report", "cli_matrix:conv", "--out", "a.html", "--data", "cli_matrix:fails"],
            "--data cli_matrix:fails failed: KeyError",
        ),
        (["tune", "--model", "nowhere:net"], "cannot import 'nowhere'"),
        (["tune", "--model", "cli_matrix:absent"], "no attribute 'absent'"),
    ],
)
def test_errors_are_one_line(
    arguments: list[str], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1 + error.count("random data")


@pytest.mark.parametrize(
    ("metric", "message"), [("raises", "failed: KeyError"), ("wordy", "returned str, not a number")]
)
def test_metrics_that_fail(
    metric: str, message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import numpy

    numpy.save("x.npy", numpy.random.default_rng(0).random((4, 3, 8, 8), dtype=numpy.float32))
    arguments = ["--data", "x.npy", "--out", "a", "--metric", f"cli_matrix:{metric}"]
    assert main(["quantize", "cli_matrix:conv", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not Path("a").exists()


def test_what_a_terminal_cannot_show_is_spelled_out(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    assert main(["explain", "cli_matrix:conv", *PICTURE]) == 0
    sys.stdout.flush()
    assert b"conv2d 3\\u21928" in raw.getvalue()


def test_version_and_a_fresh_process() -> None:
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    code = "import x86quant; assert callable(x86quant.report)"
    subprocess.run([sys.executable, "-c", code], check=True)
    wrong = {**os.environ, "X86QUANT_ISA": "foo"}
    done = subprocess.run(
        [sys.executable, "-m", "x86quant.cli", "info"], env=wrong, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "X86QUANT_ISA=foo is no level" in done.stderr


def test_an_empty_rules_variable_means_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    from x86quant.routing import in_force

    monkeypatch.setenv("X86QUANT_RULES", "")
    assert in_force._table_of_environment() is None


@pytest.mark.parametrize("text", ["", "ids=", "1x:int64", "1x2:float99", "a b=1"])
def test_bad_inputs(text: str) -> None:
    import argparse

    from x86quant.cli import loading

    with pytest.raises(argparse.ArgumentTypeError):
        loading.input_shape(text)


def test_inputs_with_names_and_dtypes() -> None:
    from x86quant.cli import loading

    one = loading.input_shape("ids=1x128:int64")
    call = loading.random_arguments([one, loading.input_shape("2,3")], 0)
    assert json.dumps([*call.kwargs["ids"].shape, *call.args[0].shape]) == "[1, 128, 2, 3]"
