"""Code that moves dimensions with einops is traced as the reshapes that it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from einops import EinopsError, einsum, pack, rearrange, reduce, repeat
from einops.layers.torch import Rearrange
from torch import nn

import x86quant
from x86quant.calling.call import Call
from x86quant.errors import UnsupportedError
from x86quant.quantization.tracing.tracing import by_fx

IMAGES = torch.randn(2, 8, 12, 12, generator=torch.Generator().manual_seed(0))


class Moving(nn.Module):
    def __init__(self, forward: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.linear = nn.Conv2d(8, 8, 3, padding=1), nn.Linear(8, 8)
        self.pixels = Rearrange("b c h w -> b (h w) c")
        self._forward = forward

    def forward(self, x: torch.Tensor) -> Any:
        return self._forward(self, x)


def windows(net: Moving, x: torch.Tensor) -> torch.Tensor:
    parts = rearrange(net.conv(x), "b c (h p) (w q) -> (b h w) (p q) c", p=4, q=4)
    return rearrange(
        net.linear(parts), "(b h w) (p q) c -> b c (h p) (w q)", b=x.shape[0], h=3, p=4
    )


@pytest.mark.parametrize(
    "forward",
    [
        lambda net, x: net.linear(net.pixels(net.conv(x))),
        lambda net, x: rearrange(net.linear(net.pixels(x)), "b (h w) c -> b c h w", h=x.shape[2]),
        lambda net, x: reduce(net.conv(x), "b c (h p) (w p2) -> b c h w", "mean", p=2, p2=2),
        lambda net, x: repeat(net.conv(x), "b c h w -> b n c h w", n=3),
        lambda net, x: einsum(net.conv(x), x, "b c h w, b c h v -> b h w v"),
        lambda net, x: pack([net.linear(net.pixels(x)), net.pixels(x)], "b * c")[0],
    ],
)
def test_it_is_one_graph_for_all_sizes(forward: Callable[..., Any]) -> None:
    model = Moving(forward).eval()
    found = by_fx(model, Call((IMAGES,)))
    for x in (IMAGES, IMAGES[:1], torch.cat([IMAGES, IMAGES])[:3], IMAGES[:, :, :8, :8]):
        assert torch.equal(found(x), model(x))


@pytest.mark.parametrize("forward", [windows, lambda net, x: net.linear(net.pixels(net.conv(x)))])
def test_it_is_quantized(forward: Callable[..., Any]) -> None:
    model = Moving(forward).eval()
    found = x86quant.quantize(model, [IMAGES, IMAGES + 0.1], speed_check=False, progress=False)
    assert set(found.quantization.traced_by) == {""}
    assert min(found.quantization.sqnr_db) > 25
    assert found(IMAGES[:1]).shape == model(IMAGES[:1]).shape


def test_what_einops_raises_and_code_catches_is_outside_of_the_graph() -> None:
    def forward(net: Moving, x: torch.Tensor) -> torch.Tensor:
        try:
            return net.conv(rearrange(x, "b c h (w p) -> b c h w p", p=5)[..., 0])
        except EinopsError:
            return net.conv(x)

    model = Moving(forward).eval()
    found = x86quant.quantize(model, [IMAGES, IMAGES + 0.1], speed_check=False, progress=False)
    assert found(IMAGES).shape == model(IMAGES).shape
    x = torch.randn(2, 8, 12, 15)
    with pytest.warns(x86quant.errors.X86QuantWarning, match="runs in float"):
        assert torch.equal(found(x), model(x))


def test_tensors_are_einops_own_as_before() -> None:
    by_fx(Moving(lambda net, x: net.pixels(net.conv(x))).eval(), Call((IMAGES,)))
    assert rearrange(IMAGES, "b c h w -> (b c) h w").shape == (16, 12, 12)
    with pytest.raises(EinopsError):
        rearrange(IMAGES, "b c h -> b c h")
    with pytest.raises(UnsupportedError):
        by_fx(Moving(lambda net, x: rearrange(net.conv(x), "b c h -> b c h")), Call((IMAGES,)))
