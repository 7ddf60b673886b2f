"""Statements that write in place, and models that change what they hold or are given."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from tests.quantization.any_model import Net, clamp, images, quantized, sqnr


def _relu_function(_: Any, x: torch.Tensor) -> torch.Tensor:
    F.relu(x, inplace=True)
    return x


def _relu_positional(_: Any, x: torch.Tensor) -> torch.Tensor:
    F.relu(x, True)
    return x


def _relu_layer(net: Any, x: torch.Tensor) -> torch.Tensor:
    net.relu(x)
    return x


def _relu_layer_twice(net: Any, x: torch.Tensor) -> torch.Tensor:
    net.relu(x)
    y = x - 0.5
    net.relu(y)
    return x + y


def _torch_relu(_: Any, x: torch.Tensor) -> torch.Tensor:
    torch.relu_(x)
    return x


def _masked_fill(_: Any, x: torch.Tensor) -> torch.Tensor:
    x.masked_fill_(x > 0.2, 0.2)  # continuous, so that rounding cannot flip much
    return x


def _chain(_: Any, x: torch.Tensor) -> torch.Tensor:
    x.mul_(2.0).add_(0.3)
    return x


def _slice(_: Any, x: torch.Tensor) -> torch.Tensor:
    x[:, :4].mul_(0.0)
    return x


def _set_item(_: Any, x: torch.Tensor) -> torch.Tensor:
    x[:, ::2] = 0.25
    return x


def _alias(_: Any, x: torch.Tensor) -> torch.Tensor:
    z = x
    x += 1
    return z


def _view_written(_: Any, x: torch.Tensor) -> torch.Tensor:
    y = x.flatten(1)
    y.mul_(-1.0)
    return x


def _written_under_view(_: Any, x: torch.Tensor) -> torch.Tensor:
    y = x.transpose(1, 2)
    x.mul_(-1.0)
    return y.transpose(1, 2)


def _read_before(_: Any, x: torch.Tensor) -> torch.Tensor:
    before = x * 3
    x.abs_()
    return x - before


def _out(_: Any, x: torch.Tensor) -> torch.Tensor:
    torch.mul(x, -2.0, out=x)
    return x


def _fill(_: Any, x: torch.Tensor) -> torch.Tensor:
    y = x.new_empty(x.shape)
    y.copy_(x)
    y.zero_()
    return x + y


def _copied_into(_: Any, x: torch.Tensor) -> torch.Tensor:
    y = torch.empty_like(x)
    y.copy_(x * 2)
    return y + x


WRITES = [
    clamp,
    _relu_function,
    _relu_positional,
    _relu_layer,
    _relu_layer_twice,
    _torch_relu,
    _masked_fill,
    _chain,
    _slice,
    _set_item,
    _alias,
    _view_written,
    _written_under_view,
    _read_before,
    _out,
    _fill,
    _copied_into,
]


@pytest.mark.parametrize("between", WRITES, ids=lambda f: f.__name__)
def test_statements_that_write_in_place_are_kept(between):
    model = Net(between)
    result = quantized(model, images())
    assert result.quantization.int8_layers
    for x in (images(1, seed=1), images(5, size=20, seed=2)):
        with torch.no_grad():
            assert sqnr(model(x.clone()), result(x.clone())) > 25


class ChangesInput(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.mul_(2.0)
        return self.b(self.a(x))


def test_a_model_that_changes_its_input_still_does():
    model = ChangesInput(lambda _, x: x)
    data = images()
    result = quantized(model, data)
    assert torch.equal(data, images())
    a, b = images(seed=1), images(seed=1)
    assert sqnr(model(a), result(b)) > 25
    assert torch.equal(a, b)


class Remembers(Net):
    """A buffer changes as it runs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        out = self.b(y + self.mem)
        self.mem.copy_(y.mean((0, 2, 3)).view(8, 1, 1))
        return out


def test_buffers_go_on_changing():
    model = Remembers(lambda _, x: x)
    result = quantized(model, images())
    assert torch.equal(result.mem, torch.zeros(8, 1, 1))
    for seed in range(3):
        assert sqnr(model(images(seed=seed)), result(images(seed=seed))) > 25
    assert sqnr(model.mem, result.mem) > 25
    assert "buffers change" in str(result.quantization)
