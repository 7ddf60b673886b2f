"""How kernels are timed in turn and held against each other, and what ends a worker."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable

import pytest
import torch

from tests.tuning.small_runs import (
    CONV,
    LINEAR,
    _own_cache,
    case,
    fake_worker,
)
from x86quant.errors import TuningError
from x86quant.spec import OpSpec
from x86quant.terminal import progress
from x86quant.tuning import measure, quiet, ranking
from x86quant.tuning.candidates import Candidate, MakeOperands
from x86quant.tuning.measurements import Caller, Measurement
from x86quant.tuning.operands import FULL
from x86quant.tuning.worker import Worker

__all__ = ["_own_cache"]

# ---------------------------------------------------------------------------- ranking


class Machine:
    """A clock, and calls that move it."""

    def __init__(self) -> None:
        self.now = 0.0
        self.calls: dict[str, int] = {}

    def block(self, name: str, *seconds: float) -> Callable[[int], float]:
        """Calls that take these times in turn."""

        def run(calls: int) -> float:
            count = self.calls[name] = self.calls.get(name, 0) + 1
            taken = seconds[count % len(seconds)]
            self.now += taken * calls
            return taken

        return run

    def settle(self, limit: float = 100.0, **blocks: tuple[float, ...]) -> dict[str, ranking.Timed]:
        return ranking.settle(
            {name: self.block(name, *times) for name, times in blocks.items()},
            limit=limit,
            clock=lambda: self.now,
        )


def test_a_clear_ranking_is_settled_after_few_rounds() -> None:
    found = Machine().settle(fast=(1e-4, 1.01e-4), slow=(1.5e-4, 1.52e-4))
    assert found["fast"].rounds == found["slow"].rounds == 9
    assert ranking.ties(found) == frozenset()


def test_noise_is_measured_longer_and_overlap_is_a_tie() -> None:
    found = Machine().settle(a=(1e-4, 1.3e-4), b=(1.08e-4, 1.4e-4))
    assert found["a"].rounds == 61
    assert ranking.ties(found) == {"a", "b"}


def test_three_percent_is_a_tie_whatever_the_precision() -> None:
    found = Machine().settle(a=(1e-4,), b=(1.02e-4,), c=(1.05e-4,))
    assert found["a"].rounds == 9
    assert ranking.ties(found) == {"a", "b"}


def test_a_hopeless_kernel_is_not_timed_again() -> None:
    machine = Machine()
    found = machine.settle(fast=(1e-4,), hopeless=(2e-3,))
    assert found["hopeless"].rounds == 1
    assert machine.calls["hopeless"] == 2
    found = Machine().settle(fast=(1e-4,), slow=(3e-4,), near=(1.3e-4,))
    assert (found["slow"].rounds, found["near"].rounds) == (3, 9)


def test_one_stall_does_not_make_a_kernel_hopeless() -> None:
    stalled = [0.02, *[1e-4] * 99]
    found = Machine().settle(steady=(1.5e-4,), stalled=(stalled[-1], *stalled[:-1]))
    assert found["stalled"].rounds == found["steady"].rounds == 9
    assert found["stalled"].median == 1e-4


def test_the_limit_ends_timing_but_everybody_is_timed() -> None:
    found = Machine().settle(limit=1e-9, a=(1e-3, 1.2e-3), b=(1e-3, 1.2e-3))
    assert {name: t.rounds for name, t in found.items()} == {"a": 1, "b": 1}


@pytest.mark.parametrize(("rounds", "outside"), [(1, 0), (5, 0), (6, 0), (9, 1), (20, 5), (61, 22)])
def test_the_interval_of_the_median_is_that_of_the_sign_test(rounds: int, outside: int) -> None:
    found = ranking.summary([float(n) for n in range(rounds)])
    assert (found.low, found.high) == (outside, rounds - 1 - outside)


# ---------------------------------------------------------------------------- measuring


class Runner:
    """Gives ``result``, or raises it, and always takes as long."""

    def __init__(self, result: torch.Tensor | Exception, taken: float) -> None:
        self._result, self._taken = result, taken
        self.copies = 1

    def result(self) -> torch.Tensor:
        if isinstance(self._result, Exception):
            raise self._result
        return self._result

    def spread(self, copies: int) -> None:
        self.copies = copies

    def seconds(self, calls: int, *, rotated: bool) -> float:
        return self._taken * (2 if rotated else 1)


def fake_candidates(caller: Caller, operands: MakeOperands) -> list[Candidate]:
    made = operands(FULL)
    ((_, right),) = made.expected
    wrong = right.clone()
    wrong[(-1,) * wrong.dim()] ^= 0x40

    def candidate(name: str, result: torch.Tensor | Exception, taken: float) -> Candidate:
        return Candidate(caller, name, lambda: Runner(result, taken), "ok", operands=made)

    return [
        candidate("right", right, 2e-4),
        candidate("wrong", wrong, 1e-4),
        candidate("broken", RuntimeError("no such\nprimitive"), 1e-4),
        Candidate(caller, "refusing", note="cannot"),
    ]


def by_kernel(found: list[Measurement], **fields: str) -> dict[str, Measurement]:
    return {
        m.kernel_name: m
        for m in found
        if all(getattr(m.case, name) == value for name, value in fields.items())
    }


def test_wrong_and_failing_kernels_are_recorded_not_timed() -> None:
    found = by_kernel(measure.measure([case()], limit=0.1, find=fake_candidates))
    assert {name: m.status for name, m in found.items()} == {
        "right": "ok", "wrong": "wrong", "broken": "failed", "refusing": "unsupported",
    }  # fmt: skip
    assert found["right"].median_us == pytest.approx(200)
    assert found["wrong"].median_us is None
    assert "steps of the output scale" in found["wrong"].note
    assert found["broken"].note == "RuntimeError: no such primitive"


def test_kernels_that_ended_the_process_are_left_out() -> None:
    found = measure.measure(
        [case()], limit=0.1, find=fake_candidates, excluded={("stock", "right"): "it died"}
    )
    assert (found[0].status, found[0].note) == ("failed", "it died")


def test_caches_are_timed_apart_unless_operands_overflow_them() -> None:
    both = [case(), case(cache="rotated")]
    found = measure.measure(both, limit=0.1, find=fake_candidates)
    assert by_kernel(found, cache="hot")["right"].median_us == pytest.approx(200)
    assert by_kernel(found, cache="rotated")["right"].median_us == pytest.approx(400)
    assert measure.copies_to_rotate(CONV) > 2
    huge = OpSpec("linear", 8192, 8192, rows=1, threads=1)
    assert measure.copies_to_rotate(huge) == 1


@pytest.mark.parametrize(("first", "calls"), [(0.01, None), (1.0, 1), (30.0, 0)])
def test_a_kernel_that_takes_seconds_is_not_timed_for_each_cache(
    monkeypatch: pytest.MonkeyPatch, first: float, calls: int | None
) -> None:
    now, alone = [0.0], []

    class Slow(Runner):
        def result(self) -> torch.Tensor:
            now[0] += first
            return super().result()

        def seconds(self, calls: int, *, rotated: bool) -> float:
            alone.append(rotated)
            return super().seconds(calls, rotated=rotated)

    def find(caller: Caller, operands: MakeOperands) -> list[Candidate]:
        made = operands(FULL)
        ((_, right),) = made.expected
        slow = Candidate(caller, "slow", lambda: Slow(right, first), "ok", operands=made)
        return [fake_candidates(caller, operands)[0], slow]

    monkeypatch.setattr(measure, "perf_counter", lambda: now[0])
    both = [case(), case(cache="rotated")]
    found = measure.measure(both, limit=0.1, find=find)
    for cache, factor in (("hot", 1), ("rotated", 2)):
        median = by_kernel(found, cache=cache)["slow"].median_us
        assert median == pytest.approx(first * 1e6 * (factor if first < 1 else 1))
    assert len(alone) == calls if calls is not None else len(alone) > 1


def test_threads_are_put_back() -> None:
    before = torch.get_num_threads()
    measure.measure([case(CONV.replace(threads=2))], limit=0.01, find=fake_candidates)
    assert torch.get_num_threads() == before


def test_a_kernel_that_ends_the_process_is_recorded_and_the_rest_measured() -> None:
    with fake_worker("fast", "segfaults")("avx2") as worker:
        found = by_kernel(worker.measure([case()], 0.1))
        again = by_kernel(worker.measure([case(LINEAR)], 0.1))
    assert (found["fast"].status, found["fast"].median_us) == ("ok", pytest.approx(10))
    assert found["segfaults"].status == "failed"
    assert found["segfaults"].note == "the process died of SIGSEGV"
    assert again["fast"].status == "ok"


def test_a_kernel_that_hangs_is_given_up() -> None:
    with fake_worker("fast", "hangs", patience=1.5)("avx2") as worker:
        found = by_kernel(worker.measure([case()], 0.1))
    assert found["hangs"].note == "it did not finish within 2 s"
    assert found["fast"].status == "ok"


def test_a_process_that_ends_without_a_kernel_to_blame_is_an_error() -> None:
    words = [sys.executable, "-c", "import sys; sys.exit('out of memory')"]
    with (
        Worker("avx2", words) as worker,
        pytest.raises(TuningError, match=r"(?s)exit status 1.*out of memory"),
    ):
        worker.measure([case()], 0.1)


# ---------------------------------------------------------------------------- quiet, progress


def test_a_machine_is_quiet_unless_turns_wait_or_time_is_stolen() -> None:
    steady = [1.0] * 100
    calm = quiet.judge(steady, 100, 100, (0, 0), (0, 1000))
    assert calm.enough
    jittery = quiet.judge(steady[:80] + [1.5] * 20, 100, 100, (0, 0), (0, 1000))
    waiting = quiet.judge(steady, 100, 60, (0, 0), (0, 1000))
    stolen = quiet.judge(steady, 100, 100, (0, 0), (100, 1000))
    assert [q.enough for q in (jittery, waiting, stolen)] == [False] * 3
    assert str(calm.worse(stolen)) == "no (jitter 0%, waiting 0%, stolen 10%)"


def test_progress_says_the_time_left() -> None:
    now, stream = [0.0], io.StringIO()
    bar = progress.Progress(100, "avx2", stream=stream, clock=lambda: now[0], deadline=150.0)
    assert bar.left() is None
    now[0] = 40.0
    bar.advance(25, "conv")
    assert bar.left() == 110  # 120 by the pace, but the budget ends before
    assert stream.getvalue() == "avx2 [######                  ]  25% 1:50 left  conv\n"
