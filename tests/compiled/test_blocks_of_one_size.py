"""Models whose code holds for one number of rows have graphs for the calls that are made."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from x86quant.calling.call import Call
from x86quant.compiled.block_graphs import BlockGraphs, tensors_for
from x86quant.dynamic import to_dynamic
from x86quant.quantization.graphs.fused_blocks import with_block_graphs


class _ReadsRows(nn.Module):
    """It makes a Python number of how many rows there are, which fixes them while it is traced."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = int(x.shape[0])
        out: torch.Tensor = self.block(x) + torch.arange(rows).reshape(rows, 1, 1)
        return out


@torch.no_grad()
@pytest.mark.parametrize("rows", [1, 2, 3])
def test_a_graph_holds_for_the_calls_that_are_made(rows: int) -> None:
    torch.manual_seed(0)
    model, x = _ReadsRows().eval(), torch.randn(rows, 6, 32)
    fast = to_dynamic(model)
    # Of other sizes, too, as ``quantize`` tries them: two rows are what free sizes are traced with.
    (note,) = with_block_graphs(fast, [Call((x,)), Call((torch.randn(2, 6, 32),))])
    assert "the whole model" in note
    forward = vars(fast)["forward"]
    assert isinstance(forward, BlockGraphs)
    (graph,) = forward.graphs
    assert tensors_for(graph, (x,), {}) is not None
    assert (fast(x) - model(x)).abs().max() < 0.1
    other = torch.randn(4, 6, 32)
    assert (fast(other) - model(other)).abs().max() < 0.1


class _TakesTokens(nn.Module):
    """Some tokens, whose places it keeps, are results, too."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True)
        self.register_buffer("places", torch.tensor([3, 0]))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.block(x)
        return y[:, self.places], y


@torch.no_grad()
@pytest.mark.filterwarnings("error")
def test_tokens_are_taken_at_places_that_the_model_keeps() -> None:
    torch.manual_seed(0)
    model = to_dynamic(_TakesTokens().eval())
    with_block_graphs(model, [Call((torch.randn(2, 6, 32),)), Call((torch.randn(3, 7, 32),))])
    forward = vars(model)["forward"]
    assert isinstance(forward, BlockGraphs)
    (graph,) = forward.graphs
    assert "take_tokens" in str(graph.compiled.graph_module.graph)
    taken, whole = model(torch.randn(4, 5, 32))
    assert torch.equal(taken, whole[:, [3, 0]])


class _TakesOfWhatItKeeps(_TakesTokens):
    """Some of the tokens that it keeps, at places that it is told, stand before the others."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.randn(1, 9, 32))

    def forward(self, x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        kept: torch.Tensor = self.kept  # type: ignore[assignment]
        return self.block(torch.cat([kept[:, places], kept, x], 1))  # type: ignore[no-any-return]


@torch.no_grad()
@pytest.mark.filterwarnings("error")
def test_tokens_that_the_model_keeps_are_read_where_they_lie() -> None:
    torch.manual_seed(0)
    float_model = _TakesOfWhatItKeeps().eval()
    model = to_dynamic(float_model)
    calls = [Call((torch.randn(1, n, 32), torch.tensor(at))) for n, at in ((6, [2, 7]), (7, [1]))]
    with_block_graphs(model, calls)
    forward = vars(model)["forward"]
    assert isinstance(forward, BlockGraphs)
    (graph,) = forward.graphs
    assert "take_tokens" in str(graph.compiled.graph_module.graph)
    for call in calls:
        exact = float_model(*call.args)
        assert (model(*call.args) - exact).norm() < 0.05 * exact.norm()
