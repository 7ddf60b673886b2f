"""Small graphs of a transformer's layers, lowered and held against what they were."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from x86quant.capture.exported import ops_from_export
from x86quant.dynamic import to_dynamic
from x86quant.forms.call_form import CallForm
from x86quant.lowering.graph_tools import is_op, op_name
from x86quant.lowering.lower import lower_rows

Forward = Callable[..., Any]


class Block(nn.Module):
    """Layers to write forwards with."""

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v = (nn.Linear(32, 32) for _ in range(3))
        self.up, self.gate = nn.Linear(32, 64, bias=False), nn.Linear(32, 64)
        self.down = nn.Linear(64, 32)
        self.norm = nn.LayerNorm(32)
        self.rms = nn.Parameter(torch.rand(32) + 0.5)
        self.dropout = nn.Dropout(0.5)
        self._forward = forward

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> Any:
        return self._forward(self, x) if mask is None else self._forward(self, x, mask)


def lowered(
    forward: Forward, *inputs: torch.Tensor, train: bool = False, free: bool = False
) -> dict[str, int]:
    """How many of our ops there are in ``forward``, which fused gives what it gave before."""
    model = to_dynamic(Block(forward).eval())
    given = inputs or (torch.randn(2, 5, 32),)
    model.dropout.train(train)
    form, leaves = CallForm.of(model, given, {})
    exported = ops_from_export(model, form, leaves, free=free)
    fused, _ = lower_rows(exported.graph_module)
    ops = dict(collections.Counter(op_name(n) for n in fused.graph.nodes if is_op(n)))
    # Attention may multiply in bfloat16, which has 8 bits.
    rounding = 2**-7 if {"attention", "attention_rows"} & ops.keys() else 1e-3
    with torch.no_grad():
        torch.manual_seed(1)
        expected = exported.graph_module(*leaves)
        torch.manual_seed(1)
        actual = fused(*leaves)
    for x, y in zip(actual, expected, strict=True):
        assert x.shape == y.shape
        # A value that rounding puts beside the edge of a code may take the other one.
        torch.testing.assert_close(x, y, rtol=0, atol=0.02 * y.abs().max().item())
        assert (x - y).abs().mean() <= rounding * y.abs().mean()
    return ops


def windows(x: torch.Tensor) -> torch.Tensor:
    return x.view(2, 2, 3, 2, 2, 32).permute(0, 1, 3, 2, 4, 5).reshape(8, 6, 32)
