"""Segments: parts of a lowered graph that run in one native call, by plans that are kept."""

from __future__ import annotations

import collections
import dataclasses
import os
import threading
import warnings
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node

from x86quant import extension
from x86quant.errors import InvalidInputError, X86QuantWarning
from x86quant.runtime.native_forms.lookups import is_open
from x86quant.runtime.packs import Packs
from x86quant.runtime.parts import BatchParts
from x86quant.runtime.plan import Plan
from x86quant.runtime.programs import Programs
from x86quant.runtime.shapes import counts_in_nothing, infer_shapes, is_empty

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


#: Called with each plan that is about to run; empty unless somebody watches (``int8_proof``).
OBSERVERS: list[Callable[[Plan], None]] = []


class Segment(nn.Module):
    """Runs ``graph_module``, whose nodes are all native, by a plan for each set of input shapes.

    Thread safe: plans are made under a lock and run without one.
    """

    def __init__(
        self,
        graph_module: GraphModule,
        name: str,
        plan_cache_bytes: int | None = None,
        programs: Programs | None = None,
    ) -> None:
        super().__init__()
        extension.load()
        self.graph_module = graph_module
        self.name = name
        self._packs = Packs(graph_module, programs)
        self._parts = BatchParts(graph_module, self._packs)
        self._takes = [node for node in graph_module.graph.nodes if node.op == "placeholder"]
        self._may_be_open = [is_open(node) for node in self._takes]
        limit = default_bytes() if plan_cache_bytes is None else plan_cache_bytes
        self._plans = PlanCache(name, limit)
        self._lock = threading.Lock()
        self._latest: _Latest | None = None

    def run_again(self, inputs: tuple[Any, ...]) -> tuple[torch.Tensor, ...] | None:
        """The outputs by the latest plan if it is for inputs like these, else None.

        This is one call, with as little Python as possible: after each run of a
        network the interpreter's data must come back from memory. It returns None as well where a
        mode, a tracer or a transform must see the ops that run.
        """
        latest = self._latest
        if latest is None or OBSERVERS:
            return None
        if latest.numbers:
            if any(inputs[i] != number for i, number in latest.numbers):
                return None
            inputs = tuple([inputs[i] for i in latest.tensors])
        try:
            results: tuple[torch.Tensor, ...] | None = latest.try_run(inputs)
        except ValueError as error:  # an index that is not in its table, say
            raise InvalidInputError(str(error)) from None
        return results

    def forward(self, *inputs: Any) -> Sequence[Any]:
        """The segment's outputs: tensors, and numbers where it computes sizes."""
        again = self.run_again(inputs)
        if again is not None:
            return again
        inputs = tuple(map(_plain, inputs, self._may_be_open))
        # Torch's ops know the shapes of an empty batch, and are what a tracer can record.
        if not self.can_plan(inputs) or torch._C._get_tracing_state() is not None:
            return list(self.graph_module(*inputs))
        tensors = [x for x in inputs if isinstance(x, torch.Tensor)]
        plan = self.plan(inputs)
        for observe in OBSERVERS:
            observe(plan)
        if not any(plan.numbers):
            self._latest = _Latest.of(plan, inputs)
        try:
            results = plan.program.run(tensors)
        except ValueError as error:
            raise InvalidInputError(str(error)) from None
        return plan.gather(results)

    def timed(self, *inputs: Any) -> tuple[list[Any], Plan, torch.Tensor]:
        """The outputs, the plan, and the microseconds of each of its steps, in float64."""
        inputs = tuple(map(_plain, inputs, self._may_be_open))
        plan = self.plan(inputs)
        tensors = [x for x in inputs if isinstance(x, torch.Tensor)]
        outputs, times = plan.program.run_timed(tensors)
        return plan.gather(outputs), plan, times

    def plan(self, inputs: Sequence[Any]) -> Plan:
        """The plan for inputs like these, made when there is none."""
        threads = torch.get_num_threads()
        opened = self._are_open(inputs)
        key = (
            threads,
            *(x.dtype if o else _signature(x) for o, x in zip(opened, inputs, strict=True)),
        )

        def make() -> Plan:
            return self._parts.plan(inputs, threads, self.open_inputs(inputs))

        with self._lock:
            return self._plans.get(key, make, threads)

    def can_plan(self, inputs: Sequence[Any]) -> bool:
        """Whether no tensor is empty but those that count in nothing, or whose size is open."""
        are_open = self._are_open(inputs)
        empty = [
            isinstance(x, torch.Tensor) and not o and x.numel() == 0
            for o, x in zip(are_open, inputs, strict=True)
        ]
        if not any(empty):
            return True
        if all(e for e, x in zip(empty, inputs, strict=True) if isinstance(x, torch.Tensor)):
            return False  # as where a batch has no samples
        try:
            shapes = infer_shapes(self.graph_module, inputs)
        except (RuntimeError, ValueError, IndexError, TypeError):  # torch says what does not fit
            return False
        return all(counts_in_nothing(n, shapes) for n in shapes if is_empty(shapes[n]))

    def open_inputs(self, inputs: Sequence[Any]) -> list[Node]:
        """The placeholders of those inputs of which any number of elements will do."""
        return [node for node, o in zip(self._takes, self._are_open(inputs), strict=True) if o]

    def _are_open(self, inputs: Sequence[Any]) -> list[bool]:
        """Of which inputs any number of elements will do."""
        return [may and _is_list(x) for may, x in zip(self._may_be_open, inputs, strict=True)]

    @property
    def plan_cache_bytes(self) -> int:
        """How many bytes of plans are kept."""
        return self._plans.limit

    @plan_cache_bytes.setter
    def plan_cache_bytes(self, limit: int) -> None:
        with self._lock:
            self._plans.resize(limit)

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The plans made so far and kept."""
        with self._lock:
            return self._plans.plans()


@dataclasses.dataclass(frozen=True, slots=True)
class _Latest:
    """The plan that ran last, and what of its inputs it was made for.

    Attributes:
        try_run: a method of its program, which is kept by it.
        tensors: which inputs are tensors, whose shapes the program checks.
        numbers: the others: which, and what they were.
    """

    try_run: Callable[[tuple[Any, ...]], tuple[torch.Tensor, ...] | None]
    tensors: tuple[int, ...]
    numbers: tuple[tuple[int, Any], ...]

    @classmethod
    def of(cls, plan: Plan, inputs: Sequence[Any]) -> _Latest:
        tensors = [i for i, x in enumerate(inputs) if isinstance(x, torch.Tensor)]
        numbers = [(i, x) for i, x in enumerate(inputs) if i not in tensors]
        return cls(plan.program.try_run, tuple(tensors), tuple(numbers))


def _plain(x: Any, may_be_open: bool) -> Any:
    """``x`` as plans take it; lists of any size are not worth plans for each way they may lie."""
    if not isinstance(x, torch.Tensor):
        return x
    return x.resolve_neg().contiguous() if may_be_open and x.dim() == 1 else x.resolve_neg()


def _is_list(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.dim() == 1 and x.is_contiguous()


def _signature(x: Any) -> Any:
    """What a plan depends on: shape, strides and dtype of a tensor, or a number's value."""
    return (tuple(x.shape), x.stride(), x.dtype) if isinstance(x, torch.Tensor) else x
