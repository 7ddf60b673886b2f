"""Weights of layers that stay in float are dequantized once, not on each run."""

from __future__ import annotations

from torch.fx import GraphModule

from x86quant.lowering.passes import fold_constants


def run(gm: GraphModule) -> int:
    """Apply the pass to ``gm``; returns the number of weights folded."""
    return fold_constants.fold(gm, weights=True)
