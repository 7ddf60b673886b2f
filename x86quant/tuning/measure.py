"""Measuring one op with every kernel: check each result, then time those that are right."""

from __future__ import annotations

import dataclasses
import functools
import gc
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import torch

from x86quant.hardware.cpu import cpu
from x86quant.kernels.reference import ReferenceKernel
from x86quant.routing.in_force import use_rules
from x86quant.spec import OpSpec
from x86quant.tables.table import Rule, RuleTable
from x86quant.tuning.candidates import Candidate, MakeOperands, Runner, candidates
from x86quant.tuning.layer_shapes import bytes_touched
from x86quant.tuning.measured_lookups import make_lookup
from x86quant.tuning.measurements import Caller, Case, Measurement, Status
from x86quant.tuning.operands import make_operands
from x86quant.tuning.ranking import LONGEST_STALL, Block, Timed, settle, summary, ties

# Rotated operands overflow this many second-level caches, unless the op is so small that it
# would take more copies than these to.
_CACHES = 1.5
_MOST_COPIES = 24
_USUAL_L2 = 2 * 2**20
# A call this much slower than the quickest checked one was timed enough, if it is too long for a
# stall.
_HOPELESS = 8
# Seconds that no kernel needs to lay out weights: what takes longer in its first call always does.
_LAYS_OUT = 4.0

# In force while candidates are packed. Overrides name the kernels, so rules decide nothing; but
# those of a real table would be looked through for every number of rows.
_NO_RULES = RuleTable("tune", (Rule("*", {}, (ReferenceKernel.name,)),))

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
    make: Any = make_lookup if spec.op == "embedding_bag" else make_operands
    operands: MakeOperands = functools.cache(functools.partial(make, spec))
    found: list[Measurement] = []
    with _threads(spec.threads), use_rules(_NO_RULES):
        for caller in dict.fromkeys(case.caller for case in cases):
            tried = _try_all(find(caller, operands), excluded or {}, announce)
            settled = _hopeless(tried, caller, announce)
            timed: dict[int, dict[str, Timed]] = {}
            for case in (case for case in cases if case.caller == caller):
                # Operands that overflow the caches by themselves are never hot: one timing is both.
                copies = copies_to_rotate(case.spec) if case.cache == "rotated" else 1
                if copies not in timed:
                    racing = [one for one in tried if one.runner and one.label not in settled]
                    timed[copies] = settled | _time(racing, caller, copies, limit, announce)
                found += _results(case, tried, timed[copies])
    return found


@dataclasses.dataclass(frozen=True)
class _Tried:
    """A candidate after its check: what became of it, and if it is right, how to time it.

    ``first`` is the time of the checked call, in which libraries lay out weights too.
    """

    name: str
    status: Status
    note: str
    runner: Runner | None = None
    first: float = 0.0

    @property
    def label(self) -> str:
        """Tells a kernel's runs with narrow weights from those with others."""
        return f"{self.name} {self.note}"


def _try_all(
    found: Sequence[Candidate], excluded: Excluded, announce: Announce
) -> tuple[_Tried, ...]:
    tried = []
    for candidate in found:
        crash = excluded.get((candidate.caller, candidate.name))
        if crash is not None:
            tried.append(_Tried(candidate.name, "failed", crash))
            continue
        announce(candidate.caller, candidate.name)
        tried.append(_try(candidate))
        announce("", "")
    return tuple(tried)


def _try(candidate: Candidate) -> _Tried:
    """Pack, run, compare with the reference."""
    if candidate.make is None:
        return _Tried(candidate.name, candidate.status, candidate.note)
    assert candidate.operands is not None
    try:
        runner = candidate.make()
        start = perf_counter()
        result = runner.result()
        first = perf_counter() - start
    except Exception as error:  # whatever a kernel raises is its result, not ours
        return _Tried(candidate.name, "failed", _in_a_line(error))
    difference = candidate.operands.difference(result)
    if difference is not None:
        return _Tried(candidate.name, "wrong", difference)
    return _Tried(candidate.name, "ok", candidate.note, runner, first)


def _in_a_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:300]


def _hopeless(tried: Sequence[_Tried], caller: Caller, announce: Announce) -> dict[str, Timed]:
    """Those whose calls are too long to matter, by one or two of them: wherever operands lie."""
    right = [one for one in tried if one.runner is not None]
    quickest = min((one.first for one in right), default=0.0)
    settled: dict[str, Timed] = {}
    for one in right:
        seconds = [one.first]
        if one.first <= max(_HOPELESS * quickest, LONGEST_STALL):
            continue
        if one.first <= _LAYS_OUT:  # it may have been slow for what only first calls do
            assert one.runner is not None
            announce(caller, one.name)
            seconds.append(one.runner.seconds(1, rotated=False))
            announce("", "")
        if min(seconds) > LONGEST_STALL:
            settled[one.label] = summary([min(seconds)])
    return settled


def _time(
    racing: Sequence[_Tried], caller: Caller, copies: int, limit: float, announce: Announce
) -> dict[str, Timed]:
    """Time what is right, on one set of operands or on ``copies`` in turn."""
    blocks: dict[str, Block] = {}
    for one in racing:
        assert one.runner is not None
        announce(caller, one.name)
        one.runner.spread(copies)
        blocks[one.label] = functools.partial(
            _block, one.runner, caller, one.name, copies > 1, announce
        )
    with _no_garbage_collection():
        timed = settle(blocks, limit=limit)
    announce("", "")
    return timed


def _block(
    runner: Runner, caller: str, name: str, rotated: bool, announce: Announce, calls: int
) -> float:
    announce(caller, name)
    return runner.seconds(calls, rotated=rotated)


def _results(
    case: Case, tried: Sequence[_Tried], timed: Mapping[str, Timed]
) -> Iterator[Measurement]:
    """A measurement for every candidate."""
    equal = ties(timed)
    for one in tried:
        if one.label in timed:
            yield _measurement(case, one.name, timed[one.label], one.label in equal, one.note)
        else:
            yield Measurement(case, one.name, one.status, note=one.note)


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


def copies_to_rotate(spec: OpSpec) -> int:
    """Sets of operands that together overflow the second-level cache; 1 if one does by itself."""
    enough = math.ceil(_CACHES * (cpu().l2 or _USUAL_L2) / bytes_touched(spec))
    return min(enough, _MOST_COPIES)


@contextmanager
def _threads(number: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
