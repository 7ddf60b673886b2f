"""PReLU in int8: natively, in one rounding, with any slopes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import x86quant


class Functional(nn.Module):
    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.prelu(x, self.weight)


SLOPES = {
    "one": torch.tensor([0.25]),
    "a channel": torch.linspace(0.05, 0.4, 16),
    "negative too": torch.linspace(-0.5, 1.5, 16),
}


@torch.no_grad()
@pytest.mark.parametrize("functional", [True, False])
@pytest.mark.parametrize("slopes", SLOPES)
def test_it_runs_natively(slopes: str, functional: bool) -> None:
    torch.manual_seed(0)
    weight = SLOPES[slopes]
    act: nn.Module = Functional(weight.clone()) if functional else nn.PReLU(len(weight))
    if isinstance(act, nn.PReLU):
        act.weight.copy_(weight)
    model = nn.Sequential(nn.Conv2d(3, 16, 3), act, nn.Conv2d(16, 8, 3, groups=2)).eval()
    x = torch.randn(4, 3, 20, 20)
    ours = x86quant.quantize(model, [x], speed_check=False, progress=False)
    assert not ours.float_nodes
    exact = model(x)
    assert float(10 * torch.log10(exact.square().mean() / (exact - ours(x)).square().mean())) > 28


@torch.no_grad()
@pytest.mark.parametrize("slopes", SLOPES)
def test_natively_it_gives_what_the_reference_gives(slopes: str) -> None:
    torch.manual_seed(0)
    act = nn.PReLU(len(SLOPES[slopes]))
    act.weight.copy_(SLOPES[slopes])
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.Identity(), act, nn.Conv2d(16, 8, 3, groups=2)
    ).eval()
    x = torch.randn(4, 3, 20, 20)
    ours = x86quant.quantize(model, [x], speed_check=False, progress=False)
    for sizes in ((1, 3, 20, 20), (3, 3, 33, 17)):
        y = torch.randn(sizes)
        close = (ours(y) - ours.graph_module(y)).abs().max() <= 2 * _step(ours)
        assert bool(close)


def _step(ours: nn.Module) -> float:
    (last,) = (n for n in list(ours.graph_module.graph.nodes)[-2:] if "x_scale" in n.kwargs)
    return float(last.kwargs["x_scale"])
