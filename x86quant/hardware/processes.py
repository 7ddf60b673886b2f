"""Into how many processes of how many threads a machine is cut.

What a layer of one image can be shared among ends before the cores of a large machine do: many
processes of few threads give more answers a second, and one of some threads gives each sooner. The
numbers are those that ``benchmarks.scaling`` predicts; its tables stand in docs/measurements.md.
"""

from __future__ import annotations

from dataclasses import dataclass

#: Threads of a process when answers a second count: nine tenths of the rate of single threads, in a
#: third of their time and with a quarter of the copies of the weights.
RATE_THREADS = 4
#: Threads beyond which a single answer hardly comes sooner.
SOON_THREADS = 16


@dataclass(frozen=True, slots=True)
class Cut:
    """So many processes of so many threads each."""

    processes: int
    threads: int

    def __str__(self) -> str:
        processes = "1 process" if self.processes == 1 else f"{self.processes} processes"
        return f"{processes} of {self.threads} thread{'' if self.threads == 1 else 's'}"


def for_rate(cores: int, nodes: int = 1) -> Cut:
    """The cut for most answers a second, with whole processes on each of the nodes."""
    of_node = max(cores // nodes, 1)
    threads = RATE_THREADS if of_node >= 2 * RATE_THREADS else 1
    return Cut(max(of_node // threads, 1) * min(nodes, cores), threads)


def for_one_answer(cores: int, nodes: int = 1) -> Cut:
    """The cut for the soonest answer to one request, within a node."""
    return Cut(1, min(max(cores // nodes, 1), SOON_THREADS))
