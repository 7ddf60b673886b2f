"""From a stock-converted model to a graph of ``x86quant`` ops.

``from_fx`` writes the model down as a canonical graph, ``passes`` rewrite it step by step, and
``verify`` compares what comes out with what went in, layer by layer.
"""

from __future__ import annotations

from x86quant.lowering.from_fx import from_fx
from x86quant.lowering.lower import FloatNode, Lowering, lower
from x86quant.lowering.verify import LayerCheck, verify

__all__ = ["FloatNode", "LayerCheck", "Lowering", "from_fx", "lower", "verify"]
