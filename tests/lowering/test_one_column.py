"""Convolutions along images of one column become convolutions along rows."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import x86quant
from x86quant.compiled.module import CompiledModule
from x86quant.lowering.graph_tools import is_op


class _Signal(nn.Module):
    """Long filters along a column, a sum of two of them, and a pool between."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 8, (33, 1), (2, 1), (16, 0))
        self.norm = nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 8, (9, 1), padding=(4, 0))
        self.third = nn.Conv2d(8, 8, (5, 1), padding=(8, 0), dilation=(4, 1), groups=2)
        self.last = nn.Conv2d(8, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.first(x)))
        x = nn.functional.max_pool2d(x, (2, 1))
        return self.last(torch.relu(self.third(self.second(x)) + x))


def _quantized(x: torch.Tensor) -> CompiledModule:
    torch.manual_seed(0)
    made = x86quant.quantize(_Signal().eval(), [(x,)], progress=False, speed_check=False,
                             effort="fast")  # fmt: skip
    assert isinstance(made, CompiledModule)
    return made


def _kernels(made: CompiledModule) -> list[tuple[int, ...]]:
    graph = made.graph_module
    return [
        tuple(getattr(graph, str(node.kwargs["weight"].target)).shape[2:])  # type: ignore[union-attr]
        for node in graph.graph.nodes
        if is_op(node, "conv")
    ]


@pytest.mark.parametrize("width", [1, 3])
@torch.no_grad()
def test_columns_run_as_rows_and_other_images_all_the_same(width: int) -> None:
    made = _quantized(torch.randn(2, 1, 200, 1))
    assert _kernels(made) == [(1, 33), (1, 9), (1, 5)]
    x = torch.randn(3, 1, 180, width)
    (wanted,) = torch.utils._pytree.tree_leaves(made.graph_module(x))
    torch.testing.assert_close(made(x), wanted, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_wider_images_keep_their_layout() -> None:
    made = _quantized(torch.randn(2, 1, 200, 3))
    assert _kernels(made) == [(33, 1), (9, 1), (5, 1)]


@torch.no_grad()
def test_it_computes_what_the_float_model_does() -> None:
    x = torch.randn(2, 1, 200, 1)
    made = _quantized(x)
    torch.manual_seed(0)
    exact = _Signal().eval()(x)
    noise = (made(x) - exact).norm() / exact.norm()
    assert noise < 0.05
