"""Int8 layers that run one by one, outside of compiled graphs: how long each call takes."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

from torch import nn

from x86quant.compiled import CompiledModule
from x86quant.compiled.block_graphs import BlockGraphs
from x86quant.dynamic import INT8_LAYERS, DynamicCell, DynamicLinear, DynamicRecurrent
from x86quant.profiling.run_log import RunLog
from x86quant.profiling.run_step import RunStep, tensors_in


def separate_layers(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Int8 layers that nothing else stands for, and their paths.

    Those behind a fused graph are left alone: the graph is given up once a layer of it is changed.
    """
    if isinstance(module, INT8_LAYERS):
        yield path, module
    elif not isinstance(module, CompiledModule) and not isinstance(
        vars(module).get("forward"), BlockGraphs
    ):
        for name, child in module.named_children():
            yield from separate_layers(child, f"{path}.{name}" if path else name)


@contextmanager
def timed_layer(module: nn.Module, path: str, log: RunLog) -> Iterator[None]:
    """A block in which calls of ``module`` tell ``log`` how long they take."""
    own = module.forward
    replaced = "forward" in vars(module)

    @functools.wraps(own)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if not log.listens():
            return own(*args, **kwargs)
        entries = log.entries
        start = perf_counter()
        result = own(*args, **kwargs)
        elapsed = (perf_counter() - start) * 1e6
        if log.entries == entries:  # else it has called itself, in another floating type
            log.add_layer(elapsed)
            if log.describes:
                log.steps.append(_step(module, path, args, kwargs, result))
        return result

    module.forward = forward
    try:
        yield
    finally:
        if replaced:
            module.forward = own
        else:
            del module.forward


def _step(
    module: nn.Module, path: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
) -> RunStep:
    inputs, outputs = tensors_in((args, kwargs)), tensors_in(result)
    codes = [x for x in module.buffers() if not x.is_floating_point()]
    rows = inputs[0].numel() // max(inputs[0].shape[-1], 1) if inputs[0].dim() else 1
    choice = module.routes.choice_for(rows) if isinstance(module, DynamicLinear) else None
    in_int8 = isinstance(module, DynamicLinear | DynamicRecurrent | DynamicCell)
    return RunStep(
        name=path,
        layer=path,
        op="linear_dynamic" if choice else type(module).__name__,
        kernel="native" if choice is None else choice.kernel,
        rule="" if choice is None else choice.rule,
        reason="it runs by itself, in no graph" if choice is None else choice.reason,
        inputs=tuple(tuple(x.shape) for x in inputs),
        output=tuple(outputs[0].shape),
        multiply_adds=rows * sum(x.numel() for x in codes) if in_int8 else 0,
        activation_bytes=sum(x.nbytes for x in inputs + outputs),
        weight_bytes=sum(x.nbytes for x in codes),
        choice=choice,
    )
