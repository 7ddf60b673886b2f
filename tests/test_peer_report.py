"""The benchmark against peers, without the peers: who is timed when, what is kept, what it says."""

from __future__ import annotations

import collections
import csv
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks import against_peers, networks, peers
from benchmarks.peers import Bind, report, worker
from benchmarks.peers.results import (
    NetworkResult,
    PeerResult,
    Settings,
    SettingsDifferError,
    Store,
)

SETTINGS = Settings(("ours", "openvino", "x86", "fp32"), batch=1, threads=1, rounds=3)


def ran(milliseconds: float, sqnr: float | None = 30.0, minimum: float | None = None) -> PeerResult:
    fastest = milliseconds if minimum is None else minimum
    seconds = (fastest / 1e3, milliseconds / 1e3, milliseconds / 1e3)
    return PeerResult("ok", "", seconds, sqnr, prepare_seconds=1.0)


def network(name: str, **of_peers: PeerResult | float) -> NetworkResult:
    results = {k: v if isinstance(v, PeerResult) else ran(v) for k, v in of_peers.items()}
    return NetworkResult(name, SETTINGS, results, {"cpu": "a CPU", "date": "2026-01-01T00:00"})


def verdicts(results: Sequence[NetworkResult], isa: str | None = None) -> list[bool | None]:
    settings = Settings(SETTINGS.peers, 1, 1, 3, isa)
    return [target.met for target in report.targets(results, settings)]


# Timing


def test_every_round_begins_with_the_next_and_warm_rounds_do_not_count() -> None:
    turns: list[tuple[int, str]] = []
    calls: collections.Counter[str] = collections.Counter()

    def run(name: str) -> Callable[[], None]:
        return lambda: calls.update([name])

    seconds = worker.measure(
        {n: run(n) for n in "abc"}, rounds=4, turn=lambda *turn: turns.append(turn)
    )
    rounds = 4 + worker.WARM_ROUNDS
    assert [len(taken) for taken in seconds.values()] == [4 * worker.CALLS] * 3
    assert calls == dict.fromkeys("abc", rounds * (1 + worker.CALLS))
    order = "".join(name for _, name in turns)
    assert order.startswith("bcacababc")
    assert [number for number, _ in turns] == [n for n in range(1, rounds + 1) for _ in "abc"]


def test_idle_threads_are_waited_for_but_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = {"wall": 0.0, "cpu": 0.0}
    busy_until = 0.05

    def sleep(seconds: float) -> None:
        clock["wall"] += seconds
        if clock["wall"] < busy_until:
            clock["cpu"] += seconds

    monkeypatch.setattr(worker.time, "sleep", sleep)
    monkeypatch.setattr(worker.time, "perf_counter", lambda: clock["wall"])
    monkeypatch.setattr(worker.time, "process_time", lambda: clock["cpu"])
    worker.wait_for_idle_threads()
    assert clock["wall"] == pytest.approx(0.052, abs=0.004)
    clock["wall"], busy_until = 0.0, 9.0
    worker.wait_for_idle_threads(longest=0.2)
    assert clock["wall"] == pytest.approx(0.2, abs=0.004)


# One network


class FakePeer:
    int8 = True

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.packages: Mapping[str, str] = (
            {"no_such_module": "nothing>=1"} if kind == "absent" else {}
        )

    def version(self) -> str:
        return f"{self.kind} 1.0"

    def prepare(
        self,
        model: nn.Module,
        calibration: Sequence[torch.Tensor],
        example: torch.Tensor,
        threads: int,
    ) -> Bind:
        if self.kind == "raises":
            raise RuntimeError("no such\noperator")
        factor = {"right": 1.001, "nan": float("nan")}[self.kind]
        return lambda x: lambda: model(x) * factor


def measured_with(
    kinds: Mapping[str, str], monkeypatch: pytest.MonkeyPatch, stage: Path, **excluded: str
) -> NetworkResult:
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 4)).requires_grad_(False)
    monkeypatch.setattr(networks, "network_for_images", lambda name, size: model)
    monkeypatch.setattr(peers, "load", lambda name: FakePeer(kinds[name]))
    stage.write_bytes(b" " * worker.STAGE_BYTES)
    settings = Settings(tuple(kinds), batch=2, threads=1, rounds=2, size=8)
    return worker.Measurement("tiny", settings, worker.Stage(stage)).run(excluded)


def test_a_peer_that_fails_is_recorded_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    kinds = {"ours": "right", "a": "raises", "b": "nan", "c": "absent", "d": "right"}
    result = measured_with(kinds, monkeypatch, tmp_path / "stage", d="the process died")
    assert {n: p.status for n, p in result.peers.items()} == {
        "ours": "ok",
        "a": "failed",
        "b": "failed",
        "c": "skipped",
        "d": "failed",
    }
    ours = result.peers["ours"]
    assert ours.sqnr == pytest.approx(60, abs=0.1)  # 1 part in 1000
    assert len(ours.seconds) == 2 * worker.CALLS
    assert result.peers["a"].reason == "RuntimeError: no such operator"
    assert "not finite" in result.peers["b"].reason
    assert "pip install 'nothing>=1'" in result.peers["c"].reason
    assert result.peers["d"].reason == "the process died"
    assert result.environment["ours"] == "right 1.0"
    assert worker.Stage.read(tmp_path / "stage") == ("measuring round 4 of 4", "ours")


