"""``x86quant bench`` measures: who is timed when, what a failure costs, what is kept."""

from __future__ import annotations

import collections
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.bench_samples import SETTING, model_run, ran
from x86quant.bench import alone, campaign, instances, one_model, subjects, turns, vision
from x86quant.bench.backends import BACKENDS, Bind, Prepared, Task, backend, missing
from x86quant.bench.one_model import BenchRequest, Stage
from x86quant.bench.results import BackendResult, ModelRun, RunSetting, read_results
from x86quant.errors import InvalidInputError
from x86quant.given_model import Arguments, InputShape

# Timing


def test_every_round_begins_with_the_next_and_warm_rounds_do_not_count() -> None:
    order: list[tuple[int, str]] = []
    calls: collections.Counter[str] = collections.Counter()

    def run(name: str) -> Callable[[], None]:
        return lambda: calls.update([name])

    seconds = turns.measure_in_turn(
        {n: run(n) for n in "abc"}, rounds=4, turn=lambda *turn: order.append(turn)
    )
    rounds = 4 + turns.WARM_ROUNDS
    assert [len(taken) for taken in seconds.values()] == [4 * turns.CALLS] * 3
    assert calls == dict.fromkeys("abc", rounds * (1 + turns.CALLS))
    assert "".join(name for _, name in order).startswith("bcacababc")
    assert [number for number, _ in order] == [n for n in range(1, rounds + 1) for _ in "abc"]


def test_idle_threads_are_waited_for_but_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = {"wall": 0.0, "cpu": 0.0}
    busy_until = 0.05

    def sleep(seconds: float) -> None:
        clock["wall"] += seconds
        if clock["wall"] < busy_until:
            clock["cpu"] += seconds

    monkeypatch.setattr(turns.time, "sleep", sleep)
    monkeypatch.setattr(turns.time, "perf_counter", lambda: clock["wall"])
    monkeypatch.setattr(turns.time, "process_time", lambda: clock["cpu"])
    turns.wait_for_idle_threads()
    assert clock["wall"] == pytest.approx(0.052, abs=0.004)
    clock["wall"], busy_until = 0.0, 9.0
    turns.wait_for_idle_threads(longest=0.2)
    assert clock["wall"] == pytest.approx(0.2, abs=0.004)


# One model


class FakeBackend:
    int8 = True

    def __init__(self, kind: str) -> None:
        self.kind = self.title = kind
        absent = {"no_such_module": "nothing>=1"} if kind == "absent" else {}
        self.packages: Mapping[str, str] = absent

    def version(self) -> str:
        return f"{self.kind} 1.0"

    def refusal(self, task: Task) -> str | None:
        return "not for this CPU" if self.kind == "refuses" else None

    def prepare(self, task: Task) -> Prepared:
        if self.kind == "raises":
            raise RuntimeError("no such\noperator")
        factor = {"right": 1.001, "nan": float("nan"), "wide": 1}[self.kind]

        def run(call: Arguments) -> Any:
            out = task.model(*call.args) * factor
            return out[:, None] if self.kind == "wide" else {"logits": out}

        return Prepared(lambda call: lambda: run(call), method="faked")

    def load(self, folder: Path, threads: int) -> Bind:
        raise NotImplementedError


class FakeSubject:
    name, weights, inputs = "tiny", "random", (InputShape((2, 6)),)

    def arguments(self, seed: int) -> Arguments:
        return Arguments((torch.randn(2, 6, generator=torch.Generator().manual_seed(seed)),))

    def model(self) -> nn.Module:
        return nn.Linear(6, 4).requires_grad_(False).eval()


def request(*names: str, **options: Any) -> BenchRequest:
    chosen = {"rounds": 2, "alone": False, **options}
    return BenchRequest("tiny", (InputShape((2, 6)),), RunSetting(2, 1), backends=names, **chosen)


def measured_with(
    kinds: Mapping[str, str], monkeypatch: pytest.MonkeyPatch, folder: Path, **options: Any
) -> ModelRun:
    monkeypatch.setattr(one_model, "subject", lambda *_: FakeSubject())
    monkeypatch.setattr(one_model.backends, "backend", lambda name: FakeBackend(kinds[name]))
    stage = folder / "stage"
    stage.write_bytes(b" " * one_model.STAGE_BYTES)
    return one_model.measure(request(*kinds, **options), stage)


