"""Native graphs for a model of int8 layers: the same for the same layers, however it got them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from x86quant.calling.call import Call
from x86quant.packing.linear_dynamic import extension_loads
from x86quant.quantization.graphs.fused_blocks import ENOUGH_WEIGHTS, weights_of, with_block_graphs
from x86quant.quantization.graphs.token_steps import with_token_step
from x86quant.quantization.settings import Switch


def wants_graphs(model: nn.Module, fuse_blocks: Switch) -> bool:
    """Whether ``model`` is to run as native graphs of its dynamic layers where it can."""
    if not extension_loads():
        return False  # without native kernels there is nothing to gain
    weights = weights_of(model)
    return weights >= ENOUGH_WEIGHTS if fuse_blocks == "auto" else bool(weights and fuse_blocks)


def give_graphs(model: nn.Module, calls: Sequence[Call], fuse_blocks: Switch) -> tuple[str, ...]:
    """Let ``model`` run ``calls`` and their like as native graphs; returns notes on what was given.

    Left to "auto", graphs that are slower than the layers are left out.
    """
    blocks = with_block_graphs(model, calls, timed=fuse_blocks == "auto") if calls else ()
    return (*blocks, *with_token_step(model))
