"""A segment: part of a lowered graph that runs in one native call."""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from x86quant import extension
from x86quant.runtime.packs import Packs
from x86quant.runtime.parts import plan_in_parts
from x86quant.runtime.plan import Plan
from x86quant.runtime.planner import plan_segment

#: Called with each plan that is about to run; empty unless somebody watches (``int8_proof``).
OBSERVERS: list[Callable[[Plan], None]] = []

#: Plans kept; the least recently used goes first.
MAX_PLANS = 16

_len_torch_dispatch_stack = torch._C._len_torch_dispatch_stack

_Key = tuple[Any, ...]


class Segment(nn.Module):
    """Runs ``graph_module``, whose nodes are all native, by a plan for each set of input shapes.

    Thread safe: plans are made under a lock and run without one.
    """

    def __init__(self, graph_module: GraphModule, name: str) -> None:
        super().__init__()
        extension.load()
        self.graph_module = graph_module
        self.name = name
        self._packs = Packs(graph_module)
        self._plans: collections.OrderedDict[_Key, Plan] = collections.OrderedDict()
        self._lock = threading.Lock()
        self._try_run = extension.try_run()
        self._latest: tuple[int, Plan] | None = None

    def run_again(self, inputs: tuple[Any, ...]) -> tuple[torch.Tensor, ...] | None:
        """The outputs by the latest plan if it is for inputs like these, else None.

        Past the dispatcher, in as little Python as can be: after each run of a network the
        interpreter's data must come back from memory. Not where somebody listens.
        """
        latest = self._latest
        if latest is None or OBSERVERS or _len_torch_dispatch_stack():
            return None
        return self._try_run(latest[0], inputs)

    def forward(self, *inputs: Any) -> Sequence[Any]:
        """The segment's outputs: tensors, and numbers where it computes sizes."""
        again = self.run_again(inputs)
        if again is not None:
            return again
        inputs = tuple(x.resolve_neg() if isinstance(x, torch.Tensor) else x for x in inputs)
        tensors = [x for x in inputs if isinstance(x, torch.Tensor)]
        if not all(x.numel() for x in tensors):  # an empty batch: torch's ops know the shapes
            return list(self.graph_module(*inputs))
        plan = self.plan(inputs)
        for observe in OBSERVERS:
            observe(plan)
        if not any(plan.numbers):
            self._latest = (plan.program.handle(), plan)
        return plan.gather(torch.ops.x86quant.run_program(plan.program, tensors))

    def timed(self, *inputs: Any) -> tuple[list[Any], Plan, torch.Tensor]:
        """The outputs, the plan, and the microseconds of each of its steps, in float64."""
        plan = self.plan(inputs)
        tensors = [x for x in inputs if isinstance(x, torch.Tensor)]
        outputs, times = torch.ops.x86quant.run_program_timed(plan.program, tensors)
        return plan.gather(outputs), plan, times

    def plan(self, inputs: Sequence[Any]) -> Plan:
        """The plan for inputs like these, made when there is none."""
        threads = torch.get_num_threads()
        key = (threads, *(_signature(x) for x in inputs))
        with self._lock:
            plan = self._plans.get(key)
            if plan is None:
                what = (self.graph_module, inputs, self._packs, threads)
                plan = plan_in_parts(*what) or plan_segment(*what)
                self._plans[key] = plan
                if len(self._plans) > MAX_PLANS:
                    self._plans.popitem(last=False)
            else:
                self._plans.move_to_end(key)
        return plan

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The plans made so far and kept."""
        with self._lock:
            return tuple(self._plans.values())


def _signature(x: Any) -> Any:
    """What a plan depends on: shape, strides and dtype of a tensor, or a number's value."""
    return (tuple(x.shape), x.stride(), x.dtype) if isinstance(x, torch.Tensor) else x
