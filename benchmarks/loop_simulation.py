"""What a shared loop costs a team of many threads: a simulation by events.

    python -m benchmarks.loop_simulation

Two ways for a leader to tell its members of a loop and to hear of their shares: by one word that
all of them look at and a line for each of them, as it was; by a word for each eight, as it is
(``kernels/runtime/team.h``). Lines go from core to core; a write takes a line away from all who
have it, and what several cores want of one line they get one after another. What sleeps is woken by
calls of the system, of which the first waker of a group makes those of its group.

Measured here: a line's way from one core to another (half of a loop of two threads). Taken from
elsewhere: twice and a half as long between sockets of 64 cores, a fifth of it for each further core
that reads the same line, 1.5 microseconds for a call that wakes, and one more for each that it
wakes. Nobody has measured more than two cores.
"""

from __future__ import annotations

import argparse
import dataclasses
import heapq
import itertools
from collections.abc import Callable, Generator

import torch

from x86quant import extension

CORES = (2, 8, 32, 64, 128, 192)
_GROUP = 8
_SOCKET = 64


@dataclasses.dataclass(frozen=True)
class Costs:
    """Nanoseconds.

    Attributes:
        line: a line's way from one core to another of its socket.
        far: between sockets, as a multiple.
        serial: until the next core can have the same line, as a share.
        call: of the system, that wakes.
        woken: for each that it wakes, until that runs.
    """

    line: float = 75.0
    far: float = 2.5
    serial: float = 0.2
    call: float = 1500.0
    woken: float = 1000.0


Actor = Generator[float, None, None]


class Line:
    """A line of cache: who has it, and who waits for it to change."""

    def __init__(self, costs: Costs, owner: int = 0) -> None:
        self._costs, self._owner, self._readers = costs, owner, {owner}
        self._free = 0.0
        self.waiting: list[tuple[Actor, Callable[[], bool]]] = []

    def _way(self, core: int) -> float:
        apart = core // _SOCKET != self._owner // _SOCKET
        return self._costs.line * (self._costs.far if apart else 1.0)

    def read(self, core: int, at: float) -> float:
        """When ``core`` has read it."""
        if core in self._readers:
            return at
        begin = max(at, self._free)
        self._free = begin + self._way(core) * self._costs.serial
        self._readers.add(core)
        return begin + self._way(core)

    def write(self, core: int, at: float) -> float:
        """When ``core`` has written it, and nobody else has it."""
        if self._readers == {core}:
            return at
        begin = max(at, self._free)
        done = begin + self._way(core)
        self._free, self._owner, self._readers = done, core, {core}
        return done


class Team:
    """A leader and members, of which some sleep, in one loop of equal shares."""

    def __init__(self, members: int, share: float, costs: Costs, *, sleep: bool) -> None:
        self.members, self.share, self.costs, self.sleep = members, share, costs, sleep
        self._events: list[tuple[float, int, Actor]] = []
        self._order = itertools.count()
        self.taken = [False] * members
        self.done = [False] * members

    def start(self, at: float, actor: Actor) -> None:
        """``actor`` goes on at this time."""
        heapq.heappush(self._events, (at, next(self._order), actor))

    def run(self, leader: Callable[[], Actor]) -> float:
        """When the leader is done."""
        first = leader()
        self.start(0.0, first)
        while self._events:
            at, _, actor = heapq.heappop(self._events)
            self.now = at
            try:
                self.start(next(actor), actor)
            except StopIteration:
                if actor is first:
                    return at
        raise AssertionError("the leader waits for ever")

    def member(self, core: int, word: Line, slot: Line) -> Actor:
        """What a member does from when it hears of the loop."""
        yield word.read(core, self.now)
        if self.taken[core]:
            return
        self.taken[core] = True
        yield slot.write(core, self.now)
        yield self.now + self.share
        yield slot.write(core, self.now)
        self.done[core] = True

    def leads(self, words: list[Line], slots: list[Line], group: int) -> Callable[[], Actor]:
        """What the leader does: tells, computes, takes what is left, waits."""

        def hear(first: int, last: int, word: Line, at: float) -> None:
            for core in range(max(first, 1), last):
                self.start(at, self.member(core, word, slots[core // group]))

        def leader() -> Actor:
            for first in range(0, self.members, group) if len(words) > 1 else (0,):
                word = words[first // group] if len(words) > 1 else words[0]
                last = min(first + group, self.members) if len(words) > 1 else self.members
                yield word.write(0, self.now)
                if not self.sleep:
                    hear(first, last, word, self.now)
                    continue
                sleepers = last - max(first, 1)
                chained = len(words) > 1
                woken = self.costs.woken * (1 if chained else sleepers)
                yield self.now + self.costs.call + woken
                hear(first, last, word, self.now + chained * (self.costs.call + woken * sleepers))
            yield self.now + self.share
            for core in range(1, self.members):
                yield slots[core // group].read(0, self.now)
                if not self.taken[core]:
                    self.taken[core] = True
                    yield slots[core // group].write(0, self.now)
                    yield self.now + self.share
                    self.done[core] = True
            for core in range(1, self.members):
                while not self.done[core]:
                    yield self.now + 10.0
                yield slots[core // group].read(0, self.now)

        return leader


def one_word(members: int, share: float, costs: Costs, *, sleep: bool = False) -> float:
    """A loop's time where all look at one word and each has a line of its own."""
    team = Team(members, share, costs, sleep=sleep)
    slots = [Line(costs, core) for core in range(members)]
    return team.run(team.leads([Line(costs)], slots, 1))


def by_groups(members: int, share: float, costs: Costs, *, sleep: bool = False) -> float:
    """A loop's time where eight share a line, by which they hear and tell."""
    team = Team(members, share, costs, sleep=sleep)
    lines = [Line(costs, first) for first in range(0, members, _GROUP)]
    return team.run(team.leads(lines, lines, _GROUP))


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--line", type=float, help="nanoseconds from core to core; default: measured"
    )
    options = parser.parse_args()
    costs = Costs(line=options.line or measured_line())
    print(f"a line's way from core to core: {costs.line:.0f} ns\n")
    print("microseconds of a loop beyond the 20 of a share")
    print("threads   awake: one word  by eight  asleep: one word  by eight")
    share = 20_000.0
    for members in CORES:
        found = [
            (way(members, share, costs, sleep=sleep) - share) / 1e3
            for sleep in (False, True)
            for way in (one_word, by_groups)
        ]
        print("{:>7}{:>18.1f}{:>10.1f}{:>18.1f}{:>10.1f}".format(members, *found))
    return 0


def measured_line() -> float:
    """Nanoseconds of a cache line's way between two cores: half of a loop of two threads."""
    torch.set_num_threads(2)
    loops = extension.native().loop_nanoseconds
    return float(min(loops(20_000, 2, 0.0, True) for _ in range(9)) / 2)


if __name__ == "__main__":
    raise SystemExit(main())