def test_a_back_end_that_fails_is_recorded_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    kinds = {"ours": "right", "a": "raises", "b": "nan", "c": "absent", "d": "right",
             "e": "refuses", "f": "wide"}  # fmt: skip
    run = measured_with(kinds, monkeypatch, tmp_path, excluded={"d": "the process died"})
    assert {n: p.status for n, p in run.results.items()} == {
        "ours": "ok",
        "a": "failed",
        "b": "failed",
        "c": "skipped",
        "d": "failed",
        "e": "skipped",
        "f": "failed",
    }
    ours = run.results["ours"]
    assert ours.sqnr_db == pytest.approx(60, abs=0.1)  # 1 part in 1000
    assert len(ours.seconds) == 2 * turns.CALLS
    assert ours.method == "faked"
    assert run.results["a"].reason == "RuntimeError: no such operator"
    assert "not finite" in run.results["b"].reason
    assert "pip install 'nothing>=1'" in run.results["c"].reason
    assert run.results["d"].reason == "the process died"
    assert run.results["e"].reason == "not for this CPU"
    assert Stage.read(tmp_path / "stage") == ("measuring round 4 of 4", "ours")


def test_a_model_that_fails_on_its_inputs_is_a_run_that_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(FakeSubject, "arguments", lambda *_: Arguments((torch.zeros(3, 5),)))
    run = measured_with({"ours": "right"}, monkeypatch, tmp_path)
    assert "fails on inputs of 2×6" in run.error
    assert not run.results


def test_what_cannot_be_saved_has_no_cold_start_and_says_why(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = measured_with({"ours": "right"}, monkeypatch, tmp_path, alone=True)
    assert run.measured("ours") is not None
    assert run.results["ours"].alone_reason == "what it compiles cannot be saved"


def test_a_request_survives_the_file() -> None:
    named = (InputShape((1, 2), "int64", "ids"),)
    wanted = BenchRequest(
        "m", named, RunSetting(1, 2, 3, "avx2"), 4, ("fp32",), False, {"x": "died"}
    )
    assert BenchRequest.from_json(wanted.to_json()) == wanted


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["x86quant", "fp32", "bf16", "x86"])
def test_own_and_stock_back_ends_are_near_the_float_model(name: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1)).eval()
    calls = [Arguments((torch.randn(2, 3, 8, 8),)) for _ in range(4)]
    task = Task(model, "float", calls, calls[0], 1)
    found = backend(name)
    assert missing(found) is None
    if found.refusal(task):
        pytest.skip(str(found.refusal(task)))
    with torch.no_grad():
        got = found.prepare(task).bind(calls[0])()
        assert one_model.sqnr_db(model(*calls[0].args), got.float()) > 20


@pytest.mark.parametrize("name", BACKENDS)
def test_every_back_end_says_what_it_is(name: str) -> None:
    found = backend(name)
    assert found.title
    compiled = Task(nn.Identity(), "compiled", (), Arguments(()), 1)
    assert (found.refusal(compiled) is None) == (name == "x86quant")


# In processes of their own


def test_a_saved_model_answers_from_another_process(tmp_path: Path) -> None:
    model = nn.Linear(16, 4).eval()
    calls = [Arguments((torch.randn(32, 16),)) for _ in range(2)]
    with torch.no_grad():
        prepared = backend("x86quant").prepare(Task(model, "float", calls, calls[0], 1))
        assert prepared.save is not None
        prepared.save(tmp_path)
    alone.save_inputs(calls[0], tmp_path)
    cores = [(min(os.sched_getaffinity(0)),)]
    nothing = tmp_path / "nothing"
    nothing.mkdir()
    taken = instances.measure_instances(
        {"x86quant": tmp_path, "openvino-absent": nothing}, cores, 1, rounds=2
    )
    assert len(taken["x86quant"]) == 2
    assert "KeyError" in str(taken["openvino-absent"])


