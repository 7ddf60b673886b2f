"""What ``x86quant bench`` says: pages, verdicts, the command line, and files that are wrong."""

from __future__ import annotations

import csv
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import numpy
import pytest

from tests.bench_samples import (
    SETTING,
    bench_results,
    measure_in_this_process,
    model_run,
    ran,
)
from tests.reporting.test_report import Page
from x86quant.bench import campaign, summary_page
from x86quant.bench.comparison import compare_results, slower_than
from x86quant.bench.results import BackendResult, ModelRun, RunSetting, read_results
from x86quant.bench.summary_page import results_page
from x86quant.bench.summary_text import markdown
from x86quant.cli import main
from x86quant.errors import InvalidInputError

SKIPPED = BackendResult("skipped", "nncf not installed: pip install 'nncf'")
FAILED = BackendResult("failed", "a, <b>")


def some_results() -> Any:
    return bench_results(
        model_run("one", x86quant=2, openvino=ran(3, 28.04, minimum=1), x86=8, fp32=ran(20, None)),
        model_run("<two>", x86quant=1, openvino=SKIPPED, x86=FAILED, fp32=ran(5, None)),
        ModelRun("three", SETTING, error="the model fails"),
    )


# The file


def test_results_survive_the_file(tmp_path: Path) -> None:
    results = some_results()
    (tmp_path / "r.json").write_text(results.to_json())
    assert read_results(tmp_path / "r.json") == results


def damaged(text: str) -> dict[str, str]:
    """Files that are wrong, and what is said of each."""
    data = json.loads(text)
    run = data["runs"][0]

    def with_run(**changed: Any) -> str:
        return json.dumps({**data, "runs": [{**run, **changed}]})

    result = run["results"]["x86quant"]
    return {
        "": "is not JSON",
        "{": "is not JSON",
        "[" * 100_000: "is not JSON",
        '{"a": NaN}': "is not JSON",
        "[]": "was not written by x86quant bench",
        json.dumps({**data, "version": 99}): "has version 99",
        json.dumps({k: v for k, v in data.items() if k != "runs"}): "'runs' is missing",
        json.dumps({**data, "rounds": True}): "'rounds' is True",
        json.dumps({**data, "environment": {"cpu": 3}}): "'cpu' is 3, not str",
        with_run(setting={"batch": 0, "threads": 1, "instances": 1}): "at least 1",
        with_run(results={"x86quant": {**result, "seconds": [0.1, -1]}}): "holds -1, not a time",
        with_run(results={"x86quant": {**result, "seconds": ["a"]}}): "holds 'a', not a time",
        with_run(results={"x86quant": {**result, "status": "fine"}}): "'status' is 'fine'",
        with_run(results={"x86quant": 3}): "'status' is missing",
        with_run(results=[]): "'results' is [], not dict",
    }


def test_damaged_files_say_what_is_wrong(tmp_path: Path) -> None:
    file = tmp_path / "r.json"
    for text, message in damaged(some_results().to_json()).items():
        file.write_text(text)
        with pytest.raises(InvalidInputError) as error:
            read_results(file)
        assert message in str(error.value), text[:300]
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidInputError, match="is not JSON"):
        read_results(file)
    with pytest.raises(InvalidInputError, match="cannot be read"):
        read_results(tmp_path / "missing.json")


# Pages


def test_text_has_the_answer_first_and_says_who_is_missing() -> None:
    text = markdown(some_results())
    lines = [line.replace(" ", "") for line in text.splitlines()]
    assert lines[0] == "x86quantis1.50timesasfastasOpenVINOint8"
    assert (
        "x86quant is 7.07 times as fast as PyTorch fp32 (geometric mean of 2 measurements)" in text
    )
    assert "|x86quantint8|2.00(2.00)|500|1.00|30.0|0.50|200|" in lines
    assert "|OpenVINOint8|3.00(1.00)|333|1.50|28.0|0.50|200|" in lines
    first = [line.partition("|")[2].partition("|")[0] for line in lines if line.startswith("|")]
    assert first[2:6] == ["x86quantint8", "OpenVINOint8", "PyTorchint8,x86", "PyTorchfp32"]
    assert "- OpenVINO int8 skipped: nncf not installed: pip install 'nncf'" in text
    assert "FAILED: the model fails" in text


