"""Convolutions that give floats read windows of every kind as torch does."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import nn

import x86quant
from tests.torch_threads import threads_of
from x86quant.compiled.module import CompiledModule
from x86quant.lowering.graph_tools import is_op


def _any_layer(seed: int) -> tuple[nn.Module, torch.Tensor]:
    """Lines of 1 to 320 bytes, borders that lie outside of the image, steps and gaps."""
    draw = random.Random(seed)
    dims = draw.choice([1, 2, 2, 3])
    channels = draw.choice([1, 2, 3, 5, 8, 16, 20, 40, 64])
    kernel = [draw.choice([1, 2, 3, 5]) for _ in range(dims)]
    stride = [draw.choice([1, 1, 2, 3]) for _ in range(dims)]
    dilation = [draw.choice([1, 1, 2]) for _ in range(dims)]
    reach = [(k - 1) * d + 1 for k, d in zip(kernel, dilation, strict=True)]
    padding = [draw.randint(0, r // 2) for r in reach]
    sizes = [r + draw.choice([0, 3, 12]) for r in reach]
    layer = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
    torch.manual_seed(seed)
    made = layer(channels, draw.choice([1, 2, 17]), kernel, stride, padding, dilation).eval()
    return made, torch.randn(draw.choice([1, 2, 3]), channels, *sizes)


@pytest.mark.filterwarnings("ignore:this is the float model")
def test_windows_are_those_of_torch() -> None:
    """Layers with few results may be too inaccurate in int8 to be in it, but not many are."""
    compared = 0
    for seed in range(60):
        model, x = _any_layer(seed)
        made = x86quant.quantize(model, [(x,)], progress=False, speed_check=False, effort="fast")
        for part in (m for m in made.modules() if isinstance(m, CompiledModule)):
            assert any(is_op(n, "conv_real") for n in part.graph_module.graph.nodes)
            with torch.no_grad(), threads_of(1 + seed % 2):
                (wanted,) = torch.utils._pytree.tree_leaves(part.graph_module(x))
                torch.testing.assert_close(made(x), wanted, rtol=1e-5, atol=1e-5)
            compared += 1
    assert compared >= 50


def test_more_pixels_than_a_block_need_no_copies() -> None:
    torch.manual_seed(0)
    model, x = nn.Conv2d(16, 3, 1).eval(), torch.randn(2, 16, 70, 70)
    made = x86quant.quantize(model, [(x,)], progress=False, speed_check=False)
    (part,) = (m for m in made.modules() if isinstance(m, CompiledModule))
    for threads in (1, 2):
        with torch.no_grad(), threads_of(threads):
            (wanted,) = torch.utils._pytree.tree_leaves(part.graph_module(x))
            torch.testing.assert_close(made(x), wanted, rtol=1e-5, atol=1e-5)


def _of_few(results: int, **how: Any) -> nn.Module:
    dims = len(how["kernel_size"])
    before, layer = ((nn.Conv2d, nn.Conv2d), (nn.Conv3d, nn.Conv3d))[dims - 2]
    return nn.Sequential(before(3, 8, 1), nn.ReLU(), layer(8, results, **how)).eval()


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    ("results", "how"),
    [
        (1, {"kernel_size": (3, 3), "padding": 1}),
        (2, {"kernel_size": (1, 5), "padding": (0, 2), "bias": False}),
        (3, {"kernel_size": (9, 9), "padding": 4}),
        (4, {"kernel_size": (2, 3), "padding": (1, 2), "dilation": (1, 2)}),
        (5, {"kernel_size": (3, 3), "stride": (2, 1)}),
        (3, {"kernel_size": (2, 3, 4), "padding": (1, 0, 3), "dilation": (1, 2, 1)}),
    ],
)
def test_few_results_are_sums_of_columns(results: int, how: dict[str, Any], threads: int) -> None:
    torch.manual_seed(results)
    model = _of_few(results, **how)
    x = torch.randn(2, 3, *(7, 21, 19)[3 - len(how["kernel_size"]) :])
    made = x86quant.quantize(model, [(x,)], progress=False, speed_check=False, effort="fast")
    (part,) = (m for m in made.modules() if isinstance(m, CompiledModule))
    with torch.no_grad(), threads_of(threads):
        (wanted,) = torch.utils._pytree.tree_leaves(part.graph_module(x))
        assert torch.equal(made(x), wanted)
    assert "conv_columns" in str(x86quant.profile(made, (x,), runs=1))


@pytest.mark.parametrize(
    ("results", "how"),
    [
        (16, {"kernel_size": (3, 3), "padding": 1}),  # no lane is idle
        (1, {"kernel_size": (3, 3), "stride": 2}),
        (1, {"kernel_size": (3, 1), "padding": (1, 0)}),
        (1, {"kernel_size": (9, 9)}),  # of so few lines
    ],
)
def test_other_results_are_products_of_windows(results: int, how: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model, x = _of_few(results, **how), torch.randn(1, 3, 20, 20)
    made = x86quant.quantize(model, [(x,)], progress=False, speed_check=False, effort="fast")
    told = str(x86quant.profile(made, (x,), runs=1))
    assert "conv_real" in told
    assert "conv_columns" not in told


def test_sums_that_no_float_holds_are_products_of_windows() -> None:
    torch.manual_seed(0)
    x = torch.rand(1, 600, 20, 20)
    model = nn.Sequential(nn.Conv2d(600, 600, 1, groups=600), nn.Conv2d(600, 1, 3, padding=1))
    for layer, size in zip(model, (1.0, 0.5), strict=True):
        layer.weight.data.fill_(size)  # every code is the largest
    made = x86quant.quantize(model.eval(), [(x,)], progress=False, speed_check=False, effort="fast")
    (part,) = (m for m in made.modules() if isinstance(m, CompiledModule))
    with torch.no_grad():
        (wanted,) = torch.utils._pytree.tree_leaves(part.graph_module(x))
        torch.testing.assert_close(made(x), wanted, rtol=1e-5, atol=1e-5)
    assert "conv_columns" not in str(x86quant.profile(made, (x,), runs=1))
