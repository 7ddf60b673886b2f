"""Numbers too small for a normal float, also in a thread where they count as zero."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

import x86quant
from tests.models import Recurrent


class _Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, dropout=0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x)
        return out


_KINDS = {
    "static": lambda: (nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()), (2, 3, 9, 9)),
    "dynamic": lambda: (nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)), (3, 64)),
    "auto": lambda: (_Encoder(), (2, 9, 64)),
    "recurrent": lambda: (Recurrent(nn.LSTM), (2, 5, 16)),
}  # fmt: skip


@pytest.fixture(params=[False, True], ids=["as-they-are", "as-zero"])
def thread(request: pytest.FixtureRequest) -> Iterator[None]:
    """A thread in which denormals are what they are, or count as zero."""
    torch.set_flush_denormal(request.param)
    yield
    torch.set_flush_denormal(False)


@torch.no_grad()
@pytest.mark.usefixtures("thread")
@pytest.mark.parametrize("kind", _KINDS)
def test_they_do_as_zeros_do(kind: str) -> None:
    torch.manual_seed(0)
    model, sizes = _KINDS[kind]()
    model.eval()
    x = torch.randn(sizes)
    mode = "static" if kind == "recurrent" else kind
    ours = x86quant.quantize(model, [x, x], mode=mode, speed_check=False, progress=False)
    for small in (1e-39, 1e-44):
        every = x.sign() * small
        assert torch.allclose(ours(every), ours(torch.zeros_like(x)), atol=1e-6)
        some = torch.where(torch.rand_like(x) < 0.5, x, every)
        zeros = torch.where(some == x, x, torch.zeros_like(x))
        assert torch.allclose(ours(some), ours(zeros), atol=1e-6)
