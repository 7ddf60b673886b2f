"""Cores of its own for each worker process of a machine.

Ray counts CPUs and pins nobody. Two processes that the system moves about share cores and caches at
times, so each worker takes as many cores as it has threads: a lock on a file for each, which the
system drops with the process, however that ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from x86quant.hardware.allowance import allowance


@dataclass(frozen=True)
class CoreLease:
    """Logical CPUs that no other holder of a lease uses, for as long as this is referred to."""

    cores: frozenset[int]
    _locks: tuple[IO[bytes], ...]

    def settle(self) -> None:
        """Hold the calling thread, and those that it starts, to these cores."""
        if os.sched_getaffinity(0) != self.cores:
            os.sched_setaffinity(0, self.cores)


def lease(count: int, folder: Path | None = None) -> CoreLease | None:
    """``count`` logical CPUs, of different cores while there are any; None where there are too few.

    None, too, where a control group gives this process the time of fewer CPUs than it may run on:
    then others, who know nothing of these locks, use the same CPUs.
    """
    allowed = allowance()
    mask = allowed.mask or frozenset()
    if allowed.quota is not None and allowed.quota < len(mask):
        return None
    folder = folder or Path(tempfile.gettempdir()) / f"x86quant-cores-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    with contextlib.ExitStack() as stack:
        held: dict[int, IO[bytes]] = {}
        for core in _apart(mask):
            if len(held) == count:
                break
            file = stack.enter_context(open(folder / str(core), "ab"))
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                held[core] = file
        if len(held) < count:
            return None
        stack.pop_all()
        return CoreLease(frozenset(held), tuple(held.values()))


def _apart(mask: Iterable[int]) -> list[int]:
    """Logical CPUs such that second threads of cores come after all first ones."""
    return sorted(mask, key=lambda cpu: (_place_in_core(cpu), cpu))


def _place_in_core(cpu: int) -> int:
    path = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
    with contextlib.suppress(OSError, ValueError):
        first = path.read_text().replace("-", ",").split(",")[0]
        return int(int(first) != cpu)
    return 0
