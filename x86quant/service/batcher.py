"""Rows of tokens, from all requests, in batches of about as many tokens."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from x86quant.errors import X86QuantError
from x86quant.service.engine import Engine, TokenRow
from x86quant.service.limits import Limits
from x86quant.service.metrics import Metrics


class QueueFullError(X86QuantError):
    """So much waits already that nothing more is taken."""


class WaitedTooLongError(X86QuantError):
    """A row's turn did not come in time."""


class EngineFailedError(X86QuantError):
    """The model raised, or gave numbers that are none."""


@dataclasses.dataclass(slots=True, eq=False)
class _Waiting:
    """A row that waits for its turn."""

    row: TokenRow
    since: float
    found: asyncio.Future[np.ndarray]


class Batcher:
    """Runs what waits, in order, whenever the model is free: nobody waits for a batch to fill.

    A batch has at most ``Limits.batch_tokens`` tokens. Whoever is cancelled while it waits leaves
    the queue; no bad row spoils the others of its batch.
    """

    def __init__(
        self,
        engine: Engine,
        limits: Limits,
        metrics: Metrics,
        runner: ThreadPoolExecutor | None = None,
    ) -> None:
        """``runner`` is the one thread that calls the model."""
        self._engine, self._limits, self._metrics = engine, limits, metrics
        self._queue: collections.deque[_Waiting] = collections.deque()
        self._runner = runner or ThreadPoolExecutor(1, "x86quant-engine")
        self._task: asyncio.Task[None] | None = None

    @property
    def waiting(self) -> int:
        """Rows whose turn has not come."""
        return sum(not one.found.done() for one in self._queue)

    async def run(self, rows: Sequence[TokenRow]) -> list[np.ndarray]:
        """What the model finds for each of ``rows``, which are taken all or none.

        Raises:
            QueueFullError: too many wait already.
            WaitedTooLongError: their turn did not come in time.
            EngineFailedError: the model failed on one of them.
        """
        if self.waiting + len(rows) > max(self._limits.waiting, len(rows)):
            raise QueueFullError(
                f"{self.waiting} texts wait already, and at most {self._limits.waiting} may: try "
                "again later"
            )
        loop = asyncio.get_running_loop()
        now = time.monotonic()
        mine = [_Waiting(row, now, loop.create_future()) for row in rows]
        self._queue.extend(mine)
        if self._task is None or self._task.done():
            self._task = loop.create_task(self._work())
        try:
            return list(await asyncio.gather(*(one.found for one in mine)))
        finally:  # where one failed, or the client has gone, nobody waits for the others
            for one in mine:
                one.found.cancel()

    async def _work(self) -> None:
        """Run batches until nothing waits."""
        loop = asyncio.get_running_loop()
        while batch := self._next_batch():
            rows = [one.row for one in batch]
            started = time.monotonic()
            found = await loop.run_in_executor(self._runner, self._results, rows)
            self._metrics.ran(len(rows), sum(map(len, rows)), time.monotonic() - started)
            for one, result in zip(batch, found, strict=True):
                if one.found.done():  # the client has gone
                    continue
                if isinstance(result, EngineFailedError):
                    one.found.set_exception(result)
                else:
                    one.found.set_result(result)

    def _next_batch(self) -> list[_Waiting]:
        batch: list[_Waiting] = []
        tokens = longest = 0
        now = time.monotonic()
        while self._queue:
            one = self._queue[0]
            if one.found.done():
                self._queue.popleft()
            elif now - one.since > self._limits.timeout_s:
                self._queue.popleft()
                one.found.set_exception(
                    WaitedTooLongError(
                        f"no turn came within {self._limits.timeout_s:g} s: try again later"
                    )
                )
            else:
                length = len(one.row)
                longest = max(longest, length)
                tokens += length
                cost = (len(batch) + 1) * longest if self._engine.facts.pads else tokens
                if batch and cost > self._limits.batch_tokens:
                    break
                batch.append(self._queue.popleft())
                self._metrics.waited(now - one.since)
        return batch

    def _results(self, rows: list[TokenRow]) -> list[np.ndarray | EngineFailedError]:
        """In the engine's thread: a result for each row, or why there is none."""
        try:
            found = self._engine.run(rows)
            if len(found) != len(rows):
                raise ValueError(f"{len(found)} results for {len(rows)} texts")
            finite = np.isfinite(found).all(axis=1)
        except Exception as error:  # whatever an engine raises: the other requests go on
            if len(rows) == 1:
                return [EngineFailedError(f"the model failed: {type(error).__name__}: {error}")]
            return [self._results([row])[0] for row in rows]
        return [
            row if good else EngineFailedError("the model's result holds NaN or infinity")
            for row, good in zip(found, finite, strict=True)
        ]
