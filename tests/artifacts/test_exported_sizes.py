"""What a saved graph asks of the sizes of its inputs, where one size follows from another."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import nn

import x86quant
from x86quant.errors import InvalidInputError, X86QuantWarning


class Halves(nn.Module):
    """Adds a sequence to both halves of another, which is twice as long."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.a(x).reshape(x.shape[0], 2, y.shape[1], 8) + self.a(y)[:, None]


def test_a_size_that_follows_from_another_is_checked(tmp_path: Path) -> None:
    model = x86quant.to_dynamic(Halves().eval())
    path = tmp_path / "halves.x86q"
    x86quant.save(model, path, example_inputs=(torch.randn(3, 10, 8), torch.randn(3, 5, 8)))
    loaded = x86quant.load(path)
    x, y = torch.randn(2, 14, 8), torch.randn(2, 7, 8)
    torch.testing.assert_close(loaded(x, y), model(x, y))
    with pytest.raises(InvalidInputError, match=r"x\.size\(1\) == \(2 \* y\.size\(1\)\)"):
        loaded(x, torch.randn(2, 8, 8))


class QuieterBatches(nn.Module):
    """What it computes depends on the number of samples."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.a(x))
        return self.b(y * 0.25 if x.shape[0] > 1 else y)


@pytest.mark.filterwarnings("ignore::x86quant.errors.X86QuantWarning")
@pytest.mark.parametrize("is_called_before", [False, True])
def test_what_a_graph_does_not_hold_for_is_not_in_the_file(
    is_called_before: bool, tmp_path: Path
) -> None:
    """One sample runs in float, with a warning that comes once: it is no sample of the graph."""
    torch.manual_seed(0)
    batches = [torch.randn(4, 3, 16, 16) for _ in range(4)]
    one = torch.randn(1, 3, 16, 16)
    int8 = x86quant.quantize(QuieterBatches(), batches, progress=False, speed_check=False)
    if is_called_before:
        int8(one)
    path = tmp_path / "quieter.x86q"
    x86quant.save(int8, path)
    loaded = x86quant.load(path)
    assert torch.equal(loaded(batches[0]), int8(batches[0]))
    with pytest.raises(InvalidInputError, match="does not hold for this call"):
        loaded(one)


class RowByRow(nn.Module):
    """Goes through rows in Python: a graph of it is for as many as there were."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv1d(3, 8, 3), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.a(x)) * math.sqrt(x.shape[-1])
        return self.b(torch.stack([y[i].mean(-1) for i in range(len(x))]))


def test_the_example_is_in_the_file_however_few_its_rows(tmp_path: Path) -> None:
    model = x86quant.to_dynamic(RowByRow().eval())
    path, x = tmp_path / "rows.x86q", torch.randn(1, 3, 16)
    with pytest.warns(X86QuantWarning, match=r"does not hold for inputs of \(2, 3, 16\)"):
        x86quant.save(model, path, example_inputs=(x,))
    loaded = x86quant.load(path)
    assert torch.equal(loaded(x), model(x))
    with pytest.raises(InvalidInputError, match="does not hold for this call"):
        loaded(torch.randn(2, 3, 16))
