"""What a saved graph asks of the sizes of its inputs, where one size follows from another."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import x86quant
from x86quant.errors import InvalidInputError


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
