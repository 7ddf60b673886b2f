"""Code that counts by a size, asks for types or makes tensors of sizes is traced by torch.fx."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import x86quant
from x86quant.calling.call import Call
from x86quant.capture import exported
from x86quant.capture.traced_graph import Traced
from x86quant.errors import UnsupportedError
from x86quant.quantization.tracing.tracing import by_fx

X = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(0))


class Layer(nn.Module):
    """A linear, with tables of positions and of what may see what."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)
        self.register_buffer("places", torch.randn(1, 50, outputs))
        self.register_buffer("sees", torch.ones(50, 50, dtype=torch.bool).tril())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


class Net(nn.Module):
    def __init__(self, forward: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = Layer(8, 8)
        self._forward = forward

    def forward(self, x: torch.Tensor) -> Any:
        return self._forward(self.layer, x)


def traced(forward: Callable[..., Any]) -> Traced:
    model = Net(forward).eval()
    found = by_fx(model, Call((X,)))
    assert torch.equal(found(X), model(X))
    return found


@pytest.mark.parametrize(
    "forward",
    [
        lambda layer, x: torch.stack([layer(step) for step in x.unbind(1)], 1),
        lambda layer, x: torch.stack([layer(x[:, n]) for n in range(x.size(1))], 1),
        lambda layer, x: sum([layer(x[:, n]) for n in range(len(x.unbind(1)))]),
        lambda layer, x: torch.cat([layer(rows) for rows in x.transpose(0, 1)]),
    ],
)
def test_loops_over_steps_fix_their_number(forward):
    found = traced(forward)
    assert found.guard.inputs[0].fixed == ((1, 6),)
    more = X[:2]
    assert torch.equal(found(more), Net(forward)(more))
    with pytest.raises(UnsupportedError, match="has size 5 in dimension 1, not 6"):
        found(X[:, :5])


@pytest.mark.parametrize(
    "forward",
    [
        lambda layer, x: torch.cat([part * 2 for part in layer(x).split(4, -1)], -1),
        lambda layer, x: sum(layer(x).view(x.size(0), -1, 2, 4).permute(2, 0, 1, 3)),
        lambda layer, x: layer(x) + torch.zeros(x.size(0), 1, 8) + torch.arange(8, dtype=x.dtype),
        lambda layer, x: layer(x) + torch.finfo(x.dtype).eps,
        lambda layer, x: layer(x) + 1 if torch.is_floating_point(x) else x,
        lambda layer, x: layer(x) + torch.ones(x.shape[1], 1, device=x.device),
        lambda layer, x: layer(x) + layer.places[:, : x.size(1)],
        lambda layer, x: layer(x) + layer.places.narrow(1, 0, x.size(1)),
        lambda layer, x: layer(x) + layer.places[:, :1].expand(x.size(0), x.size(1), 8),
        lambda layer, x: x + 1 if layer(x).shape[-1] == 8 else x,
        lambda layer, x: layer(x) + 1 if x.shape[1] * 2 != x.shape[1] + x.shape[1] else layer(x),
        lambda layer, x: layer(x) if layer(x).size(0) > x.size(0) else layer(x) * 2,
        lambda layer, x: (layer(x) @ x.transpose(1, 2)).masked_fill(
            ~layer.sees[: x.size(1), : x.size(1)], -1.0
        ),
    ],
)
def test_what_all_sizes_share_fixes_none(forward):
    found = traced(forward)
    assert not [place for place in found.guard.inputs[0].fixed if place[0] != 2]
    assert not found.guard.conditions
    more = torch.cat([X, X], 1)[:3, :9]
    assert torch.equal(found(more), Net(forward)(more))


@pytest.mark.parametrize("rows", [1, 2])
def test_parts_behind_what_grows_fix_no_rows(rows):
    """As networks that detect have them: ``interpolate`` asks for numbers in C++."""

    class Grown(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.grow = nn.Conv2d(4, 4, 3, 2, 1), nn.Upsample(None, 2, "nearest")

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.conv(x)
            both = list(torch.cat([self.grow(self.conv(y)), y], 1).chunk(2, 1))
            both.extend(torch.relu(part) for part in both[-1:])
            return torch.cat(both, 1)

    model = Grown().eval()
    found = by_fx(model, Call((torch.randn(rows, 4, 16, 16),)))
    for x in (torch.randn(3, 4, 16, 16), torch.randn(1, 4, 24, 32)):
        assert torch.equal(found(x), model(x))


def test_rows_that_are_cut_into_areas_fix_no_rows():
    """Torch asks whether rows and pixels together are a multiple of as many areas."""

    def forward(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        rows, tokens, _ = x.shape
        y = layer(x).reshape(rows * 2, tokens // 2, 8)
        rows, tokens, _ = y.shape
        y = layer(y).reshape(rows // 2, tokens * 2, 8)
        return torch.cat([part * n for n, part in enumerate(y.chunk(2, -1))], -1)

    found = traced(forward)
    for x in (X[:1], X[:3], torch.cat([X, X[:1]])):
        assert torch.equal(found(x), Net(forward)(x))


def test_patches_are_cut_out_without_conditions():
    """Torch asks whether they could be views: a dozen conditions where two such layers meet."""

    class Patches(nn.Module):
        def __init__(self, inputs: int) -> None:
            super().__init__()
            self.linear = nn.Conv2d(4 * inputs, 8, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            rows, channels, height, width = x.shape
            y = x.reshape(rows, channels, height // 2, 2, width // 2, 2).transpose(3, 4)
            y = y.view(y.shape).permute(0, 1, 4, 5, 2, 3)
            y = torch.reshape(y, (rows, 4 * channels, -1, width // 2))
            return torch.cat([part * n for n, part in enumerate(self.linear(y).chunk(2, 1))], 1)

    model = nn.Sequential(Patches(3), Patches(8)).eval()
    found = by_fx(model, Call((torch.randn(2, 3, 16, 24),)))
    assert not found.guard.conditions
    for x in (torch.randn(2, 3, 16, 24), torch.randn(1, 3, 8, 12), torch.randn(3, 3, 20, 4)):
        assert torch.equal(found(x), model(x))
    with pytest.raises(RuntimeError, match="invalid for input of size"):
        found(torch.randn(2, 3, 15, 24))


@pytest.mark.parametrize(
    ("forward", "holds", "fails"),
    [
        (lambda layer, x: layer(x) if x.shape[1] > 4 else layer(x) + 1, 5, 4),
        (lambda layer, x: layer(x) if x.shape[1] % 2 else layer(x) + 1, 8, 7),
        (lambda layer, x: layer(x)[:, : max(x.shape[1] - 4, 0)], 7, 3),
        (lambda layer, x: layer(x) + (1 if math.ceil((x.shape[1] - 1) / 4 + 2) > 3 else 2), 9, 5),
    ],
)
def test_branches_by_sizes_are_conditions(forward, holds, fails):
    found = traced(forward)
    assert not [place for place in found.guard.inputs[0].fixed if place[0] != 2]
    assert len(found.guard.conditions) == 1
    both = torch.cat([X, X], 1)
    assert torch.equal(found(both[:3, :holds]), Net(forward)(both[:3, :holds]))
    with pytest.raises(UnsupportedError, match="do not meet"):
        found(both[:, :fails])


def test_sizes_that_are_long_formulas_are_not_asked(monkeypatch):
    """With them each op takes longer than the one before."""

    def forward(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        for multiple in (4, 5, 7):
            x = torch.cat([x, x[:, : -x.shape[1] % multiple]], 1)
        return layer(x) if x.shape[1] > 4 else layer(x) + 1

    assert traced(forward).guard.conditions
    monkeypatch.setattr(exported, "_MOST_TERMS", 20)
    with pytest.raises(UnsupportedError):
        traced(forward)


def test_branches_that_no_condition_can_say_fix_the_size():
    def forward(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return layer(x) if math.floor(x.shape[1] / 4 + x.shape[2] / 3) > 2 else layer(x) + 1

    found = traced(forward)
    assert found.guard.inputs[0].fixed == ((1, 6), (2, 8))


def test_how_many_parts_there_are_is_a_condition():
    def forward(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([layer(part) * n for n, part in enumerate(x.split(4, 1))], 1)

    found = traced(forward)
    assert torch.equal(found(X[:, :5]), Net(forward)(X[:, :5]))
    with pytest.raises(UnsupportedError, match="do not meet"):
        found(X[:, :4])


@pytest.mark.parametrize(
    "forward",
    [
        lambda layer, x: torch.stack([layer(row) for row in x]),  # its rows are the batch
        lambda layer, x: sum(layer(x) for _ in range(int(x.abs().max()) + 1)),
        lambda layer, x: sum(layer(x) for _ in range(x.abs().argmax() % 3 + 1)),
        lambda layer, x: layer(x) if x.shape[0] == 4 else layer(x) + 1,
        lambda layer, x: layer(x) if x.shape[1] < x.shape[0] else layer(x) + 1,
        lambda layer, x: layer(x) if (x > 0).sum() == 3 else layer(x) + 1,
    ],
)
def test_what_values_or_the_batch_decide_is_not_traced(forward):
    with pytest.raises(UnsupportedError):
        by_fx(Net(forward).eval(), Call((X,)))


@pytest.mark.parametrize(
    "change",
    [
        lambda y: y.squeeze_(1),
        lambda y: y.squeeze_((1,)),
        lambda y: y.unsqueeze_(1),
        lambda y: y.transpose_(0, 1).transpose(0, 1),
        lambda y: torch.ops.aten.squeeze_.dim(y, 1),
    ],
)
def test_shapes_that_change_in_place_do_not_end_the_process(change):
    """Torch does that for ``squeeze_`` of a tensor whose sizes are symbols."""

    def forward(layer, x):
        first, *_ = change(layer(x) + 1).shape
        return layer(x).reshape(first, -1)

    model = Net(forward).eval()
    int8 = x86quant.quantize(model, [(X,), (X + 1,)], speed_check=False, progress=False)
    assert torch.allclose(int8(X[:3]), model(X[:3]), atol=0.1)


def test_factories_are_torchs_own_afterwards():
    before = torch.zeros, torch.arange, torch.Tensor.__getitem__, torch.Tensor.view
    with pytest.raises(UnsupportedError):
        by_fx(Net(lambda layer, x: layer(x) if x.sum() > 0 else x).eval(), Call((X,)))
    after = torch.zeros, torch.arange, torch.Tensor.__getitem__, torch.Tensor.view
    assert after == before
    assert "view" not in vars(torch.Tensor)


def test_what_torch_logs_of_symbols_is_not_shown(caplog):
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    logger.addHandler(caplog.handler)  # torch's loggers hand nothing on

    def forward(layer, x):
        product = x.transpose(0, 2) @ torch.ones(4, 1)  # fails on other rows than four
        return layer(x) * float(product.shape[-1] % 2)

    try:
        with pytest.raises(UnsupportedError):
            traced(forward)
    finally:
        logger.removeHandler(caplog.handler)
    assert logger.name not in {record.name for record in caplog.records}