def test_the_faster_one_is_told_first_and_noise_is_told() -> None:
    text = markdown(bench_results(model_run("net", x86quant=ran(4, minimum=2), openvino=2, x86=4)))
    assert text.startswith("OpenVINO int8 is 2.00 times as fast as x86quant\n")
    assert "x86quant is as fast as PyTorch int8, x86" in text
    assert "- The machine was not quiet: medians are up to 2.0 times the least times" in text
    quiet = markdown(bench_results(model_run("net", x86quant=4, openvino=2)))
    assert "quiet" not in quiet


def test_a_back_end_that_ignores_the_level_is_marked() -> None:
    run = model_run("net", x86quant=1, onnxruntime=1)
    text = markdown(bench_results(dataclasses.replace(run, setting=RunSetting(1, 1, isa="avx2"))))
    assert "ONNX Runtime int8*" in text
    assert "cannot be held to avx2" in text


def test_the_page_is_whole_escaped_and_fetches_nothing() -> None:
    text = results_page(some_results())
    parsed = Page(text)
    assert not parsed.open, "every tag is closed"
    assert not parsed.links
    assert "url(" not in text
    assert "@import" not in text
    shown = " ".join(parsed.text)
    for wanted in ("<two>", "a, <b>", "three", "the model fails", "x86quant bench <net>", "10.0×"):
        assert wanted in shown
    assert 'name="viewport"' in text
    assert "prefers-color-scheme: dark" in text


def test_instances_are_told_by_what_they_do_together() -> None:
    run = dataclasses.replace(model_run("net", x86quant=2, fp32=4), setting=RunSetting(3, 1, 4))
    assert run.throughput("x86quant") == pytest.approx(3 * 4 / 0.002)
    page = results_page(bench_results(run))
    assert "6000/s" in page
    assert "3000/s · 2.00×" in page
    assert "4 instances of 1 thread" in page


def test_bars_are_sorted_and_ours_is_marked() -> None:
    page = results_page(bench_results(model_run("net", fp32=9, x86quant=2, x86=4)))
    names = [part.partition("<")[0] for part in page.split('<span class="name">')[1:]]
    assert names == ["x86quant int8", "PyTorch int8, x86", "PyTorch fp32"]
    assert '<div class="row ours"' in page
    assert 'style="--mark:22.22%"' in page


def test_files_for_other_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(summary_page, "plot_png", lambda _: None)
    summary_page.write_pages(some_results(), tmp_path)
    rows = list(csv.DictReader((tmp_path / "results.csv").read_text().splitlines()))
    assert [row["status"] for row in rows[:6]] == ["ok"] * 5 + ["skipped"]
    assert rows[6]["reason"] == "a, <b>"
    assert float(rows[2]["ratio_median"]) == 4
    assert (tmp_path / "report.html").read_text() == results_page(some_results())


