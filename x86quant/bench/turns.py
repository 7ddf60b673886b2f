"""Timing back ends in turn, each as it runs when nothing else does."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

WARM_ROUNDS = 2
CALLS = 2  # timed ones a turn, after one that is not


def measure_in_turn(
    runs: Mapping[str, Callable[[], object]],
    rounds: int,
    *,
    settle: Callable[[], None] = lambda: None,
    turn: Callable[[int, str], None] = lambda number, name: None,
) -> dict[str, tuple[float, ...]]:
    """Time every function, in turn, for many rounds that begin with another each.

    A turn is one untimed call, which finds its weights evicted by the others, and ``CALLS`` timed
    ones. The first ``WARM_ROUNDS`` rounds count for nothing.

    Args:
        runs: what to time, by name.
        rounds: how many count.
        settle: called before each turn, to wait for threads of the one before to go idle.
        turn: called before each turn, with the number of the round, the first warm one being
            1, and the name.
    """
    names = list(runs)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(-WARM_ROUNDS, rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            turn(number + WARM_ROUNDS + 1, name)
            settle()
            taken = _turn(runs[name])
            if number >= 0:
                seconds[name] += taken
    return {name: tuple(taken) for name, taken in seconds.items()}


def _turn(run: Callable[[], object]) -> list[float]:
    run()
    taken = []
    for _ in range(CALLS):
        start = time.perf_counter()
        run()
        taken.append(time.perf_counter() - start)
    return taken


def wait_for_idle_threads(longest: float = 0.2, step: float = 0.002) -> None:
    """Sleep until this process uses no CPU: thread pools spin on for a while after their work.

    Next to each other they would take each other's cores; told not to spin at all
    (``OMP_WAIT_POLICY=passive``) they would be slower than what users get.
    """
    deadline = time.perf_counter() + longest
    while time.perf_counter() < deadline:
        before = time.process_time()
        time.sleep(step)
        if time.process_time() - before < step / 4:
            return