def test_all_batches_have_one_size() -> None:
    measurement = worker.Measurement.__new__(worker.Measurement)
    for batch, count in ((1, 16), (8, 2), (5, 3), (32, 1)):
        measurement.settings = Settings((), batch, 1, 1, size=4)
        shapes = [tuple(b.shape) for b in measurement._batches(16, seed=0)]
        assert shapes == [(batch, 3, 4, 4)] * count


def test_images_differ_from_each_other_and_not_from_themselves() -> None:
    first, again = networks.images(2, 16, seed=1), networks.images(2, 16, seed=1)
    assert first.equal(again)
    assert not first.equal(networks.images(2, 16, seed=2))
    assert float(first.std()) == pytest.approx(1)
    # Neighbours are alike, which they are not in white noise.
    assert float((first[..., 1:] - first[..., :-1]).std()) < 0.9


# The parent

FAKE_WORKER = """
import json, os, signal, sys, time
request, result, stage = sys.argv[1:]
wanted = json.load(open(request))
def say(text):
    with open(stage, "r+b") as file:
        file.write(text.encode().ljust(64))
for name in wanted["settings"]["peers"]:
    if name in wanted["excluded"]:
        continue
    say("preparing " + name)
    if name == "x86":
        os.kill(os.getpid(), signal.SIGKILL)
    if name == "openvino":
        time.sleep(60)
if wanted["network"] == "broken":
    say("building broken")
    sys.exit(3)
peers = {
    name: {"status": "failed", "reason": wanted["excluded"][name], "seconds": []}
    if name in wanted["excluded"] else {"status": "ok", "seconds": [0.001]}
    for name in wanted["settings"]["peers"]
}
json.dump(
    {"network": wanted["network"], "settings": wanted["settings"], "peers": peers,
     "environment": {"isa": os.environ.get("X86QUANT_ISA", "")}},
    open(result, "w"),
)
"""


def run_fake_worker(name: str, folder: Path) -> NetworkResult:
    script = folder / "fake_worker.py"
    script.write_text(FAKE_WORKER)
    settings = Settings(SETTINGS.peers, 1, 1, 3, "avx2")
    return against_peers.measure_network(
        name, settings=settings, longest=0.5, worker=[sys.executable, str(script)]
    )


def test_peers_that_crash_or_hang_lose_no_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run_fake_worker("net", tmp_path)
    assert result.peers["x86"].reason == "the process died of SIGKILL while preparing"
    assert "took longer than" in result.peers["openvino"].reason
    assert result.measured("ours") is not None
    assert result.measured("fp32") is not None
    assert result.environment["isa"] == "avx2"
    assert "x86: FAILED" in capsys.readouterr().err


def test_a_failure_outside_any_peer_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(against_peers.WorkerError, match="ended with 3 while building broken"):
        run_fake_worker("broken", tmp_path)


def test_a_lower_level_reaches_every_library_that_can_be_told() -> None:
    variables = against_peers.environment(Settings((), 1, 2, 3, "avx512_vnni"))
    assert variables["X86QUANT_ISA"] == "avx512_vnni"
    assert variables["ONEDNN_MAX_CPU_ISA"] == variables["DNNL_MAX_CPU_ISA"] == "AVX512_CORE_VNNI"
    assert variables["FBGEMM_ENABLE_INSTRUCTIONS"] == "AVX512_E1"
    assert variables["OMP_NUM_THREADS"] == "2"


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


# Keeping and going on


def test_an_interrupted_run_goes_on_where_it_stopped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []

    def measure(name: str) -> NetworkResult:
        asked.append(name)
        if name == "resnet50" and asked.count(name) == 1:
            raise KeyboardInterrupt
        return network(name, ours=1, openvino=2, x86=4, fp32=9)

    store = Store(tmp_path, SETTINGS)
    with pytest.raises(KeyboardInterrupt):
        against_peers.run(["resnet18", "resnet50"], store, measure)
    assert "resnet18" in (tmp_path / "report.md").read_text()
    assert against_peers.run(["resnet18", "resnet50"], store, measure) == 0
    assert asked == ["resnet18", "resnet50", "resnet50"]
    captured = capsys.readouterr()
    assert "resnet18: kept from 2026-01-01" in captured.err
    assert "| resnet50 " in captured.out
    assert sorted(path.name for path in (tmp_path / "networks").iterdir()) == [
        "resnet18.json",
        "resnet50.json",
    ]


def test_results_of_other_settings_are_not_mixed(tmp_path: Path) -> None:
    Store(tmp_path, SETTINGS).keep(network("net", ours=1))
    other = Settings(SETTINGS.peers, batch=8, threads=1, rounds=3)
    with pytest.raises(SettingsDifferError, match="batch was 1, is 8"):
        Store(tmp_path, other).load()
    assert Store(tmp_path, other, fresh=True).load() == {}