def test_the_plot_is_a_png_where_there_is_something_to_draw(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("matplotlib")
    drawn = summary_page.plot_png(some_results())
    assert drawn is not None
    assert drawn.startswith(b"\x89PNG")
    assert summary_page.plot_png(bench_results(model_run("net", x86quant=FAILED))) is None
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert summary_page.plot_png(some_results()) is None


# Verdicts


def noisy(milliseconds: float, seed: int, calls: int = 60, spread: float = 0.05) -> BackendResult:
    """Calls whose neighbours are disturbed alike, as on a shared machine."""
    generator = numpy.random.default_rng(seed)
    bursts = numpy.repeat(generator.exponential(spread, -(-calls // 4)), 4)[:calls]
    times = milliseconds / 1e3 * (1 + bursts + generator.exponential(spread / 4, calls))
    return BackendResult("ok", seconds=tuple(times))


def verdict(before: Any, after: Any, **options: Any) -> Any:
    one, two = (bench_results(model_run("net", x86quant=result)) for result in (before, after))
    (found,) = compare_results(one, two, **options)
    return found


def test_a_difference_is_told_with_its_span() -> None:
    slower = verdict(noisy(10, 1), noisy(11, 2))
    assert slower.outcome == "slower"
    assert slower.low < slower.change < slower.high
    assert "slower by" in str(slower)
    assert "(" in str(slower)
    faster = verdict(noisy(10, 1), noisy(9, 2))
    assert faster.outcome == "faster"
    assert str(faster).startswith("faster by ")


def test_noise_is_no_difference() -> None:
    outcomes = [verdict(noisy(10, i), noisy(10, i + 500)).outcome for i in range(40)]
    assert outcomes.count("no difference") >= 36
    assert "no difference found (" in str(verdict(noisy(10, 1), noisy(10, 501)))


def test_what_is_steady_but_tiny_is_no_difference() -> None:
    assert verdict(noisy(10, 1, spread=1e-4), noisy(10.05, 2, spread=1e-4)).outcome == (
        "no difference"
    )


def test_the_same_files_give_the_same_verdict() -> None:
    assert verdict(noisy(10, 1), noisy(11, 2)) == verdict(noisy(10, 1), noisy(11, 2))


def test_too_few_rounds_tell_nothing() -> None:
    assert verdict(ran(1), ran(2)).outcome == "too few rounds"


def test_what_no_longer_runs_is_told() -> None:
    gone = verdict(noisy(1, 1), FAILED)
    assert gone.outcome == "gone"
    assert "no longer runs: a, <b>" in str(gone)
    assert verdict(FAILED, noisy(1, 1)).outcome == "new"


def test_other_cpus_are_refused_unless_asked_for() -> None:
    one, two = (bench_results(model_run("n", fp32=noisy(1, 1)), cpu=cpu) for cpu in "ab")
    with pytest.raises(InvalidInputError, match="--across"):
        compare_results(one, two)
    assert compare_results(one, two, across=True)
    with pytest.raises(InvalidInputError, match="in common"):
        compare_results(one, two, across=True, only=["x86quant"])


def test_only_what_is_surely_slower_fails() -> None:
    found = [verdict(noisy(10, 1), noisy(x, 2)) for x in (10, 10.3, 11)]
    found.append(verdict(noisy(1, 1), FAILED))
    assert [v in slower_than(found, 0.06) for v in found] == [False, False, True, True]


# The command

SOURCE = """
import torch
from torch import nn

class Four(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 4)

    def forward(self, x):
        return self.layer(x.reshape(4, 6))

def four():
    return Four()

def conv():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1))
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with models, and measuring in this process."""
    (tmp_path / "bench_models.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "bench_models", raising=False)
    measure_in_this_process(monkeypatch, tmp_path)
    return tmp_path


QUICK = ["--rounds", "2", "--no-cold-start", "--threads", "1", "--backends", "x86quant,fp32"]


def test_models_are_measured_and_written(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(summary_page, "plot_png", lambda _: b"\x89PNG")  # drawing takes a second
    options = ["--shape", "1,3,8,8", "--batch", "1,2", *QUICK, "--out", "new/folder"]
    assert main(["bench", "bench_models:conv", *options]) == 0
    results = read_results(here / "new" / "folder" / "results.json")
    assert [(run.model, run.setting.batch, run.inputs) for run in results.runs] == [
        ("bench_models:conv", 1, "1×3×8×8"),
        ("bench_models:conv", 2, "2×3×8×8"),
    ]
    assert all(run.measured("x86quant") and run.measured("fp32") for run in results.runs)
    assert {path.name for path in (here / "new" / "folder").iterdir()} == {
        "plot.png",
        "report.html",
        "report.md",
        "results.csv",
        "results.json",
    }
    out = capsys.readouterr().out
    assert "x86quant int8" in out
    assert "geometric mean of 2 measurements" in out
    assert main(["bench", "compare", *["new/folder/results.json"] * 2]) == 0
    assert "too few rounds" in capsys.readouterr().out


def test_a_batch_that_a_model_does_not_take_loses_no_other(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--shape", "4,6", "--batch", "3,4", *QUICK, "--json"]
    assert main(["bench", "bench_models:four", *options]) == 1
    captured = capsys.readouterr()
    runs = json.loads(captured.out)["runs"]
    assert "fails on inputs of 3×6" in runs[0]["error"]
    assert runs[1]["results"]["x86quant"]["status"] == "ok"
    assert "FAILED the model fails" in captured.err


def test_a_disk_that_fills_up_loses_no_result(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(campaign, "check_folder", lambda folder: folder.mkdir())
    monkeypatch.setattr(campaign, "write_aside", full)
    monkeypatch.setattr(summary_page, "write_aside", full)
    monkeypatch.setattr(campaign, "measure_apart", lambda one: model_run(one.name, x86quant=1))
    assert main(["bench", "lstm", "dlrm", *QUICK, "--out", "new"]) == 2
    captured = capsys.readouterr()
    assert captured.out.count("## ") == 2, "what was measured is printed"
    assert captured.err.count("could not be written: [Errno 28]") == 2
    assert captured.err.splitlines()[-1].startswith("x86quant bench: [Errno 28] No space left")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["resnet81"], "there is no model 'resnet81'"),
        (["bench_models:conv"], "--shape"),
        (["lstm", "--shape", "1,3,8,8"], "lstm takes other inputs: 1×64×128"),
        (["lstm", "--instances", "1000"], "1000 instances need a core each"),
        (["lstm", "--instances", "1000", "--threads", "1"], "1000 instances need a core each"),
        (["lstm", "--out", "bench_models.py"], "--out"),
        (["lstm", "--resume"], "--out"),
        (["lstm", "--across"], "compare"),
        (["lstm", "dlrm", "--profile"], "one model"),
        (["compare", "a.json"], "takes two files of results, not 1"),
        (["compare", "a.json", "b.json"], "a.json cannot be read"),
        (["compare", "bench_models.py", "b.json"], "is not JSON"),
    ],
)
def test_what_cannot_be_done_is_said_before_measuring(
    arguments: list[str], message: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ["--rounds", "0"],
        ["--batch", "0"],
        ["--batch", "1,x"],
        ["--threads", ""],
        ["--backends", "tflite"],
        ["--fail-if-slower", "much"],
        ["--fail-if-slower", "-3%"],
    ],
)
def test_bad_options_end_with_usage(arguments: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["bench", "lstm", *arguments])


def test_compare_has_an_exit_status_for_ci(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    for file, milliseconds, seed in zip(files, (10, 12), (1, 2), strict=True):
        run = model_run("net", x86quant=noisy(milliseconds, seed), fp32=noisy(50, seed))
        file.write_text(bench_results(run).to_json())
    slower, faster = [str(f) for f in files], [str(f) for f in reversed(files)]
    assert main(["bench", "compare", *slower]) == 0
    assert "slower by" in capsys.readouterr().out
    assert main(["bench", "compare", *slower, "--fail-if-slower", "3%"]) == 1
    assert "net, batch 1, 1 thread, x86quant: slower by" in capsys.readouterr().err
    assert main(["bench", "compare", *slower, "--fail-if-slower", "0.5"]) == 0
    assert main(["bench", "compare", *faster, "--fail-if-slower", "3%"]) == 0
    only = ["--backends", "fp32", "--fail-if-slower", "3%"]
    assert main(["bench", "compare", *slower, *only]) == 0
    capsys.readouterr()
    assert main(["bench", "compare", *slower, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert [v["outcome"] for v in data["verdicts"]] == ["slower", "no difference"]
