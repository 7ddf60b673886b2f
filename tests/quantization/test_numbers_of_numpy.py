"""Models whose sizes NumPy computed: its integers and reals stand where torch takes them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import x86quant
from tests.quantization.any_model import sqnr
from x86quant.quantization.static import part_search
from x86quant.quantization.tracing.tracing import Way, by_export, by_fx

TWO, THREE, SLOPE = np.int64(2), np.int32(3), np.float64(0.1)


class Sized(nn.Module):
    """Layers and functions with numbers of NumPy."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, (THREE, THREE), stride=(TWO, TWO), padding=(TWO, TWO))
        self.norm = nn.GroupNorm(TWO, 16, eps=np.float64(1e-3))
        self.second = nn.Conv2d(16, 8, THREE, padding=np.int64(1), groups=TWO)
        self.up = nn.ConvTranspose2d(8, 8, TWO, stride=TWO)
        self.pool = nn.MaxPool2d((TWO, TWO), stride=(TWO, TWO))
        self.mean = nn.AvgPool2d((TWO, TWO), stride=(np.int64(1), np.int64(1)))
        self.head = nn.Linear(np.int64(32), 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.leaky_relu(self.norm(self.first(x)), SLOPE)
        y = self.pool(self.up(self.second(y)))
        y = F.pad(self.mean(y), (np.int64(1), TWO, 0, np.int64(1)))
        y = F.interpolate(F.hardtanh(y, np.float64(-2), np.float64(3)), scale_factor=TWO)
        y = F.adaptive_avg_pool2d(y, (TWO, TWO)) * np.float32(1.5)
        return self.head(torch.flatten(y, np.int64(1)))


@pytest.mark.parametrize("way", [by_fx, by_export])
def test_numbers_of_numpy_are_numbers(
    way: Way, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(part_search, "WAYS", {"the way": way})
    torch.manual_seed(0)
    model = Sized().eval()
    batches = [torch.randn(2, 3, 17, 17) for _ in range(4)]
    result = x86quant.quantize(model, batches, speed_check=False, progress=False)
    assert list(result.quantization.traced_by) == [""]
    assert not result.float_nodes
    assert sqnr(model(batches[0]), result(batches[0])) > 22
    x86quant.save(result, tmp_path / "sized.x86q")
    loaded = x86quant.load(tmp_path / "sized.x86q")
    assert torch.equal(loaded(batches[1]), result(batches[1]))
