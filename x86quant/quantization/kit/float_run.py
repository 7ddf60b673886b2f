"""A calibrated part in float, at whose layers something looks.

Its observers are left alone: they have seen this data, and shown it again they would count it
twice, and ranges would change under what is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Interpreter, Node

from x86quant.calling.call import Call
from x86quant.quantization.static.static_part import StaticPart

#: Told the node of the prepared part that calls a layer, what that is given, and its result.
Onlooker = Callable[[Node, Sequence[Any], Any], None]


class FloatRun(Interpreter):
    """Runs ``part``, and lets every one of ``onlookers`` look at each layer."""

    def __init__(self, part: StaticPart, onlookers: Sequence[Onlooker]) -> None:
        super().__init__(part.prepared, graph=part.float_graph)
        self._nodes, self._onlookers = part.nodes, onlookers

    def observe(self, call: Call) -> None:
        """Run one batch of the part's inputs."""
        with torch.no_grad():
            self.run(*call.args)

    def run_node(self, n: Node) -> Any:
        """The value of ``n``."""
        result = super().run_node(n)
        if n.op == "call_module":
            given, _ = self.fetch_args_kwargs_from_env(n)
            for look in self._onlookers:
                look(self._nodes[n.name], given, result)
        return result
