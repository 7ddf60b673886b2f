"""``profile``: every step timed, sums that add up, the roofline, JSON, traces. No time limits."""

from __future__ import annotations

import itertools
import json
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import x86quant
from tests.lowering.test_lowering import IMAGE, Residual
from tests.native import capi
from tests.runtime.compiled_models import compiled
from x86quant import extension
from x86quant.compiled import GuardedModule
from x86quant.compiled.compiled_parts import compiled_parts
from x86quant.dynamic import DynamicLSTM
from x86quant.errors import InvalidInputError, X86QuantWarning
from x86quant.hardware.cpu import cpu
from x86quant.profiling import Profile, Roofline, measure_roofline, profiler, roofline
from x86quant.profiling.recorder import Recorder
from x86quant.profiling.roofline import PEAK_SHAPES, MemoryLevel, using_threads
from x86quant.profiling.run_step import RunStep

pytestmark = pytest.mark.filterwarnings("ignore:Please use quant_min and quant_max:UserWarning")

ROOF = Roofline(
    "avx2",
    1,
    100.0,
    (
        MemoryLevel("L2", 1000, 50.0),
        MemoryLevel("L3", 8000, 20.0),
        MemoryLevel("memory", None, 5.0),
    ),
)


@pytest.fixture(scope="module")
def module() -> x86quant.CompiledModule:
    """Segments before and behind a float op."""
    torch.manual_seed(0)
    mixed = nn.Sequential(Residual(), nn.Softmax(1), nn.Linear(5, 3))
    return compiled(mixed, *IMAGE)


@pytest.fixture(scope="module")
def measured(module: x86quant.CompiledModule) -> Profile:
    return x86quant.profile(module, (torch.randn(IMAGE),), runs=4, threads=1)


def test_every_step_is_there_in_order(module: x86quant.CompiledModule, measured: Profile) -> None:
    explained = [(c.layer, c.op, c.kernel, c.rule) for c in x86quant.explain(module)]
    profiled = [(s.step.layer, s.step.op, s.step.kernel, s.step.rule) for s in measured]
    assert profiled == explained
    assert {"torch", "native"} == {step.step.kernel for step in measured}


def test_products_and_bytes_are_those_of_the_layers(measured: Profile) -> None:
    steps = {s.step.layer: s.step for s in measured if s.step.choice}
    stem = steps["0.stem.0"]  # 4 -> 8 channels, 3x3, 2 images of 10x9
    assert stem.multiply_adds == 2 * 10 * 9 * 8 * 4 * 9
    assert stem.weight_bytes == 8 * 4 * 9
    assert stem.activation_bytes == 2 * 10 * 9 * (4 + 8)
    assert stem.kind == "conv 3×3"
    assert steps["0.left"].kind == "depthwise 3×3"


def test_sums_are_consistent(measured: Profile) -> None:
    total = sum(step.microseconds for step in measured)
    for summary in (measured.by_kernel(), measured.by_kind()):
        assert sum(group.microseconds for group in summary) == pytest.approx(total)
        assert sum(group.steps for group in summary) == len(measured)
        assert sum(group.share for group in summary) == pytest.approx(1)
    assert measured.steps_us == pytest.approx(total)
    assert measured.steps_us + measured.between_us == measured.run_us
    assert measured.between_share * measured.run_us == pytest.approx(measured.between_us)
    assert measured.between_us > 0
    assert measured.least_wall_us <= measured.wall_us
    assert measured.peak_bytes <= measured.naive_bytes
    for step in measured:
        if step.gops is not None:
            assert step.gops * step.microseconds * 1e3 == pytest.approx(2 * step.step.multiply_adds)


def test_it_restores_the_number_of_threads(module: x86quant.CompiledModule) -> None:
    before = torch.get_num_threads()
    done = x86quant.profile(module, (torch.randn(IMAGE),), runs=1, threads=before + 1)
    assert done.threads == before + 1
    assert done.roofline.threads == before + 1
    assert torch.get_num_threads() == before
    with pytest.raises(RuntimeError, match="inside"), using_threads(before + 1):
        raise RuntimeError("inside")
    assert torch.get_num_threads() == before