def test_a_result_survives_the_file() -> None:
    failed = PeerResult("failed", "why")
    result = network("net", ours=1, openvino=failed, fp32=ran(3, sqnr=None))
    assert NetworkResult.from_json(result.to_json()) == result


def test_our_own_failure_is_the_exit_status(tmp_path: Path) -> None:
    def measure(name: str) -> NetworkResult:
        return network(name, ours=PeerResult("failed", "why"), x86=1)

    assert against_peers.run(["net"], Store(tmp_path, SETTINGS), measure) == 1


# The report


def test_tables_show_every_peer_and_say_who_is_missing() -> None:
    skipped = PeerResult("skipped", "nncf not installed: pip install 'nncf'")
    results = [
        network("one", ours=2, openvino=ran(3, 28.04, minimum=1), x86=8, fp32=ran(20, None)),
        network("two", ours=1, openvino=skipped, x86=2, fp32=ran(5, None)),
    ]
    text = report.markdown(results, SETTINGS)
    lines = [line.replace(" ", "") for line in text.splitlines()]
    assert "|one|2.00(2.00)|3.00(1.00)|8.00(8.00)|20.00(20.00)|" in lines
    assert "|two|1.00(1.00)|skipped|2.00(2.00)|5.00(5.00)|" in lines
    assert "|one|1.00(1.00)|1.50(0.50)|4.00(4.00)|10.00(10.00)|" in lines
    assert "|geometricmean|1.00(1.00)|1.50(0.50)|2.83(2.83)|7.07(7.07)|" in lines
    assert "|one|30.0|28.0|30.0||" in lines
    assert "- openvino skipped on two: nncf not installed: pip install 'nncf'" in text
    assert text.count("a CPU") == 1


def test_a_peer_that_ignores_the_level_is_marked() -> None:
    settings = Settings(("ours", "onnxruntime"), 1, 1, 3, "avx2")
    text = report.markdown([network("net", ours=1, onnxruntime=1)], settings)
    assert "onnxruntime*" in text
    assert "cannot be held to avx2" in text


def test_targets_met() -> None:
    results = [
        network("one", ours=1, openvino=1.2, x86=3),
        network("two", ours=1, openvino=1.5, x86=4),
    ]
    assert verdicts(results) == [True, True, True, True]


def test_targets_missed() -> None:
    slow = network("slow", ours=ran(2, sqnr=20), openvino=1, x86=4)
    found = report.targets([slow, network("fast", ours=1, openvino=2, x86=3)], SETTINGS)
    assert [target.met for target in found] == [False, False, False, False]
    assert "1.00 times" in found[0].found
    assert "slower on slow (0.50 times its speed)" in found[1].found
    assert "2.45 times" in found[2].found
    assert "slow (20.0 dB against 30.0)" in found[3].found


def test_slower_needs_median_and_minimum_to_agree() -> None:
    noisy = network("net", ours=ran(10, minimum=1), openvino=ran(9, minimum=2))
    assert verdicts([noisy])[1] is True
    both = network("net", ours=ran(10, minimum=2), openvino=ran(9, minimum=1))
    assert verdicts([both])[1] is False


def test_at_a_lower_level_the_best_stock_engine_is_the_bar() -> None:
    result = network("net", ours=2, x86=3, onednn=1, openvino=1)
    assert verdicts([result], isa="avx2") == [False, True]
    result = network("net", ours=2, x86=3, onednn=2.5, openvino=1)
    assert verdicts([result], isa="avx2") == [True, True]


def test_a_network_we_cannot_run_misses_and_a_peer_that_did_not_run_is_not_judged() -> None:
    failed = PeerResult("failed", "why")
    found = report.targets([network("net", ours=failed, openvino=1, x86=failed)], SETTINGS)
    assert [target.met for target in found] == [None, False, None, None]
    assert "net (did not run)" in found[1].found
    results = [network("one", ours=1, openvino=2), network("two", ours=1, openvino=failed)]
    assert "over 1 of 2 networks" in report.targets(results, SETTINGS)[0].found


def test_files_for_other_programs(tmp_path: Path) -> None:
    results = [network("net", ours=2, openvino=PeerResult("failed", "a, b"), x86=6)]
    report.write(results, SETTINGS, tmp_path)
    rows = list(csv.DictReader((tmp_path / "results.csv").read_text().splitlines()))
    assert [row["status"] for row in rows] == ["ok", "failed", "ok"]
    assert rows[1]["reason"] == "a, b"
    assert float(rows[2]["ratio_median"]) == 3
    data = json.loads((tmp_path / "results.json").read_text())
    assert data["settings"]["rounds"] == 3
    assert len(data["networks"][0]["peers"]["ours"]["seconds"]) == 3
    assert [target["met"] for target in data["targets"]] == [None, None, True, True]


def test_the_plot_is_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    results = [network("one", ours=2, openvino=3, x86=8, fp32=20), network("two", ours=1, x86=2)]
    report.plot(results, SETTINGS, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in tmp_path.iterdir()] == ["plot.png"]
