"""``RunLog``: what the steps of a run took, in order, and what they are."""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch
from torch.fx import GraphModule

from x86quant.profiling.run_step import RunStep
from x86quant.runtime import Plan


class RunLog:
    """What timed steps and layers write to, as they run in the thread that made it.

    Attributes:
        describes: whether steps say what they are, too, which takes time.
        steps: what those of described runs are.
        plans: the plans of the segments among them.
        ran: the timed graphs that they belong to.
        graphs_us: microseconds spent in compiled graphs since the last start.
        layers_us: and in layers that ran by themselves.
        inside_graph: whether a compiled graph is running.
    """

    def __init__(self) -> None:
        self.describes = False
        self.steps: list[RunStep] = []
        self.plans: list[Plan] = []
        self.ran: list[GraphModule] = []
        self.graphs_us = self.layers_us = 0.0
        self.inside_graph = False
        self._thread = threading.get_ident()
        #: Of one step, or of all steps of a segment.
        self._times: list[float | torch.Tensor] = []

    def start(self) -> None:
        """Forget the times of the run before."""
        self._times.clear()
        self.graphs_us = self.layers_us = 0.0

    def listens(self) -> bool:
        """Whether this is the thread whose run is timed: others may run the model, too."""
        return threading.get_ident() == self._thread

    @property
    def entries(self) -> int:
        """How many times were added since the start."""
        return len(self._times)

    def add(self, microseconds: float | torch.Tensor) -> None:
        """Add the time of a step, or those of a segment's."""
        self._times.append(microseconds)

    def add_layer(self, microseconds: float) -> None:
        """Add the time of a layer that runs by itself, unless a graph is what runs it."""
        self.add(microseconds)
        if not self.inside_graph:
            self.layers_us += microseconds

    def times(self) -> list[float]:
        """Microseconds of every step since the start."""
        # Unpacked here and not while it runs: that would count as time between kernels.
        return [
            time
            for entry in self._times
            for time in (entry.tolist() if isinstance(entry, torch.Tensor) else [entry])
        ]

    def within_graph(self, graph: GraphModule, call: Callable[..., Any], *inputs: Any) -> Any:
        """``call(*inputs)``, whose time is spent in the compiled ``graph``."""
        if not self.listens():
            return call(*inputs)
        if self.describes:
            self.ran.append(graph)
        if self.inside_graph:
            return call(*inputs)
        self.inside_graph = True
        start = perf_counter()
        try:
            return call(*inputs)
        finally:
            self.graphs_us += (perf_counter() - start) * 1e6
            self.inside_graph = False
