"""The interleaved timer: order, counts and results, never speed."""

from __future__ import annotations

import pytest

from x86quant.errors import InvalidInputError
from x86quant.profiling import timing


def test_candidates_take_turns_and_rotate():
    calls: list[str] = []
    functions = {name: lambda name=name: calls.append(name) for name in "abc"}
    timing.interleaved(functions, rounds=3, warmup=0)
    assert "".join(calls) == "abcbcacab"


def test_warmup_and_calls_are_counted():
    calls: list[str] = []
    functions = {name: lambda name=name: calls.append(name) for name in "ab"}
    timing.interleaved(functions, rounds=2, calls=3, warmup=1)
    assert "".join(calls) == "ab" + "aaabbb" + "bbbaaa"


def test_median_and_minimum_are_per_call_and_per_candidate(monkeypatch):
    # Each measurement reads the clock twice: a takes 2, 4, 12 seconds, b always 8.
    ticks = iter([0, 2, 0, 8, 0, 8, 0, 4, 0, 12, 0, 8])
    monkeypatch.setattr(timing, "perf_counter", lambda: next(ticks))
    functions = {"a": lambda: None, "b": lambda: None}
    result = timing.interleaved(functions, rounds=3, calls=2, warmup=0)
    assert list(result) == ["a", "b"]
    assert result["a"] == timing.Timing(median=2.0, minimum=1.0, rounds=3)
    assert result["b"] == timing.Timing(median=4.0, minimum=4.0, rounds=3)


@pytest.mark.parametrize("bad", [{"rounds": 0}, {"calls": 0}, {"warmup": -1}])
def test_bad_counts_are_refused(bad):
    with pytest.raises(InvalidInputError, match="rounds"):
        timing.interleaved({"a": lambda: None}, **bad)


def test_nothing_to_time_is_refused():
    with pytest.raises(InvalidInputError, match="at least one"):
        timing.interleaved({})
