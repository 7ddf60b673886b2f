"""Blocks beside recurrent layers have graphs; what holds such a layer runs it in one call."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from x86quant.calling.call import Call
from x86quant.dynamic import to_dynamic
from x86quant.dynamic.recurrent import DynamicRecurrent
from x86quant.quantization.graphs.fused_blocks import with_block_graphs


class Tagger(nn.Module):
    def __init__(self, kind: Callable[..., nn.RNNBase]) -> None:
        super().__init__()
        block = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True)
        self.before, self.after = (
            block,
            nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)),
        )
        self.recurrent = kind(32, 64, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.after(self.recurrent(self.before(x))[0])
        return out


@torch.no_grad()
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_graphs_end_where_recurrent_layers_begin(
    kind: Callable[..., nn.RNNBase], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model, x = Tagger(kind).eval(), torch.randn(2, 6, 32)
    fast = to_dynamic(model)
    (notes,) = with_block_graphs(fast, [Call((x,))])
    assert "before" in notes
    assert "whole model" not in notes
    steps = []
    real = DynamicRecurrent._steps
    monkeypatch.setattr(DynamicRecurrent, "_steps", lambda *a: steps.append(a) or real(*a))
    found = fast(x)
    assert not steps  # in one native call, and not one by one
    assert (found - model(x)).abs().max() < 0.1
