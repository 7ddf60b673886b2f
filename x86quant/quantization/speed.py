"""Whether int8 loses time: both forms take turns, a second at most; noise decides nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import nn

from x86quant import extension
from x86quant.calling.call import Call
from x86quant.calling.running import feed, no_fast_path
from x86quant.errors import ExtensionError


class _Bound(NamedTuple):
    """What int8 must lose by, in so many rounds or more.

    Attributes:
        rounds: how many.
        ratio: its lower quartile and its least time are so many times those of float. Other work
            on the machine only ever adds time, so what is low is what to trust.
        share: and it took longer in such a share of the rounds.
    """

    rounds: int
    ratio: float
    share: float


#: The fewer rounds there are to trust, the more it must lose by. Small models have many.
_BOUNDS = (_Bound(20, 1.02, 0.6), _Bound(3, 1.1, 0.8), _Bound(1, 1.5, 0.8))
#: The same where parts of the model have lost: the rest must not lose at all.
_BOUNDS_IN_DOUBT = (_Bound(20, 1.0, 0.3), *_BOUNDS[1:])
_MOST_ROUNDS = 100
#: Int8 that took less than such a share of the time of float in each of two rounds does not lose.
_FAR = 2
#: So many rounds tell a loss that users would notice. A large model gets them, however long they
#: take, unless int8 takes less than such a share of the time of float.
_FEW, _NEAR = 3, 0.9
#: Seconds for the whole model, and for all of its parts together; a loss is measured once more.
_WHOLE, _PARTS = 0.25, 0.25


def can_tell() -> bool:
    """Whether int8 runs natively here, so that its time means something."""
    try:
        extension.load()
    except ExtensionError:
        return False
    return True


def slower(
    exact: Callable[..., Any],
    int8: Callable[..., Any],
    call: Call,
    seconds: float = _WHOLE,
    in_doubt: bool = False,
) -> float | None:
    """How many times as long ``int8`` takes as ``exact``, if it clearly takes longer.

    Both have run on ``call`` before. With ``in_doubt``, parts of the model have lost, and any loss
    counts that can be measured.
    """
    bounds = _BOUNDS_IN_DOUBT if in_doubt else _BOUNDS
    first = _loss(exact, int8, call, seconds, bounds)
    if first is None:
        return None
    second = _loss(exact, int8, call, seconds, bounds)
    return None if second is None else min(first, second)


def _loss(
    exact: Callable[..., Any],
    int8: Callable[..., Any],
    call: Call,
    seconds: float,
    bounds: Sequence[_Bound],
) -> float | None:
    times: tuple[list[float], list[float]] = ([], [])
    started = perf_counter()
    with torch.no_grad():
        while len(times[0]) < _MOST_ROUNDS and (
            perf_counter() - started < seconds or _is_in_doubt(*times)
        ):
            for function, taken in zip((exact, int8), times, strict=True):
                given = call.copied()
                start = perf_counter()
                function(*given.args, **given.kwargs)
                taken.append(perf_counter() - start)
            if len(times[0]) > 1 and max(times[1]) < min(times[0]) / _FAR:
                return None
    return verdict(*times, bounds)


def _is_in_doubt(exact: Sequence[float], int8: Sequence[float]) -> bool:
    """Whether too few rounds were run to tell a loss, and int8 does not clearly win so far."""
    return not exact or (len(exact) < _FEW and min(int8) > _NEAR * min(exact))


def verdict(
    exact: Sequence[float], int8: Sequence[float], bounds: Sequence[_Bound] = _BOUNDS
) -> float | None:
    """How many times as long int8 takes by the times of both in turns, if it clearly does."""
    ratio = min(_lower_quartile(int8) / _lower_quartile(exact), min(int8) / min(exact))
    lost = sum(b > a for a, b in zip(exact, int8, strict=True)) / len(exact)
    bound = next(bound for bound in bounds if len(exact) >= bound.rounds)
    return ratio if ratio > bound.ratio and lost >= bound.share else None


def _lower_quartile(times: Sequence[float]) -> float:
    return sorted(times)[len(times) // 4]


def by_part(
    exact: nn.Module, int8: nn.Module, call: Call, paths: Sequence[str]
) -> dict[str, float | None]:
    """For each part, by path, what :func:`slower` says, on what it gets in the float model."""
    calls: dict[str, Call] = {}

    def keeping(path: str) -> Callable[[Call], Any]:
        def keep(given: Call) -> None:
            if path not in calls:
                calls[path] = given.copied()

        return keep

    feed(exact, [call], {path: keeping(path) for path in paths})
    found: dict[str, float | None] = {}
    with no_fast_path(), torch.no_grad():
        for path, given in calls.items():
            forms = (exact.get_submodule(path), int8.get_submodule(path))
            for form in forms:  # copies may be laid out as the part has not seen them yet
                given(form)
            found[path] = slower(*forms, given, _PARTS / len(calls))
    return found
