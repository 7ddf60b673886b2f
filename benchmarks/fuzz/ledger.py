"""Which programs were judged already: ranges of seeds, each with the commit and the CPU."""

from __future__ import annotations

import dataclasses
import json
import subprocess
from collections.abc import Iterable
from pathlib import Path

import x86quant


@dataclasses.dataclass(frozen=True, slots=True)
class Judged:
    """Programs that were judged in one go.

    Attributes:
        through: the way that they went.
        first: the first seed.
        end: the seed behind the last.
        passed: how many passed.
        failed: how many failed.
        refused: how many were refused.
        seconds: the seconds of CPU that it took.
        commit: of x86quant and its judge; "+" behind it says that files had been changed.
        cpu: where it ran.
    """

    through: str
    first: int
    end: int
    passed: int
    failed: int
    refused: int
    seconds: float
    commit: str
    cpu: str


class Ledger:
    """The file ``judged.jsonl`` in a folder: what was judged, a line of JSON for each chunk."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "judged.jsonl"
        self.commit, self.cpu = _commit(), x86quant.cpu().name

    def add(self, judged: Judged) -> None:
        """Note ``judged``."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as file:
            file.write(json.dumps(dataclasses.asdict(judged)) + "\n")

    def all(self) -> list[Judged]:
        """What was noted."""
        if not self._path.exists():
            return []
        return [Judged(**json.loads(line)) for line in self._path.read_text().splitlines()]

    def left(self, seeds: Iterable[int], through: str) -> list[int]:
        """Those of ``seeds`` that were not judged yet, by whatever commit."""
        done = {n for x in self.all() if x.through == through for n in range(x.first, x.end)}
        return [seed for seed in seeds if seed not in done]

    def total(self) -> str:
        """How many programs were judged by each commit on each CPU, and in all."""
        groups: dict[tuple[str, str, str], list[Judged]] = {}
        for one in self.all():
            groups.setdefault((one.through, one.commit, one.cpu), []).append(one)
        lines = [f"{' '.join(group)}: {_counted(found)}" for group, found in groups.items()]
        return "\n".join([*lines, f"in all: {_counted(self.all())}"])


def _counted(found: list[Judged]) -> str:
    passed, failed, refused = (
        sum(getattr(x, name) for x in found) for name in ("passed", "failed", "refused")
    )
    seeds = len({(x.through, n) for x in found for n in range(x.first, x.end)})
    hours = sum(x.seconds for x in found) / 3600
    return (
        f"{seeds} programs: {passed} passed, {failed} failed, {refused} refused; "
        f"{hours:.1f} hours of CPU"
    )


def _commit() -> str:
    here = Path(__file__).parent

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", str(here), *arguments], capture_output=True, text=True, check=False
        ).stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no")
    return (git("rev-parse", "--short", "HEAD") or "unknown") + "+" * bool(changed)
