"""A block that a loop calls with one token more each time has a graph for all of its calls."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import x86quant
from tests.quantization.any_model import sqnr
from x86quant.compiled.block_graphs import BlockGraphs
from x86quant.quantization.graphs.fused_blocks import _telling


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(64, 64) for _ in range(3))
        self.norm = nn.LayerNorm(64)
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, query: torch.Tensor, so_far: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (4, 16)).transpose(1, 2)
            for layer, x in ((self.q, query), (self.k, so_far), (self.v, so_far))
        )
        query = query + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return query + self.down(F.gelu(self.up(self.norm(query))))


class Writer(nn.Module):
    """Reads back what it has written so far, and stops where it is told to."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.block = Block()
        self.out = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        written = x
        for _ in range(6):
            written = torch.cat([written, self.out(self.block(written[:, -1:], written))], 1)
            if float(written.detach().sum()) > 1e9:
                break
        return written


def test_its_graph_is_made_of_a_call_that_tells() -> None:
    model = Writer().eval()
    data = [torch.randn(2, 1, 64, generator=torch.manual_seed(i)) for i in range(3)]
    fast: Any = x86quant.quantize(model, data, mode="dynamic", fuse_blocks=True, progress=False)
    graphs = vars(fast.block)["forward"]
    assert isinstance(graphs, BlockGraphs)
    (graph,) = graphs.graphs
    for length in (1, 2, 3, 6, 9):
        given = torch.randn(2, 1, 64), torch.randn(2, length, 64)
        assert graph.guard.refusal(given) is None
        assert sqnr(model.block(*given), fast.block(*given)) > 30
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert sqnr(model(data[0]), fast(data[0])) > 25


@pytest.mark.parametrize("lengths", [(1, 2, 5), (5, 1), (1,)])
def test_the_first_call_without_single_sizes_tells(lengths: tuple[int, ...]) -> None:
    class Form:
        def tensors(self, args: Any, kwargs: Any) -> Any:
            return [*args] if kwargs is None else None

    class One:
        def __init__(self, length: int, kwargs: Any = None) -> None:
            self.call = type("Call", (), {"args": (torch.zeros(2, length),), "kwargs": kwargs})

    seen: Any = [One(9, {"other": 1}), *map(One, lengths)]
    form: Any = Form()
    (found,) = _telling(form, seen)
    assert found.shape[1] == next((x for x in lengths if x > 1), 1)
