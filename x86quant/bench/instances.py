"""Several processes of one back end at once, each on its own cores, as a server runs them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from x86quant.bench.alone import AloneError, AloneProcess, alone
from x86quant.errors import InvalidInputError

#: Seconds that all instances of a back end run in one round.
_TURN = 0.5
_WARM_ROUNDS = 1


def split_cores(cores: Sequence[int], instances: int) -> list[tuple[int, ...]]:
    """As many neighbouring cores for each as there are for all; what is left over stays idle.

    Raises:
        InvalidInputError: there are not enough.
    """
    each = len(cores) // instances
    if not each:
        raise InvalidInputError(
            f"{instances} instances need a core each, and this process may use {len(cores)}"
        )
    return [tuple(cores[i * each : (i + 1) * each]) for i in range(instances)]


def measure_instances(
    saved: Mapping[str, Path],
    cores: Sequence[tuple[int, ...]],
    threads: int,
    rounds: int,
    *,
    turn: Callable[[int, str], None] = lambda number, name: None,
) -> dict[str, tuple[float, ...] | str]:
    """For each back end the mean seconds of a call in each round; or why there are none.

    All processes are there all the time; those of one back end start together and run, while the
    others wait without using a core, then those of the next.
    """
    with contextlib.ExitStack() as stack:
        groups: dict[str, list[AloneProcess]] = {}
        found: dict[str, tuple[float, ...] | str] = {}
        for name, folder in saved.items():
            turn(0, name)
            group = [stack.enter_context(alone(name, folder, threads, own)) for own in cores]
            try:
                for process in group:
                    process.answer()
                groups[name] = group
            except AloneError as error:
                found[name] = str(error)
        seconds: dict[str, list[float]] = {name: [] for name in groups}
        for number in range(rounds + _WARM_ROUNDS):
            names = [name for name in groups if name not in found]
            first = number % len(names) if names else 0
            for name in names[first:] + names[:first]:
                turn(number + 1, name)
                try:
                    taken = _round(groups[name])
                except AloneError as error:
                    found[name] = str(error)
                else:
                    seconds[name] += [taken] if number >= _WARM_ROUNDS else []
        return {**{name: tuple(taken) for name, taken in seconds.items()}, **found}


def _round(group: Sequence[AloneProcess]) -> float:
    """Seconds a call such that instances over it is what they did together."""
    for process in group:
        process.go(_TURN)
    answers = [process.answer() for process in group]
    rate: float = sum(answer["calls"] / answer["seconds"] for answer in answers)
    return len(group) / rate
