"""The plans of a segment that are kept: the most recently used ones, up to a number of bytes."""

from __future__ import annotations

import collections
import os
import warnings
from collections.abc import Callable, Hashable

from x86quant.errors import InvalidInputError, X86QuantWarning
from x86quant.runtime.plan import Plan

#: Megabytes of plans that each segment keeps, unless its module says otherwise.
VARIABLE = "X86QUANT_PLAN_CACHE_MB"

DEFAULT_BYTES = 256 << 20

#: What a step takes: 1.3 KiB was measured, in Python and natively.
_BYTES_A_STEP = 2 << 10

#: Plans made again for shapes that were dropped before, until the user is told.
_PATIENCE = 4

#: Dropped shapes that are remembered.
_REMEMBERED = 4096


def default_bytes() -> int:
    """The bound that ``X86QUANT_PLAN_CACHE_MB`` sets, else 256 MB.

    Raises:
        InvalidInputError: the variable is not a number of megabytes.
    """
    text = os.environ.get(VARIABLE)
    if text is None:
        return DEFAULT_BYTES
    try:
        megabytes = float(text)
    except ValueError:
        megabytes = -1.0
    if not 0 <= megabytes < float("inf"):
        raise InvalidInputError(f"{VARIABLE}={text!r} must be a number of megabytes, such as 256")
    return int(megabytes * (1 << 20))


def plan_bytes(plan: Plan) -> int:
    """The memory that ``plan`` takes, with what it was made from and keeps for other batches."""
    steps = len(plan.steps) + sum(len(draft.steps) for draft in plan.drafts)
    return steps * _BYTES_A_STEP


class PlanCache:
    """Plans by what they are for. Not thread safe: its segment holds a lock.

    Attributes:
        limit: how many bytes plans may take for themselves, all together, and how large an arena
            each may need; the plan used last stays whatever its size.
    """

    def __init__(self, name: str, limit: int) -> None:
        self._name = name
        self.limit = limit
        self._plans: collections.OrderedDict[Hashable, tuple[Plan, int, int]] = (
            collections.OrderedDict()
        )
        self._bytes = 0
        self._dropped: collections.OrderedDict[int, None] = collections.OrderedDict()
        self._made_again = 0

    def get(self, key: Hashable, make: Callable[[], Plan], threads: int) -> Plan:
        """The plan for ``key``; ``make`` makes it where there is none."""
        found = self._plans.get(key)
        if found is not None:
            self._plans.move_to_end(key)
            return found[0]
        plan = make()
        own = plan_bytes(plan)
        self._plans[key] = (plan, own, plan.run_bytes(threads))
        self._bytes += own
        self._note(key)
        self.resize(self.limit)
        return plan

    def resize(self, limit: int) -> None:
        """Keep ``limit`` bytes from now on."""
        self.limit = limit
        *others, _ = self._plans or (None,)
        for key in others:
            if self._plans[key][2] > limit:
                self._drop(key)
        while self._bytes > limit and len(self._plans) > 1:
            self._drop(next(iter(self._plans)))

    def _drop(self, key: Hashable) -> None:
        self._bytes -= self._plans.pop(key)[1]
        self._dropped[hash(key)] = None
        if len(self._dropped) > _REMEMBERED:
            self._dropped.popitem(last=False)

    def plans(self) -> tuple[Plan, ...]:
        """Those that are kept, the one used last at the end."""
        return tuple(plan for plan, *_ in self._plans.values())

    def _note(self, key: Hashable) -> None:
        """Count plans that are made again, and say so once when they are many."""
        if hash(key) not in self._dropped:
            return
        self._made_again += 1
        if self._made_again == _PATIENCE:
            warnings.warn(
                f"{self._name} plans the same input shapes again and again, because their plans "
                f"take more than the {self.limit / (1 << 20):.0f} MB that are kept; raise the "
                f"compiled module's plan_cache_bytes or {VARIABLE}, or pad inputs to fewer shapes",
                X86QuantWarning,
                stacklevel=2,
            )
