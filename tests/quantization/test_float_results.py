"""Results of ``quantize`` are floats, not codes: nothing is rounded on its way out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import x86quant
from tests.models import sqnr
from x86quant.lowering.graph_tools import is_op


def network(*tail: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 300),
        *tail,
    ).eval()  # fmt: skip


def quantized(model: nn.Module, *x: torch.Tensor) -> Any:
    return x86quant.quantize(model, [x, x], mode="static", speed_check=False, progress=False)


@torch.no_grad()
@pytest.mark.parametrize(
    ("tail", "least"),
    [
        ((), 45),
        ((nn.ReLU(),), 45),
        ((nn.Sigmoid(),), 55),
        ((nn.Tanh(),), 45),
        ((nn.GELU(),), 40),
        ((nn.Softmax(1),), 55),
        ((nn.Unflatten(1, (10, 30)), nn.Softmax(2)), 55),
    ],
)
@pytest.mark.parametrize("images", [1, 3])
def test_a_last_linear(tail: tuple[nn.Module, ...], least: float, images: int) -> None:
    model, x = network(*tail), torch.randn(4, 3, 12, 12)
    ours = quantized(model, x)
    exact, found = model(x[:images]), ours(x[:images])
    assert found.dtype is torch.float32
    assert found.shape == exact.shape
    noise = 10 * torch.log10(exact.square().mean() / (exact - found).square().mean())
    assert float(noise) > least
    assert found.unique().numel() > exact.unique().numel() // 2
    assert torch.allclose(found, ours.graph_module(x[:images]), atol=1e-4)


def test_an_activation_is_part_of_the_linear() -> None:
    ours = quantized(network(nn.Sigmoid()), torch.randn(4, 3, 12, 12))
    assert not ours.float_nodes


@torch.no_grad()
def test_a_value_that_is_result_and_input_has_codes_once() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            y = self.a(x)
            return y, self.b(y)

    torch.manual_seed(0)
    ours = quantized(Both().eval(), torch.randn(32, 16))
    kinds = [n.target for n in ours.graph_module.graph.nodes if is_op(n, "linear", "linear_real")]
    assert [k._schema.name for k in kinds] == ["x86quant::linear", "x86quant::linear_real"]


@torch.no_grad()
def test_saved_and_loaded(tmp_path: Any) -> None:
    x = torch.randn(4, 3, 12, 12)
    ours = quantized(network(nn.Sigmoid()), x)
    x86quant.save(ours, tmp_path / "net.x86q")
    assert torch.equal(x86quant.load(tmp_path / "net.x86q")(x), ours(x))


def test_a_zero_point_that_is_no_code_is_refused() -> None:
    x = torch.zeros(2, 4, dtype=torch.uint8)
    weight, scale = torch.ones(3, 4, dtype=torch.int8), torch.ones(3)
    with pytest.raises(ValueError, match="zero"):
        torch.ops.x86quant.linear_real(x, weight, scale, None, 1.0, 256)


class Head(nn.Module):
    """A detector's: boxes in pixels and scores below one, from one 1 x 1 convolution."""

    def __init__(self, dims: int, moves: bool) -> None:
        super().__init__()
        kinds = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
        self.a = kinds[dims - 1](3, 16, 3, padding=1)
        self.b = kinds[dims - 1](16, 6, 1)
        self.moves = moves
        with torch.no_grad():
            self.b.weight[:4] *= 500

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.b(torch.relu(self.a(x)))
        if self.moves:
            size = y.shape[0], 2, y.shape[1] // 2, *y.shape[2:]
            y = y.reshape(size).movedim(2, -1).contiguous()
        return y


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("moves", [False, True])
def test_a_last_convolution_of_pixels_gives_floats(dims: int, moves: bool) -> None:
    """Rounded to 256 steps of the boxes' range, scores would be nothing but noise."""
    torch.manual_seed(0)
    model = Head(dims, moves).eval()
    batches = [torch.randn(2, 3, *[9] * dims) for _ in range(3)]
    ours = x86quant.quantize(model, batches, progress=False, speed_check=False)
    assert [n for n in ours.graph_module.graph.nodes if is_op(n, "conv_real")]
    assert not ours.float_nodes
    for shape in ((2, 3, *[9] * dims), (1, 3, *[7] * dims)):
        x = torch.randn(shape)
        expected, found = model(x), ours(x)
        assert found.stride() == expected.stride()
        torch.testing.assert_close(found, ours.graph_module(x))
        pairs = (t.movedim(-1, 2).flatten(1, 2) if moves else t for t in (expected, found))
        for channel in zip(*(t.unbind(1) for t in pairs), strict=True):
            assert sqnr(*channel) > 25


