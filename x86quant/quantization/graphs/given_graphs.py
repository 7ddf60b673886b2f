"""Native graphs for a model of int8 layers: the same for the same layers, however it got them."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from torch import nn

from x86quant.calling.call import Call
from x86quant.calling.running import run
from x86quant.calling.state import state_kept
from x86quant.dynamic.layers import DynamicLinear
from x86quant.packing.linear_dynamic import extension_loads
from x86quant.quantization.graphs.fused_blocks import ENOUGH_WEIGHTS, weights_of, with_block_graphs
from x86quant.quantization.graphs.token_steps import with_token_step
from x86quant.quantization.settings import Switch

#: As much work for one sample is worth tracing, too: small models may see thousands of places.
_ENOUGH_WORK = 1 << 22


def wants_graphs(
    model: nn.Module,
    fuse_blocks: Switch,
    call: Call | None = None,
    *,
    any_size: bool = False,
) -> bool:
    """Whether ``model`` is to run as native graphs of its dynamic layers where it can.

    Left to "auto", that is worth the time to trace them only for many weights or much work in
    ``call``, unless models of ``any_size`` are to have it.
    """
    if not extension_loads():
        return False  # without native kernels there is nothing to gain
    weights = weights_of(model)
    if fuse_blocks != "auto":
        return bool(weights and fuse_blocks)
    if not weights or weights >= ENOUGH_WEIGHTS:
        return weights > 0
    return any_size or (call is not None and _work(model, call) >= _ENOUGH_WORK)


def _work(model: nn.Module, call: Call) -> float:
    """Multiply-adds of the dynamic layers of ``model`` for one sample of ``call``."""
    done = 0

    def count(layer: Any, args: tuple[Any, ...]) -> None:
        nonlocal done
        done += args[0].numel() * layer.out_features

    with state_kept(model), contextlib.ExitStack() as stack:
        for layer in model.modules():
            if isinstance(layer, DynamicLinear):
                stack.callback(layer.register_forward_pre_hook(count).remove)
        run(model, call)
    samples = max((x.shape[0] for x in call.leaves if x.dim()), default=1)
    return done / max(samples, 1)


def give_graphs(model: nn.Module, calls: Sequence[Call], fuse_blocks: Switch) -> tuple[str, ...]:
    """Let ``model`` run ``calls`` and their like as native graphs; returns notes on what was given.

    Left to "auto", graphs that are slower than the layers are left out.
    """
    blocks = with_block_graphs(model, calls, timed=fuse_blocks == "auto") if calls else ()
    return (*blocks, *with_token_step(model))
