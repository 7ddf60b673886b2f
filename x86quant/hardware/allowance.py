"""How many of the CPU's threads this process may use: its mask, its quota, its fast cores.

A container is often given less than the machine: a set of CPUs, or a share of their time. One
thread for every core then only makes threads wait for each other. Everything is read below a root
folder, so that other systems can be replayed in tests.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath


@dataclass(frozen=True)
class Allowance:
    """What the system allows this process.

    Attributes:
        mask: logical CPUs it may run on; None when unknown.
        quota: CPUs whose time it may use, 2.5 for instance; None without a limit.
        fast: logical CPUs of the fast kind on a hybrid CPU; None on any other.
    """

    mask: frozenset[int] | None = None
    quota: float | None = None
    fast: frozenset[int] | None = None

    def threads(self, cores: int, logical: int) -> int:
        """How many threads suit the process on a CPU of ``cores`` cores and ``logical`` threads.

        One a physical core, on the fast cores of a hybrid CPU, where equal parts of the work would
        wait for the slow ones; never more than it may use at a time.
        """
        here = self.mask if self.mask is not None else frozenset(range(logical))
        most = cores
        # Two threads to a fast core, one to a slow one: there are that many fast cores.
        if self.fast and self.fast & here:
            slow = logical - len(self.fast)
            most = max(1, cores - slow) if slow < cores else cores
            here &= self.fast
        most = min(most, len(here) or 1)
        if self.quota is not None:
            most = min(most, math.ceil(self.quota))
        return max(1, most)

    def notes(self, logical: int) -> tuple[str, ...]:
        """What is less than the whole CPU, in words."""
        found = []
        if self.mask is not None and len(self.mask) < logical:
            found.append(f"this process may run on {len(self.mask)} of {logical} logical CPUs")
        if self.quota is not None and self.quota < logical:
            found.append(f"the control group's quota is the time of {self.quota:g} CPUs")
        if self.fast:
            found.append(
                f"hybrid: {len(self.fast)} of {logical} logical CPUs belong to the fast cores"
            )
        return tuple(found)


def allowance(root: Path = Path("/")) -> Allowance:
    """What this process is allowed, as the system below ``root`` tells."""
    affinity = getattr(os, "sched_getaffinity", None)
    mask = frozenset(affinity(0)) if affinity is not None else None
    return Allowance(mask, cpu_quota(root), fast_cpus(root))


def fast_cpus(root: Path = Path("/")) -> frozenset[int] | None:
    """The logical CPUs of the fast kind, where Linux names two kinds."""
    devices = root / "sys/devices"
    with contextlib.suppress(OSError, ValueError):
        slow = _cpu_list((devices / "cpu_atom/cpus").read_text())
        fast = _cpu_list((devices / "cpu_core/cpus").read_text())
        return fast if fast and slow else None
    return None


def memory_nodes(root: Path = Path("/")) -> int:
    """How many nodes of memory the CPUs of this process belong to; 1 where none are named."""
    with contextlib.suppress(OSError, ValueError):
        lists = root.glob("sys/devices/system/node/node[0-9]*/cpulist")
        near = [_cpu_list(path.read_text()) for path in lists]
        mask = allowance(root).mask
        return max(sum(mask is None or not mask.isdisjoint(some) for some in near), 1)
    return 1


def _cpu_list(text: str) -> frozenset[int]:
    """``0-3,8`` as a set."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


def cpu_quota(root: Path = Path("/")) -> float | None:
    """CPUs whose time the control groups of this process leave it; None without a limit."""
    limits = [quota for quota in _quotas(root) if quota is not None]
    return min(limits, default=None)


def _quotas(root: Path) -> Iterator[float | None]:
    """The quotas of the process's groups and of all groups around them, of either version."""
    lines: list[str] = []
    with contextlib.suppress(OSError):
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    mounted = root / "sys/fs/cgroup"
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        if not controllers:
            for folder in _upwards(mounted, group):
                yield _quota_v2(folder)
        elif "cpu" in controllers.split(","):
            for name in (controllers, "cpu"):
                for folder in _upwards(mounted / name, group):
                    yield _quota_v1(folder)


def _upwards(base: Path, group: str) -> Iterator[Path]:
    """The folder of a group and those around it, up to ``base``.

    Inside a container a group's name may be that of the host, which is not mounted there; its
    files are then those of ``base``.
    """
    inside = PurePosixPath(group.lstrip("/"))
    if ".." not in inside.parts:
        for one in (inside, *inside.parents):
            if one != PurePosixPath("."):
                yield base / one
    yield base


def _quota_v2(folder: Path) -> float | None:
    with contextlib.suppress(OSError, ValueError):
        quota, period = (folder / "cpu.max").read_text().split()
        return _cpus(quota, period)
    return None


def _quota_v1(folder: Path) -> float | None:
    with contextlib.suppress(OSError, ValueError):
        quota = (folder / "cpu.cfs_quota_us").read_text()
        return _cpus(quota, (folder / "cpu.cfs_period_us").read_text())
    return None


def _cpus(quota: str, period: str) -> float | None:
    """Microseconds of CPU time over microseconds; "max", -1 and senseless values are no limit."""
    if quota.strip() == "max" or int(quota) <= 0 or int(period) <= 0:
        return None
    return int(quota) / int(period)