def test_parts_of_a_batch_count_all() -> None:
    """A batch that runs in parts has the products of all of them."""
    wide = compiled(nn.Sequential(nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3)), 4, 8, 20, 20)
    done = x86quant.profile(wide, (torch.randn(4, 8, 20, 20),), runs=1, threads=2)
    (first, _) = (s.step for s in done if s.step.choice)
    assert first.parts == wide.segments[0].plans[-1].parts > 1
    assert first.output == (4, 8, 18, 18)
    assert first.weight_bytes == 8 * 8 * 9
    assert first.multiply_adds == 4 * 18 * 18 * 8 * 8 * 9
    assert first.shape.endswith(f"{first.parts} parts")


def test_json_round_trip(measured: Profile) -> None:
    data = json.loads(measured.to_json())
    assert data == measured.to_dict() | {"roofline": data["roofline"]}
    assert data["roofline"]["gops"] == measured.roofline.gops
    assert [s["layer"] for s in data["steps"]] == [s.step.layer for s in measured]
    assert data["wall_us"] == measured.wall_us


def test_trace_is_valid_and_whole(measured: Profile, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text("old")
    measured.to_chrome_trace(path)
    assert [p.name for p in tmp_path.iterdir()] == ["trace.json"]  # nothing left beside it
    trace = json.loads(path.read_text())
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert all({"name", "ph", "pid", "tid", "ts", "dur"} <= event.keys() for event in events)
    run, *steps = events
    assert run["dur"] == measured.run_us
    assert [step["args"]["layer"] for step in steps] == [s.step.layer for s in measured]
    for before, after in itertools.pairwise(steps):
        assert after["ts"] == pytest.approx(before["ts"] + before["dur"])  # no overlaps


def test_a_trace_that_cannot_be_written_says_why(measured: Profile, tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="there is no folder"):
        measured.to_chrome_trace(tmp_path / "missing" / "trace.json")


def test_it_prints_steps_kinds_and_totals(measured: Profile) -> None:
    text = str(measured)
    for wanted in ("0.stem.0", "softmax (float)", "depthwise 3×3", "between", "GOPS"):
        assert wanted in text
    assert "native" in str(measured.by_kernel())


def test_roofline_is_measured_once_for_this_isa() -> None:
    found = measure_roofline(1)
    assert found.isa == cpu().isa
    assert found.gops > 0
    assert [level.holds is None for level in found.levels][-1]
    assert all(level.gb_per_s > 0 for level in found.levels)
    assert measure_roofline(1) is found


def test_what_takes_long_is_measured_three_times(monkeypatch: pytest.MonkeyPatch) -> None:
    times = [3.0, 1.0, 2.0, *[0.0] * 37]
    for second, calls in ((1.0, 3), (0.001, 40)):
        clock, left = itertools.count(0.0, second), iter(times)
        monkeypatch.setattr(roofline, "perf_counter", clock.__next__)
        least = roofline._least(left.__next__, 40)
        assert len(list(left)) == 40 - calls
        assert least == min(times[:calls])


def step_of(products: int, activations: int, weights: int, parts: int = 1) -> RunStep:
    return RunStep(  # type: ignore[misc]
        *["x"] * 6,
        inputs=(),
        output=(),
        parts=parts,
        multiply_adds=products,
        activation_bytes=activations,
        weight_bytes=weights,
    )


@pytest.mark.parametrize(
    ("step", "model_bytes", "microseconds"),
    [
        (step_of(1000, 1, 1), 1, 0.02),  # operations: 2000 at 100 GOPS
        (step_of(0, 1000, 0), 1000, 0.02),  # activations in L2
        (step_of(0, 1001, 0), 1001, 1001 / 20e3),  # just not
        (step_of(0, 4000, 0, parts=4), 1000, 0.08),  # in L2, one part after another
        (step_of(0, 0, 1000), 9000, 0.2),  # weights of a model that only memory holds
        (step_of(0, 500, 1000), 2000, 0.01 + 0.05),
    ],
)
def test_bound_is_the_slower_of_operations_and_bytes(
    step: RunStep, model_bytes: int, microseconds: float
) -> None:
    assert ROOF.bound_us(step, model_bytes) == pytest.approx(microseconds)


def test_the_timer_is_taken_off_native_steps_only(
    module: x86quant.CompiledModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiler, "measure_timer", lambda: 1e9)
    done = x86quant.profile(module, (torch.randn(IMAGE),), runs=1, threads=1)
    zero = {step.step.kernel for step in done if step.microseconds == 0}
    assert zero == {"native"}
    assert all(step.microseconds > 0 for step in done if step.step.kernel == "torch")
    json.loads(done.to_json())  # rates of steps that take no time are null, not infinite


def test_bad_arguments_are_named(module: x86quant.CompiledModule) -> None:
    x = torch.randn(IMAGE)
    with pytest.raises(x86quant.InvalidInputError, match=r"x86quant\.compile"):
        x86quant.profile(nn.ReLU(), (x,))  # type: ignore[arg-type]
    with pytest.raises(x86quant.InvalidInputError, match="tuple of inputs"):
        x86quant.profile(module, x)
    with pytest.raises(x86quant.InvalidInputError, match="empty"):
        x86quant.profile(module, (x[:0],))
    with pytest.raises(x86quant.InvalidInputError, match="runs=0"):
        x86quant.profile(module, (x,), runs=0)
    with pytest.raises(x86quant.InvalidInputError, match="rank"):
        x86quant.profile(module, (x[0],))


# --- models of several parts ---


class Parts(nn.Module):
    """A static part, layers that stay modules, and a choice that no tracer can follow."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 32, 4, stride=4))
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        self.head = nn.Linear(32, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.stem(x).flatten(2).transpose(1, 2)
        if float(y.detach().abs().max()) > 1e9:
            y = y * 2
        out: torch.Tensor = self.head(self.layer(y).mean(1))
        return out


PICTURE = (1, 3, 18, 18)


@pytest.fixture(scope="module")
def parts() -> nn.Module:
    torch.manual_seed(0)
    batches = [(torch.randn(PICTURE),) for _ in range(3)]
    made = x86quant.quantize(Parts().eval(), batches, speed_check=False, progress=False)
    assert isinstance(made.stem, x86quant.CompiledModule)  # type: ignore[attr-defined]
    return made  # type: ignore[no-any-return]


def check_sums(done: Profile) -> None:
    """Every microsecond of the run is in one place, and no place has less than none."""
    assert done.steps_us + done.between_us + done.outside_us == pytest.approx(done.run_us)
    assert done.outside_us > 0
    for summary in (done.by_kernel(), done.by_kind()):
        taken = sum(group.microseconds for group in summary)
        assert taken == pytest.approx(done.steps_us + done.outside_us)
        assert sum(group.share for group in summary) == pytest.approx(1)
        assert sum(group.steps for group in summary) == len(done)
        assert "outside of graphs" in {group.name for group in summary}
    assert "outside of graphs" in str(done).split("kind")[1]
    assert done.to_dict()["outside_us"] == done.outside_us


def test_parts_are_listed_in_the_order_they_run(parts: nn.Module) -> None:
    done = x86quant.profile(parts, (torch.randn(PICTURE),), runs=3, threads=1)
    layers = [step.step.layer for step in done]
    wanted = ["stem.0", "stem.2", "layer.self_attn", "layer.linear1", "layer.linear2", "head"]
    # What lays out the stem's result in memory is a step of that layer as well.
    assert [*dict.fromkeys(layer for layer in layers if layer in wanted)] == wanted
    assert all(layer.startswith(("stem.", "layer.", "head")) for layer in layers)
    steps = {step.step.layer: step.step for step in done}
    assert steps["layer.linear1"].multiply_adds == 16 * 32 * 64
    assert steps["layer.linear1"].kind == "linear"
    assert steps["stem.0"].multiply_adds == 16 * 16 * 16 * 3 * 9
    check_sums(done)


def test_timing_leaves_no_trace_in_the_model(parts: nn.Module) -> None:
    x = torch.randn(PICTURE)
    with torch.no_grad():
        before = parts(x)
        known = {name: dict(vars(m)) for name, m in parts.named_modules()}
        x86quant.profile(parts, (x,), runs=1, threads=1)
        assert torch.equal(parts(x), before)
    for name, m in parts.named_modules():
        assert vars(m).keys() == known[name].keys()
        assert "forward" not in vars(m)
        assert vars(m).get("_runtime") is known[name].get("_runtime")


def test_timed_runs_compute_what_plain_ones_do(parts: nn.Module) -> None:
    x = torch.randn(PICTURE)
    with torch.no_grad():
        assert torch.equal(Recorder(parts, (x,)).run().result, parts(x))


def test_a_saved_model_of_several_parts(parts: nn.Module, tmp_path: Path) -> None:
    with pytest.warns(X86QuantWarning, match="not its code"):
        x86quant.save(parts, tmp_path / "parts.x86q")
    x = torch.randn(PICTURE)
    loaded = x86quant.load(tmp_path / "parts.x86q", model=Parts())
    ours, theirs = (x86quant.profile(m, (x,), runs=1, threads=1) for m in (parts, loaded))
    assert [s.step.layer for s in ours] == [s.step.layer for s in theirs]


def test_a_part_that_runs_twice_is_listed_twice() -> None:
    part = compiled(nn.Sequential(nn.Conv2d(4, 8, 1), nn.ReLU()), 1, 4, 6, 6)

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = part

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.part(x).sum() + self.part(x[..., :3]).sum()
            return out

    done = x86quant.profile(Twice(), (torch.randn(1, 4, 6, 6),), runs=2, threads=1)
    outputs = [s.step.output for s in done if s.step.choice]
    assert outputs == [(1, 8, 6, 6), (1, 8, 6, 3)]
    check_sums(done)


def test_what_other_threads_run_is_not_noted(parts: nn.Module) -> None:
    class Aside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = parts

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found = []

            def run() -> None:
                with torch.no_grad():
                    found.append(self.inner(x))

            thread = threading.Thread(target=run)
            thread.start()
            thread.join()
            out: torch.Tensor = self.inner(x) + found[0]
            return out

    x = torch.randn(PICTURE)
    alone = x86quant.profile(parts, (x,), runs=1, threads=1)
    both = Recorder(Aside(), (x,))
    assert len(both.steps) == len(alone)
    with torch.no_grad():
        assert torch.equal(both.run().result, 2 * parts(x))


def test_layers_that_run_one_by_one_are_steps() -> None:
    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(32, 256, batch_first=True)
            self.head = nn.Linear(256, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.head(self.lstm(x)[0])
            return out

    dynamic = x86quant.to_dynamic(Reader().eval())
    assert isinstance(dynamic.lstm, DynamicLSTM)
    done = x86quant.profile(dynamic, (torch.randn(2, 7, 32),), runs=2, threads=1)
    assert [(s.step.layer, s.step.kind) for s in done] == [
        ("lstm", "DynamicLSTM"),
        ("head", "linear"),
    ]
    lstm, head = (s.step for s in done)
    assert lstm.multiply_adds == 14 * 4 * 256 * (32 + 256)
    assert head.multiply_adds == 14 * 256 * 32
    check_sums(done)
    assert done.between_us == pytest.approx(0, abs=1e-6)


class BySize(nn.Module):
    """Branches on a size, so that what is traced holds for some sizes alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(4, 8, 1), nn.Conv2d(8, 4, 1)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.first(x)
        if x.shape[2] > 4:
            y = y.relu()
        return {"out": self.second(y)}


def test_a_guarded_part_has_the_name_of_what_it_stands_for() -> None:
    x = torch.randn(2, 4, 6, 6)
    body = x86quant.quantize(BySize().eval(), [(x,)], speed_check=False, progress=False)
    assert isinstance(body, GuardedModule)
    assert [path for path, _ in compiled_parts(nn.ModuleDict({"body": body}))] == ["body"]
    done = x86quant.profile(body, (x,), runs=1, threads=1)
    assert [s.step.layer for s in done] == [c.layer for c in x86quant.explain(body)]
    assert {"first", "second"} <= {s.step.layer for s in done}
    check_sums(done)


# --- the roofline ---


@pytest.mark.parametrize("isa", [level for level in capi.ISAS if level != "reference"])
def test_no_peak_is_measured_by_winograds_algorithm(isa: str) -> None:
    """What multiplies less than is counted would make a roof that no direct product can reach."""
    library = capi.Library(Path(extension.__file__).with_name("_C.so"))

    def direct(kernel: tuple[int, int]) -> bool:
        spec = capi.ConvSpec(np.ones((64, 64, 1, *kernel), np.int8), np.ones(64, np.float32))
        try:
            library.pack(spec, isa, "winograd")
        except capi.NativeError:
            return True
        return False

    assert all(direct(kernel) for _, _, kernel in PEAK_SHAPES)
    assert direct((3, 3)) == (isa == "amx_int8")
