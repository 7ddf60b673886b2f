"""PReLU and leaky ReLU in int8: natively, in one rounding, with any slopes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.fx import Node

import x86quant
from tests.op_checks import check_ops
from x86quant.lowering.graph_tools import is_op, op_name


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


def _sloped(channels: int) -> nn.PReLU:
    act = nn.PReLU(channels)
    act.weight.data = torch.linspace(-0.5, 1.5, channels)
    return act


#: A layer with what is behind it, what it is given, and how many of its steps have slopes.
LAYERS: dict[str, tuple[list[nn.Module], tuple[int, ...], int]] = {
    "conv": ([nn.Conv2d(3, 16, 3), _sloped(16)], (2, 3, 12, 12), 1),
    "conv1d": ([nn.Conv1d(3, 20, 3), _sloped(20)], (2, 3, 50), 1),
    "conv3d": ([nn.Conv3d(3, 8, 3), nn.LeakyReLU(0.3)], (2, 3, 5, 6, 7), 1),
    "depthwise": ([nn.Conv2d(32, 32, 3, groups=32, padding=1), _sloped(32)], (2, 32, 9, 9), 1),
    "in groups": ([nn.Conv2d(16, 16, 3, groups=4), _sloped(16)], (2, 16, 9, 9), 1),
    "by tiles": ([nn.Conv2d(64, 64, 3, padding=1), _sloped(64)], (2, 64, 16, 16), 1),
    "transposed": ([nn.ConvTranspose2d(8, 12, 2, 2), _sloped(12)], (2, 8, 9, 9), 1),
    "with a norm": ([nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.LeakyReLU()], (2, 3, 9, 9), 1),
    "a clamp behind": ([nn.Conv2d(3, 16, 3), _sloped(16), nn.ReLU6()], (2, 3, 9, 9), 1),
    "linear": ([nn.Linear(16, 24), _sloped(24)], (7, 16), 1),
    "rows of rows": ([nn.Linear(16, 24), nn.LeakyReLU(0.2)], (3, 7, 16), 1),
    "of another dimension": ([nn.Linear(16, 7), _sloped(7)], (3, 7, 16), 0),
    "behind a ReLU": ([nn.Conv2d(3, 16, 3), nn.ReLU(), _sloped(16)], (2, 3, 9, 9), 0),
}


@torch.no_grad()
@pytest.mark.usefixtures("any_accuracy")
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_computes_it_and_rounds_once(name: str) -> None:
    torch.manual_seed(0)
    layers, sizes, sloped = LAYERS[name]
    x = torch.randn(sizes)
    first = nn.Sequential(*layers, nn.Flatten()).eval()
    model = nn.Sequential(*first, nn.Linear(first(x).shape[1], 4)).eval()
    ours = x86quant.quantize(model, [x], mode="static", speed_check=False, progress=False)
    nodes = [node for node in ours.graph_module.graph.nodes if is_op(node, "conv", "linear")]
    assert sum(node.kwargs["slopes"] is not None for node in nodes) == sloped
    if sloped:
        assert not {"lut", "affine", "add"} & {op_name(n) for n in _ops(ours)}
    for check in check_ops(ours.graph_module, (torch.randn(sizes) * 2,)):
        assert check.steps <= 1, check
        assert check.different < 0.01, check


def _ops(ours: nn.Module) -> list[Node]:
    return [node for node in ours.graph_module.graph.nodes if is_op(node)]


@torch.no_grad()
def test_a_result_that_stays_float_is_not_rounded() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.LeakyReLU()).eval()
    x = torch.randn(2, 3, 12, 12)
    ours = x86quant.quantize(model, [x], speed_check=False, progress=False)
    assert "conv" not in map(op_name, _ops(ours))
    assert ours(x).unique().numel() > 256


def _step(ours: nn.Module) -> float:
    (last,) = (n for n in list(ours.graph_module.graph.nodes)[-2:] if "x_scale" in n.kwargs)
    return float(last.kwargs["x_scale"])
