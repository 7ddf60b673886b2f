"""Modules that keep what they made of the sizes of a call are graphs for calls of all sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import x86quant
from x86quant.calling.call import Call
from x86quant.capture.observed import observe
from x86quant.capture.proof import prove
from x86quant.errors import UnsupportedError
from x86quant.quantization.static.part_search import trace_part
from x86quant.quantization.tracing.size_caches import forget_sizes
from x86quant.quantization.tracing.tracing import by_fx


class Anchored(nn.Module):
    """Detects by anchors, which it makes anew for images of other sizes, as YOLO's heads do."""

    shape: Any = None
    anchors = torch.empty(0)

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x)
        if self.shape != y.shape:
            self.anchors = self.made(y)
            self.shape = y.shape
        return y.flatten(2) + self.anchors

    def made(self, y: torch.Tensor) -> torch.Tensor:
        height, width = y.shape[2:]
        return torch.arange(height * width).type_as(y) / 100


class Counted(Anchored):
    """Keeps two numbers instead of a shape, and counts calls in another."""

    def __init__(self) -> None:
        super().__init__()
        self.size = (0, 0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x)
        if self.size != (y.shape[0], y.shape[2]):
            self.anchors, self.size = self.made(y), (y.shape[0], y.shape[2])
        return y.flatten(2) + self.anchors


class Limited(Anchored):
    """Looks at what it keeps in another way than whether it is the same."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x)
        if self.shape is None or self.shape < y.shape:
            self.anchors, self.shape = self.made(y), y.shape
        return y.flatten(2) + self.anchors[: y.shape[2] * y.shape[3]]


def images(rows: int = 2, size: int = 12) -> torch.Tensor:
    return torch.randn(rows, 3, size, size)


@pytest.mark.parametrize("kind", [Anchored, Counted])
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("called", [False, True])
def test_the_whole_is_one_graph_for_all_sizes(
    kind: type[nn.Module], rows: int, called: bool
) -> None:
    model = kind().eval()
    if called:
        model(images(rows))
    data = [images(rows), images(rows), images(rows, 16)]
    found = x86quant.quantize(model, data, speed_check=False, progress=False)
    assert set(found.quantization.traced_by) == {""}
    assert min(found.quantization.sqnr_db) > 25
    for x in (images(1), images(3), images(2, 16), images(2)):
        exact = model(x)
        assert (found(x) - exact).square().mean() < 0.01 * exact.square().mean()


def test_the_model_keeps_what_it_kept() -> None:
    model = Anchored().eval()
    model(images(1))
    before, shape = model.anchors, model.shape
    x86quant.quantize(model, [images()] * 2, speed_check=False, progress=False)
    assert model.anchors is before
    assert model.shape is shape


def test_what_is_not_told_by_equality_is_no_such_cache() -> None:
    model = Limited().eval()
    model(images())
    with pytest.raises(UnsupportedError, match="values of tensors"):
        trace_part("", model, Call((images(),)), by_fx)
    found = x86quant.quantize(model, [images()] * 2, speed_check=False, progress=False)
    assert found(images(1)).shape == model(images(1)).shape


def test_attributes_that_do_not_follow_sizes_stay() -> None:
    class Stepped(Anchored):
        def __init__(self) -> None:
            super().__init__()
            self.steps, self.mode, self.kernel = 3, "plain", (3, 3)

        def set_steps(self, steps: int) -> None:
            self.steps, self.mode, self.kernel = steps, "other", (steps, steps)

    model = Stepped().eval()
    model(images())
    forget_sizes(model, Call((images(),)))
    assert (model.steps, model.mode, model.kernel) == (3, "plain", (3, 3))
    assert model.shape != model.shape


def test_a_graph_that_differs_where_sizes_are_kept_is_refused() -> None:
    class Wrong(Anchored):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.conv(x)
            if self.shape != y.shape:
                self.shape = y.shape
                return y
            return y + 1

    model = Wrong().eval()
    model(images())
    seen = observe(model, [""], [Call((images(),))])[""]
    traced = trace_part("", model, seen[0].call, by_fx)
    with pytest.raises(UnsupportedError):
        prove(model, traced, seen)
