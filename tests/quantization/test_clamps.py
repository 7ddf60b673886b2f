"""Clamps behind layers: what they leave takes all codes; channels are equalized below a limit."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import x86quant
from tests.quantization.test_accuracy_kit import equalized, images, sqnr
from x86quant.calling.call import Call
from x86quant.lowering.graph_tools import is_op
from x86quant.quantization.kit.equalization import find_pairs
from x86quant.quantization.preparing import prepare
from x86quant.quantization.settings import Settings
from x86quant.quantization.tracing.tracing import trace


class Function(nn.Module):
    def __init__(self, function, layer=nn.Conv2d) -> None:
        super().__init__()
        self.conv, self.function = layer(3, 8, 3), function
        self.head = nn.Conv2d(8, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.function(self.conv(x)))


class Normed(Function):
    def __init__(self, function, norm: nn.Module) -> None:
        super().__init__(function)
        self.norm = norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.function(self.norm(self.conv(x))))


CLAMPS = {
    "relu": nn.ReLU(),
    "relu6": nn.ReLU6(),
    "hardtanh": nn.Hardtanh(0.0, 0.5),
    "F.relu6": F.relu6,
    "F.hardtanh": lambda x: F.hardtanh(x, 0.0, max_val=0.5),
}


@pytest.mark.parametrize("layer", [nn.Conv2d, nn.ConvTranspose2d])
@pytest.mark.parametrize("name", CLAMPS)
def test_what_a_clamp_cuts_off_takes_no_codes(name: str, layer: type[nn.Module]) -> None:
    """Far below zero lies nothing that the next layer sees."""
    torch.manual_seed(0)
    model = Function(CLAMPS[name], layer).eval()
    with torch.no_grad():
        model.conv.bias[:4] -= 40.0
    data = [images(4, seed) for seed in range(4)]
    prepared = prepare(model, data, Settings(progress=False, equalize=False))
    (part,) = prepared.parts
    (conv,) = (layer for layer in part.layers if layer.name == "conv")
    scale, zero_point = part.output_observer(conv.node).calculate_qparams()
    assert int(zero_point) == 0
    assert float(scale) * 255 <= 6.1
    int8 = x86quant.quantize(model, data, progress=False, equalize=False)
    x = images(4, 9)
    assert sqnr(model(x), int8(x)) > 30
    x86quant.assert_int8(int8, (x,))


def test_a_clamp_behind_a_transposed_convolution_by_function_takes_no_codes() -> None:
    torch.manual_seed(0)

    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 8, 2, 2))
            self.head = nn.Conv2d(8, 4, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            low = torch.linspace(-400, 0, 8)
            return self.head(F.relu(F.conv_transpose2d(x, self.weight, low, stride=2)))

    model = Decoder().eval()
    data = [images(4, seed) for seed in range(4)]
    int8 = x86quant.quantize(model, data, progress=False, equalize=False)
    assert sqnr(model(data[0]), int8(data[0])) > 30
    x86quant.assert_int8(int8, (data[0],))


class ByFunction(nn.Module):
    def __init__(self, function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


NORMS = [
    nn.InstanceNorm2d(8, affine=True),
    nn.InstanceNorm2d(8),
    nn.GroupNorm(2, 8),
    ByFunction(F.instance_norm),
    ByFunction(lambda x: F.group_norm(x, 2)),
]


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("name", CLAMPS)
def test_a_clamp_behind_a_norm_leaves_all_codes_to_what_it_keeps(
    name: str, norm: nn.Module, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = Normed(CLAMPS[name], norm).eval()
    data = [images(4, seed) for seed in range(4)]
    int8 = x86quant.quantize(model, data, progress=False, speed_check=False)
    of_function = name.removeprefix("F.") if name.startswith("F.") else "function"  # one step
    named = of_function if isinstance(norm, ByFunction) else "norm"
    assert int8.quantization.int8_layers == ("conv", named, "head")
    (head,) = (node for node in int8.graph_module.graph.nodes if is_op(node, "conv_real"))
    assert head.kwargs["x_zp"] == 0
    kinds = [str(node.target) for node in int8.graph_module.graph.nodes]
    assert "x86quant.lut.default" not in kinds
    if name == "relu":
        assert "aten.clamp.default" not in kinds  # codes end there as well
    x = images(4, 9)
    assert sqnr(model(x), int8(x)) > 30
    x86quant.save(int8, tmp_path / "net.x86q")
    assert torch.equal(x86quant.load(tmp_path / "net.x86q")(x), int8(x))


def test_layers_that_share_a_clamp_of_other_bounds_are_not_confused() -> None:
    torch.manual_seed(0)

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 3, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.hardtanh(self.conv(F.hardtanh(self.conv(x), 0.0, 0.2)), 0.0, 0.8)

    model = Twice().eval()
    data = [images(4, seed) for seed in range(4)]
    int8 = x86quant.quantize(model, data, progress=False)
    assert sqnr(model(data[0]), int8(data[0])) > 25


def narrow(limit: float = 6.0) -> nn.Module:
    """A depthwise layer whose channels end between a hundredth of the limit and beyond it."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.ReLU6(), nn.Conv2d(8, 8, 3, groups=8)
    ).eval()
    with torch.no_grad():
        model[0].weight *= torch.logspace(-2.0, 1.0, 8).view(-1, 1, 1, 1)
        model[2].weight /= torch.logspace(-2.0, 0.0, 8).view(-1, 1, 1, 1)
    return model


def features(seed: int = 0) -> torch.Tensor:
    return torch.randn(16, 8, 8, 8, generator=torch.Generator().manual_seed(seed))


def test_channels_below_the_limit_are_widened_and_the_others_stay() -> None:
    model, x = narrow(), features()
    graph, (pair,) = equalized(model, x, always=False)
    widest = model[1](model[0](x)).amax((0, 2, 3))
    assert bool((widest == 6.0).any()), "no channel reaches the limit"
    assert bool((pair.scales[widest == 6.0] == 1.0).all())
    assert bool((pair.scales <= 1.0).all())
    assert float(pair.scales.min()) < 0.1
    torch.testing.assert_close(graph(x), (model(x),), rtol=1e-4, atol=1e-5)
    # Values half as large again are still told apart.
    torch.testing.assert_close(graph(1.5 * x), (model(1.5 * x),), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("between", "pairs"),
    [
        ((nn.ReLU6(), nn.MaxPool2d(2)), 1),
        ((nn.AvgPool2d(2), nn.ReLU6()), 1),
        ((nn.ReLU6(), nn.AvgPool2d(2)), 0),
        ((nn.ReLU6(), nn.AdaptiveAvgPool2d(1)), 0),
        ((nn.ReLU(), nn.AvgPool2d(2)), 1),
    ],
)
def test_an_average_hides_what_a_clamp_cuts_off(between: tuple[nn.Module, ...], pairs: int) -> None:
    model = nn.Sequential(nn.Conv2d(8, 8, 1), *between, nn.Conv2d(8, 8, 1)).eval()
    graph = trace(model, Call((features(),))).graph_module
    assert len(list(find_pairs(graph))) == pairs


def test_equalizing_below_a_limit_gains_signal_on_data_not_seen() -> None:
    model, data = narrow(), [features(seed) for seed in range(6)]
    x = features(9)
    found = {
        equalize: sqnr(
            model(x),
            x86quant.quantize(copy.deepcopy(model), data, equalize=equalize, progress=False)(x),
        )
        for equalize in (False, "auto")
    }
    assert found["auto"] > found[False] + 6