def behind_a_convolution(*tail: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), *tail).eval()


@torch.no_grad()
@pytest.mark.parametrize(
    "last",
    [
        {"kernel_size": 3},
        {"kernel_size": 3, "padding": 1},
        {"kernel_size": 3, "padding": "same", "dilation": 2},
        {"kernel_size": (1, 3), "stride": (2, 1), "padding": (0, 1)},
        {"kernel_size": 2, "stride": 2, "bias": False},
    ],
)
def test_a_last_convolution_of_windows_gives_floats(last: dict[str, Any]) -> None:
    model = behind_a_convolution(nn.Conv2d(16, 4, **last))
    batches = [torch.randn(2, 3, 13, 13) for _ in range(3)]
    ours = x86quant.quantize(model, batches, progress=False, speed_check=False)
    (real,) = (n for n in ours.graph_module.graph.nodes if is_op(n, "conv_real"))
    assert not ours.float_nodes
    # What a code of the first convolution, which kernels may round to its neighbour, is worth.
    code = float(real.kwargs["x_scale"]) * float(model[2].weight.abs().max())
    # The last of so many windows that they are written by blocks, which images do not end with.
    for x in (batches[0], torch.randn(1, 3, 11, 15), torch.randn(3, 3, 61, 47)):
        exact, found, plain = model(x), ours(x), ours.graph_module(x)
        assert found.stride() == exact.stride()
        torch.testing.assert_close(found, plain, atol=1.1 * code, rtol=0.0)
        assert torch.isclose(found, plain, atol=1e-5).float().mean() > 0.99
        assert found.unique().numel() > found.numel() // 2
        assert sqnr(exact, found) > 25


@torch.no_grad()
@pytest.mark.parametrize(
    "last", [nn.Conv2d(16, 4, 3, groups=2), nn.ConvTranspose2d(16, 4, 2, 2)], ids=["groups", "up"]
)
def test_a_last_convolution_that_is_no_product_of_rows_gives_codes(last: nn.Module) -> None:
    model = behind_a_convolution(last)
    batches = [torch.randn(2, 3, 9, 9) for _ in range(3)]
    ours = x86quant.quantize(model, batches, progress=False, speed_check=False)
    assert not [n for n in ours.graph_module.graph.nodes if is_op(n, "conv_real")]
    assert sqnr(model(batches[0]), ours(batches[0])) > 25


class Enlarged(nn.Module):
    """Super resolution: pixels from channels, beside the picture as it was, only larger."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 12, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.pixel_shuffle(self.last(self.first(x).relu()), 2)
        return y + F.interpolate(x, scale_factor=2.0, mode="bilinear")


@torch.no_grad()
@pytest.mark.parametrize(
    "model",
    [
        behind_a_convolution(nn.Conv2d(16, 4, 1), nn.Upsample(scale_factor=2, mode="bilinear")),
        behind_a_convolution(nn.Conv2d(16, 4, 3), nn.PixelShuffle(2), nn.Sigmoid()),
        Enlarged().eval(),
    ],
    ids=["upsample", "shuffle", "sum"],
)
def test_what_is_behind_the_last_product_is_not_rounded(model: nn.Module) -> None:
    batches = [torch.randn(2, 3, 9, 9) for _ in range(3)]
    ours = x86quant.quantize(model, batches, progress=False, speed_check=False)
    codes = [n for n in ours.graph_module.graph.nodes if "qparams" in n.meta]
    products = [n for n in ours.graph_module.graph.nodes if is_op(n, "conv_real")]
    assert len(products) == 1
    assert all(one < products[0] for one in codes)
    x = torch.randn(1, 3, 11, 15)
    assert sqnr(model(x), ours(x)) > 35


@torch.no_grad()
def test_a_residual_behind_the_last_product_stays_with_it() -> None:
    """It was codes before, and is added where the product ends."""

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 16, 1), nn.Conv2d(16, 16, 3, padding=1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.a(x).relu()
            return (y + self.b(y)).relu()

    torch.manual_seed(0)
    batches = [torch.randn(2, 3, 9, 9) for _ in range(3)]
    ours = x86quant.quantize(Residual().eval(), batches, progress=False, speed_check=False)
    assert not ours.float_nodes
    assert not [n for n in ours.graph_module.graph.nodes if is_op(n, "conv_real")]
