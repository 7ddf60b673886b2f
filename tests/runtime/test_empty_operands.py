"""Inputs without elements beside others: what is joined with them runs natively."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import x86quant
from tests.torch_threads import threads_of
from x86quant.compiled.module import CompiledModule
from x86quant.errors import InvalidInputError


class _Decoder(nn.Module):
    """As the decoders of segmentation networks: an encoder's stage may have no channels."""

    def __init__(self, resizes: bool) -> None:
        super().__init__()
        self.resizes = resizes
        self.left, self.right = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 4, 3, padding=1)

    def forward(self, x: torch.Tensor, skip: torch.Tensor) -> torch.Tensor:
        x = self.left(x).relu()
        if self.resizes:
            x = nn.functional.interpolate(x, size=skip.shape[2:], mode="nearest")
        return self.right(torch.cat([x, skip], 1))


def _compiled(resizes: bool = True) -> tuple[nn.Module, CompiledModule]:
    torch.manual_seed(0)
    model = _Decoder(resizes).eval()
    calls = [(torch.randn(2, 8, 9, 11), torch.empty(2, 0, 9, 11)) for _ in range(3)]
    made = x86quant.quantize(model, calls, progress=False, speed_check=False)
    (part,) = [m for m in made.modules() if isinstance(m, CompiledModule)]
    return made, part


@pytest.mark.parametrize("threads", [1, 2])
def test_what_has_no_channels_is_joined_natively(threads: int) -> None:
    made, part = _compiled()
    with torch.no_grad(), threads_of(threads):
        for batch in (1, 2, 5):
            x = torch.randn(batch, 8, 9, 11)
            got = made(x, torch.empty(batch, 0, 9, 11))
            wanted = part.graph_module(x, torch.empty(batch, 0, 9, 11))
            assert torch.equal(got, wanted[0] if isinstance(wanted, list | tuple) else wanted)
            again = made(x, torch.empty(batch, 0, 9, 11))
            assert torch.equal(got, again)
    assert sum(len(segment.plans) for segment in part.segments) >= 3
    x86quant.assert_int8(made, (torch.randn(1, 8, 9, 11), torch.empty(1, 0, 9, 11)))
    profiled = x86quant.profile(made, (torch.randn(1, 8, 9, 11), torch.empty(1, 0, 9, 11)))
    assert "conv" in str(profiled)


def test_where_all_is_empty_torch_answers() -> None:
    made, part = _compiled(resizes=False)
    before = sum(len(segment.plans) for segment in part.segments)
    with torch.no_grad():
        got = made(torch.empty(0, 8, 9, 11), torch.empty(0, 0, 9, 11))
    assert got.shape == (0, 4, 9, 11)
    assert sum(len(segment.plans) for segment in part.segments) == before
    with pytest.raises(InvalidInputError, match="all inputs are empty"):
        x86quant.profile(made, (torch.empty(0, 8, 9, 11), torch.empty(0, 0, 9, 11)))
