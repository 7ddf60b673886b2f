"""What a model reads by where it lies in memory: ``as_strided``.

Parts in int8 return the float module's values, but may lay them out in memory in another order.
Torch sees values through strides, all but ``as_strided``, which would pick other ones.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from x86quant.quantization.batches import Call
from x86quant.quantization.proof import run
from x86quant.quantization.state import state_kept

aten = torch.ops.aten

_READS = frozenset(
    [
        aten.as_strided.default,
        aten.as_strided_.default,
        aten.as_strided_copy.default,
        aten.as_strided_scatter.default,
    ]
)


class _StridedReads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes how what is read by ``as_strided`` lies in memory."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.layouts: list[tuple[Any, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READS:
            x = args[0]
            self.layouts.append((tuple(x.shape), x.stride(), x.storage_offset()))
        return func(*args, **(kwargs or {}))


def reads_otherwise(reference: nn.Module, model: nn.Module, call: Call) -> str | None:
    """Why ``model`` reads other values than ``reference`` by the same ``as_strided``, or None."""
    layouts = _layouts(model, call)
    if not layouts or layouts == _layouts(reference, call):
        return None
    return "as_strided reads values by where they lie in memory, and in int8 they lie elsewhere"


def _layouts(model: nn.Module, call: Call) -> list[tuple[Any, ...]]:
    mode = _StridedReads()
    with state_kept(model), mode:
        run(model, call)
    return mode.layouts
