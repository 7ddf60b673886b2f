"""Measuring one op with every kernel: check each result, then time those that are right."""

from __future__ import annotations

import functools
import gc
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from x86quant.cpu_info import cpu
from x86quant.tuning.candidates import Candidate, MakeOperands, Runner, candidates
from x86quant.tuning.measurements import Caller, Case, Measurement, Status
from x86quant.tuning.operands import Operands, make_operands, result_shape
from x86quant.tuning.ranking import Timed, settle, ties
from x86quant.tuning.shapes import input_shape, weight_shape

# Rotated operands overflow this many second-level caches, unless the op is so small that it
# would take more copies than these to.
_CACHES = 2
_MOST_COPIES = 24
_USUAL_L2 = 2 * 2**20

#: Which kernels not to try again: (caller, kernel) -> what became of it.
Excluded = Mapping[tuple[str, str], str]
#: Told (caller, kernel) before it runs, so that a crash can be put down to it.
Announce = Callable[[str, str], None]
FindCandidates = Callable[[Caller, MakeOperands], Sequence[Candidate]]


def measure(
    cases: Sequence[Case],
    *,
    limit: float,
    excluded: Excluded | None = None,
    announce: Announce = lambda caller, kernel: None,
    find: FindCandidates = candidates,
) -> list[Measurement]:
    """Measure ``cases``, which share their op and differ in caller and cache only.

    Args:
        cases: what to measure.
        limit: seconds of timing for each case; its ranking settles earlier as a rule.
        excluded: kernels that ended an earlier attempt.
        announce: see ``Announce``.
        find: what can run a case.
    """
    spec = cases[0].spec
    operands = functools.cache(functools.partial(make_operands, spec))
    found: list[Measurement] = []
    before = torch.get_num_threads()
    torch.set_num_threads(spec.threads or before)
    try:
        for caller in dict.fromkeys(case.caller for case in cases):
            of_caller = [case for case in cases if case.caller == caller]
            tried = _try_all(find(caller, operands), excluded or {}, announce)
            for case in of_caller:
                found += _measure_case(case, tried, limit, announce)
    finally:
        torch.set_num_threads(before)
    return found


class _Tried:
    """A candidate after its check: ready to time, or with what became of it."""

    def __init__(
        self, candidate: Candidate, status: Status, note: str, runner: Runner | None = None
    ) -> None:
        self.candidate, self.status, self.note, self.runner = candidate, status, note, runner


def _try_all(found: Sequence[Candidate], excluded: Excluded, announce: Announce) -> list[_Tried]:
    tried = []
    for candidate in found:
        crash = excluded.get((candidate.caller, candidate.name))
        if crash is not None:
            tried.append(_Tried(candidate, "failed", crash))
            continue
        announce(candidate.caller, candidate.name)
        tried.append(_try(candidate))
        announce("", "")
    return tried


def _try(candidate: Candidate) -> _Tried:
    """Pack, run, compare with the reference."""
    if candidate.make is None:
        return _Tried(candidate, candidate.status, candidate.note)
    assert candidate.operands is not None
    try:
        runner = candidate.make()
        difference = candidate.operands.difference(runner.result())
    except Exception as error:  # whatever a kernel raises is its result, not ours
        return _Tried(candidate, "failed", _in_a_line(error))
    if difference is not None:
        return _Tried(candidate, "wrong", difference)
    return _Tried(candidate, "ok", candidate.note, runner)


def _in_a_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:300]


def _measure_case(
    case: Case, tried: Sequence[_Tried], limit: float, announce: Announce
) -> Iterator[Measurement]:
    """Time what is right; every candidate gives one measurement."""
    rotated = case.cache == "rotated"
    blocks = {}
    for one in tried:
        if one.runner is None:
            continue
        name = one.candidate.name
        if rotated:
            announce(case.caller, name)
            assert one.candidate.operands is not None
            one.runner.spread(copies(one.candidate.operands))
        blocks[name] = functools.partial(_block, one.runner, case.caller, name, rotated, announce)
    with _no_garbage_collection():
        timed = settle(blocks, limit=limit)
    announce("", "")
    equal = ties(timed)
    for one in tried:
        name = one.candidate.name
        if name not in timed:
            yield Measurement(case, name, one.status, note=one.note)
        else:
            yield _measurement(case, name, timed[name], name in equal, one.note)


def _block(
    runner: Runner, caller: str, name: str, rotated: bool, announce: Announce, calls: int
) -> float:
    announce(caller, name)
    return runner.seconds(calls, rotated=rotated)


def _measurement(case: Case, name: str, timed: Timed, tie: bool, note: str) -> Measurement:
    return Measurement(
        case,
        name,
        "ok",
        median_us=timed.median * 1e6,
        low_us=timed.low * 1e6,
        high_us=timed.high * 1e6,
        min_us=timed.fastest * 1e6,
        rounds=timed.rounds,
        tie=tie,
        note=note,
    )


def copies(operands: Operands) -> int:
    """Sets of operands that together overflow the second-level cache."""
    spec = operands.spec
    nbytes = sum(map(math.prod, (input_shape(spec), weight_shape(spec), result_shape(spec))))
    enough = math.ceil(_CACHES * (cpu().l2 or _USUAL_L2) / nbytes)
    return max(2, min(enough, _MOST_COPIES))


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
