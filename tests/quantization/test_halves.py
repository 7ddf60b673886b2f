"""What steps are fitted to and what they are judged by: batches, or pieces of them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from x86quant.calling.call import Call
from x86quant.quantization.kit import halves
from x86quant.quantization.kit.halves import Halves
from x86quant.quantization.tracing.float_results import FloatResults


def test_a_batch_is_taken_apart_where_rows_are_computed_alone() -> None:
    class AcrossRows(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x - x.mean(0)

    x = torch.randn(6, 4)
    found = Halves.of_rows(FloatResults(nn.Linear(4, 4)), (Call((x,)),))
    assert [call.args[0].shape[0] for call in found.calls] == [2, 1, 2, 1]
    assert torch.equal(torch.cat([call.args[0] for call in found.calls]).sort(0)[0], x.sort(0)[0])
    assert found.held_back == found.calls[-1:]
    together = Halves.of_rows(FloatResults(AcrossRows()), (Call((x,)),))
    assert together.seen is together.unseen


def test_large_batches_are_taken_apart_and_pieces_of_all_come_in_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Eight batches of six rows, in pieces of two; a batch is all seen, judges or held back."""

    class Sums(nn.Module):  # of all rows before, some of which a piece lacks
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.cumsum(0)

    monkeypatch.setattr(halves, "_LEAST_ELEMENTS", 8)
    calls = tuple(Call((torch.full((6, 4), n + 1.0),)) for n in range(8))
    found = Halves.of_rows(FloatResults(nn.ReLU()), calls)

    def batches(some: tuple[Call, ...]) -> list[int]:
        return [int(call.args[0][0, 0]) - 1 for call in some]

    assert {call.args[0].shape for call in found.calls} == {(2, 4)}
    assert found.pieces == 3
    assert batches(found.seen) == [0, 2, 4, 6] * 3
    assert batches(found.unseen) == [1, 3] * 3 + [5, 7] * 3
    assert batches(found.held_back) == [5, 7] * 3
    assert found.unseen[-6:] == found.held_back
    assert Halves.of_rows(FloatResults(Sums()), calls).seen == calls[::2]
    few = calls[:2]
    assert batches(Halves.of_rows(FloatResults(nn.ReLU()), few).unseen) == [1] * 3
    mixed = (calls[0], Call((torch.zeros(1, 4),)))
    assert len(Halves.of_rows(FloatResults(nn.ReLU()), mixed).unseen) == 1