def test_a_process_that_runs_another_runtime_does_not_import_torch() -> None:
    """Its cold start and memory would be torch's."""
    code = (
        "import sys, x86quant.bench.alone\n"
        "from x86quant.bench.backends import backend\n"
        "for name in ('openvino', 'onnxruntime', 'openvino-fp32', 'onnxruntime-fp32'):\n"
        "    backend(name)\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_cores_are_split_evenly_or_it_is_refused() -> None:
    assert instances.split_cores([0, 1, 2, 3, 4], 2) == [(0, 1), (2, 3)]
    with pytest.raises(InvalidInputError, match="3 instances need a core each"):
        instances.split_cores([0, 1], 3)


# The parent

FAKE_WORKER = """
import json, os, signal, sys, time
request, result, stage = sys.argv[1:]
wanted = json.load(open(request))
def say(text):
    with open(stage, "r+b") as file:
        file.write(text.encode().ljust(64))
for name in wanted["backends"]:
    if name in wanted["excluded"]:
        continue
    say("preparing " + name)
    if name == "x86":
        os.kill(os.getpid(), signal.SIGKILL)
    if name == "openvino":
        time.sleep(60)
if wanted["name"] == "broken":
    say("building broken")
    sys.exit(3)
empty = {"reason": "", "method": "", "alone_reason": ""}
results = {
    name: {**empty, "status": "failed", "reason": wanted["excluded"][name], "seconds": []}
    if name in wanted["excluded"] else {**empty, "status": "ok", "seconds": [0.001]}
    for name in wanted["backends"]
}
json.dump(
    {"model": wanted["name"], "setting": wanted["setting"], "results": results, "error": "",
     "inputs": os.environ.get("X86QUANT_ISA", ""), "weights": ""},
    open(result, "w"),
)
"""


def run_fake_worker(name: str, folder: Path) -> ModelRun:
    script = folder / "fake_worker.py"
    script.write_text(FAKE_WORKER)
    names = ("x86quant", "openvino", "x86", "fp32")
    wanted = BenchRequest(name, (), RunSetting(1, 1, isa="avx2"), 3, names)
    return campaign.measure_apart(wanted, longest=0.5, worker=[sys.executable, str(script)])


def test_back_ends_that_crash_or_hang_lose_no_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_fake_worker("net", tmp_path)
    assert run.results["x86"].reason == "the process died of SIGKILL while preparing"
    assert "took longer than" in run.results["openvino"].reason
    assert run.measured("x86quant") is not None
    assert run.measured("fp32") is not None
    assert run.inputs == "avx2"
    assert "x86: FAILED" in capsys.readouterr().err


def test_a_failure_outside_any_back_end_is_the_error_of_the_run(tmp_path: Path) -> None:
    assert "ended with 3 while building broken" in run_fake_worker("broken", tmp_path).error


def test_a_lower_level_reaches_every_library_that_can_be_told(tmp_path: Path) -> None:
    variables = campaign.worker_environment(RunSetting(1, 2, isa="avx512_vnni"), tmp_path)
    assert variables["X86QUANT_ISA"] == "avx512_vnni"
    assert variables["ONEDNN_MAX_CPU_ISA"] == variables["DNNL_MAX_CPU_ISA"] == "AVX512_CORE_VNNI"
    assert variables["FBGEMM_ENABLE_INSTRUCTIONS"] == "AVX512_E1"
    assert variables["OMP_NUM_THREADS"] == "2"


# Keeping and going on


def requests(*names: str, rounds: int = 3) -> list[BenchRequest]:
    return [BenchRequest(n, (InputShape((1, 3)),), SETTING, rounds, ("x86quant",)) for n in names]


def test_an_interrupted_run_goes_on_where_it_stopped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []

    def measure(wanted: BenchRequest) -> ModelRun:
        asked.append(wanted.name)
        if wanted.name == "two" and asked.count("two") == 1:
            raise KeyboardInterrupt
        return model_run(wanted.name, x86quant=1)

    both = requests("one", "two")
    with pytest.raises(KeyboardInterrupt):
        campaign.run_campaign(both, measure, folder=tmp_path)
    assert [run.model for run in read_results(tmp_path / "results.json").runs] == ["one"]
    results = campaign.run_campaign(both, measure, folder=tmp_path, resume=True)
    assert asked == ["one", "two", "two"]
    assert [run.model for run in results.runs] == ["one", "two"]
    assert "one, batch 1, 1 thread: kept" in capsys.readouterr().err
    with pytest.raises(InvalidInputError, match="rounds were 3, are 9"):
        campaign.run_campaign(requests("one", rounds=9), measure, folder=tmp_path, resume=True)


def test_without_resume_everything_is_measured_again(tmp_path: Path) -> None:
    first = campaign.run_campaign(
        requests("one"), lambda _: model_run("one", x86quant=1), folder=tmp_path
    )
    second = campaign.run_campaign(
        requests("one"), lambda _: model_run("one", x86quant=2), folder=tmp_path
    )
    assert second.runs != first.runs
    assert read_results(tmp_path / "results.json").runs == second.runs


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidInputError, match="--out"):
        campaign.check_folder(tmp_path / "file" / "inner")
    campaign.check_folder(tmp_path / "a" / "b")
    assert not list((tmp_path / "a" / "b").iterdir())


