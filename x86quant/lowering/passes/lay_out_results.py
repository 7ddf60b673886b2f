"""Results lie in memory as the float model's do: ``dequantize`` writes them so."""

from __future__ import annotations

from torch.fx import GraphModule, Node

from x86quant.lowering.graph_tools import dequantized, finish, replace
from x86quant.lowering.views import lies_as_in_float


def run(gm: GraphModule) -> int:
    """Apply the pass to ``gm``; returns how many copies it saved."""
    changed = 0
    (output,) = gm.graph.find_nodes(op="output")
    for copy in output.all_input_nodes:
        if not lies_as_in_float(copy):
            continue
        real = copy.args[0]
        if isinstance(real, Node) and dequantized(real) is not None:
            real.update_kwarg("contiguous", True)
            replace(copy, real)
            changed += 1
    return finish(gm, changed)
