"""What was measured, in memory and on disk.

One JSON file a network, written whole when the network is done: an interrupt loses at most the
network in progress, and a rerun with the same settings goes on behind it.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from x86quant.files import write_aside

Status = Literal["ok", "skipped", "failed"]


@dataclasses.dataclass(frozen=True)
class Settings:
    """What makes two runs comparable."""

    peers: tuple[str, ...]
    batch: int
    threads: int
    rounds: int
    isa: str | None = None
    size: int = 224

    @property
    def title(self) -> str:
        """One line for headings."""
        threads = "1 thread" if self.threads == 1 else f"{self.threads} threads"
        return f"batch {self.batch}, {threads}, {self.isa or 'every instruction the CPU has'}"


@dataclasses.dataclass(frozen=True)
class PeerResult:
    """One peer on one network.

    Attributes:
        seconds: every timed call, warm-up rounds left out.
        sqnr: dB against fp32 on held-out inputs; None for fp32 itself.
    """

    status: Status
    reason: str = ""
    seconds: tuple[float, ...] = ()
    sqnr: float | None = None
    prepare_seconds: float | None = None

    @property
    def median(self) -> float:
        """Seconds a call."""
        return statistics.median(self.seconds)

    @property
    def minimum(self) -> float:
        """Seconds of the fastest call."""
        return min(self.seconds)


@dataclasses.dataclass(frozen=True)
class NetworkResult:
    """Every peer on one network.

    Attributes:
        environment: CPU and date, and each peer's version under its name.
    """

    network: str
    settings: Settings
    peers: Mapping[str, PeerResult]
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def measured(self, name: str) -> PeerResult | None:
        """The peer's result if it ran."""
        result = self.peers.get(name)
        return result if result is not None and result.status == "ok" else None

    def ratio(self, name: str, over: str, statistic: str = "median") -> float | None:
        """How many times as long ``name`` takes as ``over``; None unless both ran."""
        slow, fast = self.measured(name), self.measured(over)
        if slow is None or fast is None:
            return None
        return float(getattr(slow, statistic) / getattr(fast, statistic))

    def to_json(self) -> str:
        """The file's text."""
        return json.dumps(dataclasses.asdict(self), indent=1) + "\n"

    @staticmethod
    def from_json(text: str) -> NetworkResult:
        """Read what ``to_json`` wrote."""
        data: dict[str, Any] = json.loads(text)
        settings = {**data["settings"], "peers": tuple(data["settings"]["peers"])}
        peers = {
            name: PeerResult(**{**peer, "seconds": tuple(peer["seconds"])})
            for name, peer in data["peers"].items()
        }
        return NetworkResult(data["network"], Settings(**settings), peers, data["environment"])


class SettingsDifferError(Exception):
    """The folder holds results of other settings."""


class Store:
    """The results in one folder.

    Args:
        folder: made when the first result is kept.
        settings: what every result in it must have been measured with.
        fresh: forget what is there.
    """

    def __init__(self, folder: Path, settings: Settings, *, fresh: bool = False) -> None:
        self.folder, self.settings = folder, settings
        if fresh:
            for path in self._files():
                path.unlink()

    def load(self) -> dict[str, NetworkResult]:
        """What is there already, by network.

        Raises:
            SettingsDifferError: it was measured with other settings.
        """
        found = [NetworkResult.from_json(path.read_text()) for path in self._files()]
        for result in found:
            self._check(result)
        return {result.network: result for result in found}

    def keep(self, result: NetworkResult) -> None:
        """Write ``result``, whole or not at all."""
        path = self.folder / "networks" / f"{result.network}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_aside(path, result.to_json())

    def _files(self) -> Sequence[Path]:
        return sorted((self.folder / "networks").glob("*.json"))

    def _check(self, result: NetworkResult) -> None:
        now, then = dataclasses.asdict(self.settings), dataclasses.asdict(result.settings)
        differing = [f"{k} was {then[k]}, is {now[k]}" for k in now if now[k] != then[k]]
        if differing:
            raise SettingsDifferError(
                f"{self.folder} holds {result.network} measured with other settings "
                f"({'; '.join(differing)}); give another --out, or --fresh to start again"
            )