def test_a_full_disk_is_found_before_measuring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(campaign, "write_aside", full)
    with pytest.raises(InvalidInputError, match="No space left on device"):
        campaign.check_folder(tmp_path)


# Models by name


def test_unknown_names_suggest_near_ones() -> None:
    with pytest.raises(InvalidInputError, match=r"did you mean (bert-base|.*bert-base)"):
        subjects.subject("bert-bas")
    with pytest.raises(InvalidInputError, match="there is no model 'xyzzy'"):
        subjects.subject("xyzzy")


def test_batches_and_shapes_are_resolved_before_anything_runs() -> None:
    assert subjects.subject("lstm").resized(4).inputs[0].sizes[0] == 4
    assert subjects.subject("dlrm").batch == 128
    call = subjects.subject("dlrm").resized(3).arguments(0)
    assert [tuple(x.shape) for x in call.args] == [(3, 13), (3, 26)]
    assert call.args[1].max() > 1, "indices spread over the tables"


def test_inputs_go_to_the_models_that_take_such() -> None:
    pytest.importorskip("torchvision")
    picture = (InputShape((1, 3, 32, 32)),)
    assert subjects.subject("resnet18", picture).inputs == picture
    assert subjects.subject("lstm", picture).inputs == subjects.subject("lstm").inputs
    assert subjects.subject("mine:net", picture).inputs == picture
    ids = (InputShape((1, 9), "int64", "ids"), InputShape((1, 2)))
    assert subjects.shapes_of(ids) == "ids=1×9 int64, 1×2"


def test_own_models_run_on_their_inputs() -> None:
    for name in ("lstm", "dlrm"):
        found = subjects.subject(name).resized(2)
        with torch.no_grad():
            assert len(found.model()(*found.arguments(1).args)) == 2


def test_torchvision_is_found_with_and_without_its_module() -> None:
    pytest.importorskip("torchvision")
    for name in ("resnet18", "torchvision.models:resnet18"):
        found = subjects.subject(name, (InputShape((2, 3, 8, 8)),))
        call = found.arguments(0)
        assert call.args[0].equal(vision.images(2, 8, 0))
    with pytest.raises(InvalidInputError, match="did you mean resnet18"):
        subjects.subject("resnet81")


def test_images_differ_from_each_other_and_not_from_themselves() -> None:
    first, again = vision.images(2, 16, seed=1), vision.images(2, 16, seed=1)
    assert first.equal(again)
    assert not first.equal(vision.images(2, 16, seed=2))
    assert float(first.std()) == pytest.approx(1)
    # Neighbours are alike, which they are not in white noise.
    assert float((first[..., 1:] - first[..., :-1]).std()) < 0.9


def test_results_with_every_status_have_all_fields() -> None:
    assert ran(1).median == pytest.approx(0.001)
    assert BackendResult("failed", "why").seconds == ()


@pytest.mark.parametrize(
    ("level", "int8", "floats"), [(None, True, False), (None, False, True), ("avx2", True, True)]
)
def test_openvino_computes_in_float32_where_bfloat16_is_taken_away(
    level: str | None, int8: bool, floats: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from x86quant.bench.backends import openvino_backend

    monkeypatch.setattr(openvino_backend, "forced_level", lambda: level)
    hint = {"INFERENCE_PRECISION_HINT": "f32"} if floats else {}
    assert openvino_backend._precision(int8=int8) == hint
