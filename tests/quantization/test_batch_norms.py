"""Batch norms that are called as functions, as subclasses with an activation in them do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import x86quant
from x86quant.lowering.graph_tools import is_op, op_name

KINDS = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
CONVOLUTIONS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}


def norm_and_activation(dims: int, *, affine: bool = True) -> nn.Module:
    base = KINDS[dims]

    class NormAndActivation(base):  # type: ignore[misc, valid-type]
        def __init__(self, channels: int) -> None:
            super().__init__(channels, affine=affine)
            self.act = nn.SiLU()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            by_batch = self.training or self.running_mean is None
            x = F.batch_norm(
                x, self.running_mean, self.running_var, self.weight, self.bias, by_batch,
                0.1, self.eps,
            )  # fmt: skip
            return self.act(x)

    return NormAndActivation(16)


class Own(nn.Module):
    """Tensors of a batch norm in a module that is none."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.rand(16) + 0.5), nn.Parameter(torch.randn(16))
        self.register_buffer("running_mean", torch.randn(16) / 10)
        self.register_buffer("running_var", torch.rand(16) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.silu(F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias))


def settled(norm: nn.Module) -> nn.Module:
    if norm.weight is not None:
        norm.weight.data.uniform_(0.5, 1.5)
        norm.bias.data.normal_()
    norm.running_mean.normal_(std=0.1)
    norm.running_var.uniform_(0.5, 1.5)
    return norm


def net(dims: int, norm: nn.Module) -> nn.Module:
    kind = CONVOLUTIONS[dims]
    return nn.Sequential(kind(3, 16, 3, bias=False), settled(norm), kind(16, 8, 3)).eval()


def steps(model: nn.Module) -> list[str]:
    assert isinstance(model, x86quant.CompiledModule)
    assert not model.float_nodes
    return [op_name(node) for node in model.graph_module.graph.nodes if is_op(node)]


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("affine", [True, False])
def test_it_is_folded_into_the_convolution(dims: int, affine: bool) -> None:
    torch.manual_seed(0)
    model = net(dims, norm_and_activation(dims, affine=affine))
    batches = [torch.randn(2, 3, *[9] * dims) for _ in range(3)]
    found = x86quant.quantize(model, batches, speed_check=False)
    assert steps(found) == ["quantize", "conv", "conv_real"]
    assert min(found.quantization.sqnr_db) > 30


def test_so_is_one_of_a_module_of_the_users_own() -> None:
    torch.manual_seed(0)
    found = x86quant.quantize(
        net(2, Own()), [torch.randn(2, 3, 9, 9) for _ in range(3)], speed_check=False
    )
    assert steps(found) == ["quantize", "conv", "conv_real"]
    assert min(found.quantization.sqnr_db) > 30


class TwiceRead(nn.Module):
    """A norm in front of a convolution, whose input is added too, and one that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
        self.norm, self.last = settled(norm_and_activation(2)), nn.Conv2d(16, 8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        x = x + self.second(self.norm(x))
        return self.last(self.norm(x))


def test_where_it_cannot_be_folded_it_is_as_right() -> None:
    torch.manual_seed(0)
    model = TwiceRead().eval()
    found = x86quant.quantize(model, [torch.randn(2, 3, 9, 9) for _ in range(3)], speed_check=False)
    assert min(found.quantization.sqnr_db) > 28
    assert not found.float_nodes


def test_statistics_of_the_batch_stay_those_of_the_batch() -> None:
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(16, track_running_stats=False)

    class ByBatch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.bias = norm.weight, norm.bias
            self.conv, self.last = nn.Conv2d(3, 16, 3), nn.Conv2d(16, 8, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = F.batch_norm(self.conv(x), None, None, self.weight, self.bias, True)
            return self.last(x)

    model = ByBatch().eval()
    x = [torch.randn(4, 3, 9, 9) * (1 + n) for n in range(3)]
    found = x86quant.quantize(model, x, speed_check=False)
    with torch.no_grad():
        for one in x:
            exact = model(one)
            assert float((found(one) - exact).norm() / exact.norm()) < 0.1


class OfRows(nn.Module):
    """A norm of [rows, features] behind a linear of [batch, tokens, features]."""

    def __init__(self, read_again: Any = None) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 16, bias=False), nn.Linear(16, 8)
        self.norm, self.read_again = settled(nn.BatchNorm1d(16)), read_again

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        z = self.norm(y.flatten(0, 1)).reshape_as(y)
        return self.last(F.hardswish(z if self.read_again is None else z + self.read_again(y)))


@pytest.mark.parametrize(
    "read_again", [None, lambda y: y, lambda y: y.flatten(1).mean(1)[:, None, None]]
)
def test_norms_of_rows_fold_where_nothing_else_reads_the_linear(read_again: Any) -> None:
    torch.manual_seed(0)
    model = OfRows(read_again).eval()
    ours = x86quant.quantize(
        model, [torch.randn(4, 9, 16) for _ in range(3)], mode="static", speed_check=False
    )
    assert set(ours.quantization.traced_by.values()) == {"torch.fx"}
    norms = [node for node in ours.float_nodes if "norm" in node.op]
    assert bool(norms) == (read_again is not None)
    x = torch.randn(3, 11, 16)
    assert (ours(x) - model(x)).square().mean() < 0.001 * model(x).square().mean()


def test_norms_of_places_are_no_norms_of_rows() -> None:
    """Of [a, b, places, features] flattening leaves the places where the norm has its channels."""

    class OfPlaces(OfRows):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.first(x)
            return self.last(self.norm(y.flatten(0, 1)).reshape_as(y))

    torch.manual_seed(0)
    model = OfPlaces().eval()
    data = [torch.randn(2, 3, 16, 16) for _ in range(3)]
    ours = x86quant.quantize(model, data, mode="static", speed_check=False)
    assert (ours(data[0]) - model(data[0])).square().mean() < 0.001 * model(data[0]).square().mean()
