"""The benchmark against peers: what it aims at, and what its exit status says."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import against_peers
from tests.bench_samples import SETTING, model_run, ran
from x86quant.bench.one_model import BenchRequest
from x86quant.bench.results import BackendResult, ModelRun
from x86quant.given_model import InputShape

FAILED = BackendResult("failed", "why")


def verdicts(runs: list[ModelRun], level: str | None = None) -> list[bool | None]:
    return [target.met for target in against_peers.targets(runs, level)]


def test_targets_met() -> None:
    runs = [
        model_run("one", x86quant=1, openvino=1.2, x86=3),
        model_run("two", x86quant=1, openvino=1.5, x86=4),
    ]
    assert verdicts(runs) == [True, True, True, True]


def test_targets_missed() -> None:
    slow = model_run("slow", x86quant=ran(2, 20), openvino=1, x86=4)
    found = against_peers.targets([slow, model_run("fast", x86quant=1, openvino=2, x86=3)])
    assert [target.met for target in found] == [False, False, False, False]
    assert "1.00 times" in found[0].found
    assert "slower on slow (0.50 times its speed)" in found[1].found
    assert "2.45 times" in found[2].found
    assert "slow (20.0 dB against 30.0)" in found[3].found


def test_slower_needs_median_and_minimum_to_agree() -> None:
    noisy = model_run("net", x86quant=ran(10, minimum=1), openvino=ran(9, minimum=2))
    assert verdicts([noisy])[1] is True
    both = model_run("net", x86quant=ran(10, minimum=2), openvino=ran(9, minimum=1))
    assert verdicts([both])[1] is False


def test_at_a_lower_level_the_best_stock_engine_is_the_bar() -> None:
    run = model_run("net", x86quant=2, x86=3, onednn=1, openvino=1)
    assert verdicts([run], "avx2") == [False, True]
    run = model_run("net", x86quant=2, x86=3, onednn=2.5, openvino=1)
    assert verdicts([run], "avx2") == [True, True]


def test_a_network_we_cannot_run_misses_and_a_peer_that_did_not_run_is_not_judged() -> None:
    found = against_peers.targets([model_run("net", x86quant=FAILED, openvino=1, x86=FAILED)])
    assert [target.met for target in found] == [None, False, None, None]
    assert "net (did not run)" in found[1].found
    runs = [
        model_run("one", x86quant=1, openvino=2),
        model_run("two", x86quant=1, openvino=FAILED),
    ]
    assert "over 1 of 2 networks" in against_peers.targets(runs)[0].found


@pytest.mark.parametrize(("ours", "status"), [(1, 0), (FAILED, 1)])
def test_our_own_failure_is_the_exit_status(
    ours: BackendResult | float,
    status: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(
        "x86quant.bench.summary_page.plot_png", lambda _: None
    )  # which takes a second
    asked: list[str] = []

    def measure(wanted: BenchRequest) -> ModelRun:
        asked.append(wanted.name)
        return model_run(wanted.name, x86quant=ours, x86=4)

    picture = (InputShape((1, 3)),)
    requests = [BenchRequest(name, picture, SETTING, 3, ("x86quant", "x86")) for name in ("a", "b")]
    for fresh in (False, False, True):
        assert against_peers.run(requests, measure, tmp_path, fresh=fresh, as_json=False) == status
    assert asked == ["a", "b"] * 2, "the second time everything was there"
    out = capsys.readouterr().out
    assert "## Targets" in out
    assert "met: geometric mean at least 3 times" in out or status
    assert (tmp_path / "report.html").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--out", "x", "--isa", "sse9"],
        ["--out", "x", "--rounds", "0"],
        ["--out", "x", "--peers", "tflite"],
    ],
)
def test_bad_arguments_end_with_usage(arguments: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        against_peers.parse(arguments)
