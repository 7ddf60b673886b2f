"""The command line as a user meets it: output, JSON, errors, exit status."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest

import x86quant
from x86quant.cli import COMMANDS, main
from x86quant.hardware import allowance
from x86quant.kernels.probing import libraries


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    assert all(command in text for command in COMMANDS)


def test_unknown_command_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["frobnicate"])
    assert end.value.code == 2
    assert "frobnicate" in capsys.readouterr().err


def test_info_as_text_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info"]) == 0
    assert x86quant.cpu().isa in capsys.readouterr().out
    assert main(["info", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["cpu"]["isa"] == x86quant.cpu().isa
    assert facts["rules"] == x86quant.current_rules().name
    assert set(facts["libraries"]) == {"fbgemm", "onednn", "qnnpack"}


def test_info_says_into_how_many_processes_to_cut_the_machine(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    large = dataclasses.replace(x86quant.cpu(), cores=32, threads=64, best_threads=32)
    monkeypatch.setattr(x86quant, "cpu", lambda: large)
    monkeypatch.setattr(allowance, "memory_nodes", lambda: 2)
    main(["info"])
    said = "answers a second: 8 processes of 4 threads; the soonest one: 1 process of 16 threads"
    assert f"{said}, each held to one node of memory" in capsys.readouterr().out
    main(["info", "--json"])
    facts = json.loads(capsys.readouterr().out)["processes"]
    assert facts["for_rate"] == {"processes": 8, "threads": 4}
    assert facts["memory_nodes"] == 2


def test_info_names_libraries_that_are_not_on_record(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    main(["info"])
    assert "not on record" not in capsys.readouterr().out
    monkeypatch.setattr(libraries, "on_record", lambda library: library != "onednn")
    main(["info"])
    assert f"onednn {libraries.version('onednn')} is not on record" in capsys.readouterr().out


def test_errors_are_one_line_and_status_2(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise x86quant.CpuError("no such level")

    monkeypatch.setattr(x86quant, "cpu", fail)
    assert main(["info"]) == 2
    assert capsys.readouterr().err == "x86quant info: no such level\n"


def test_interruption_is_status_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(x86quant, "cpu", interrupt)
    assert main(["info"]) == 130


@pytest.mark.parametrize(
    "words",
    [
        ["serve", "folder", "--threads", "9223372036854775808"],
        ["explain", "net.x86q", "--threads", "5000"],
        ["explain", "net.x86q", "--shape", "1,9223372036854775808"],
        ["bench", "resnet18", "--threads", "1,5000"],
    ],
)
def test_numbers_beyond_any_machine(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert re.search("is more than 4096|sizes are from 1 to", capsys.readouterr().err)


def test_a_report_of_data_that_hold_no_batches(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "net.py").write_text("from torch import nn\nnet = nn.Linear(2, 2)\n")
    words = ["report", f"{tmp_path}/net.py:net", "--data", "math:pi"]
    assert main([*words, "--out", str(tmp_path / "page.html")]) == 2
    assert "--data math:pi: float is nothing that holds batches" in capsys.readouterr().err
