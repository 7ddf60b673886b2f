"""How long each layer takes in the model: told by few runs of it, however many parts it has."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from x86quant.calling.call import Call
from x86quant.quantization import layer_times
from x86quant.quantization.layer_times import float_times, much_slower
from x86quant.quantization.preparing import prepare
from x86quant.quantization.settings import Settings

PARTS = 3


class Branches(nn.Module):
    """Convolutions with code between them that no graph holds for, and a linear."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(
            nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.ReLU()) for _ in range(PARTS)
        )
        self.encoder = nn.TransformerEncoderLayer(4, 1, 8, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for stage in self.stages:
            x = stage(x)
            if float(x.sum()) > 1e6:
                x = x / 2
        found: torch.Tensor = self.encoder(x.flatten(2).transpose(1, 2))
        return found


@pytest.mark.parametrize("times", [float_times, lambda p: much_slower(p, p.build(), [])])
def test_all_parts_are_timed_in_the_same_runs(times: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    calls = [torch.randn(2, 4, 6, 6) for _ in range(4)]
    prepared = prepare(Branches().eval(), calls, Settings(progress=False))
    assert len(prepared.parts) == PARTS
    fed: list[int] = []
    feed = layer_times.feed_parts

    def counted(model: nn.Module, given: list[Call], callbacks: Any) -> None:
        fed.append(len(given) * len(callbacks))
        feed(model, given, callbacks)

    monkeypatch.setattr(layer_times, "feed_parts", counted)
    found = times(prepared)
    runs = layer_times._ROUNDS * PARTS
    assert fed == ([runs] if found else [PARTS, runs])
    if found:
        assert set(found) == set(prepared.layers)
        assert all(time > 0 for time in found.values())
