"""Branches on sizes, and arguments and results of any structure."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from tests.quantization.any_model import Branches, Net, images, quantized, sqnr
from x86quant.compiled.guarded import GuardedModule
from x86quant.errors import InvalidInputError, UnsupportedError, X86QuantWarning
from x86quant.forms.guard import Guard, GuardedInput
from x86quant.forms.size_conditions import parse


def test_branches_on_sizes_are_guarded():
    model = Branches(lambda _, x: x)
    result = quantized(model, images())
    assert isinstance(result, GuardedModule)
    assert sqnr(model(images(4, size=16)), result(images(4, size=16))) > 25
    assert result.outside == 0
    for x in (images(1), images(4, size=40), images(1, size=40)):
        with pytest.warns(X86QuantWarning, match="in float") if not result.outside else _nothing():
            assert torch.equal(result(x), model(x))
    assert result.outside == 3


class _nothing:  # noqa: N801
    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


class PoolsTwice(Net):
    """Halves sizes until they may be nothing, and asks for them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        y = F.max_pool2d(y, 4) if y.shape[2] > 3 else y
        return self.b(y.flatten(2).transpose(1, 2).transpose(1, 2).view(y.shape))


def test_sizes_that_halve_stay_free():
    model = PoolsTwice(lambda _, x: x)
    result = quantized(model, images())
    assert isinstance(result, GuardedModule)
    for size in (16, 21, 32):
        assert sqnr(model(images(2, size=size)), result(images(2, size=size))) > 20
    assert result.outside == 0


@pytest.mark.parametrize("condition", ["__import__('os')", "s[0][0].real", "exec(s)", "s[0] == 1"])
def test_conditions_are_about_sizes_alone(condition):
    with pytest.raises(UnsupportedError, match="cannot be checked"):
        parse(condition)
    x = GuardedInput("x", torch.float32, 4)
    Guard((x,), (parse("(max(1, s[0][3] // 4)*max(1, s[0][2] // 4)) != 1"),))


def test_a_condition_that_divides_by_a_size_of_zero_does_not_hold():
    guard = Guard((GuardedInput("x", torch.float32, 2),), (parse("s[0][0] % s[0][1] == 0"),))
    assert guard.refusal([torch.zeros(4, 2)]) is None
    for shape in ((4, 3), (4, 0)):
        assert "do not meet" in guard.refusal([torch.zeros(shape)])


def test_strict_guards_raise():
    result = quantized(Branches(lambda _, x: x), images(), strict=True)
    with pytest.raises(InvalidInputError, match="does not hold for this call"):
        result(images(2, size=40))


class Resizes(Net):
    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = F.max_pool2d(self.a(x), 2)
        found = collections.OrderedDict()
        found["out"] = F.interpolate(self.b(y), size=x.shape[-2:])
        return found


def test_sizes_stay_dynamic_and_results_keep_their_class():
    model = Resizes(lambda _, x: x)
    result = quantized(model, images())
    for x in (images(1), images(2, size=20), images(3, size=9)):
        exact, actual = model(x), result(x)
        assert type(actual) is collections.OrderedDict
        assert sqnr(exact["out"], actual["out"]) > 25
    assert result.quantization.int8_layers == ("a", "b")


@dataclasses.dataclass
class Boxes:
    scores: torch.Tensor
    extra: torch.Tensor | None = None


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


@pytest.mark.parametrize(
    ("wrap", "unwrap"),
    [
        (lambda x: Boxes(x), lambda r: [r.scores]),
        (lambda x: Pair(x, -x), list),
        (lambda x: {"a": [x, (x + 1, None)], "b": 3}, lambda r: [r["a"][0], r["a"][1][0]]),
        (lambda x: collections.OrderedDict(z=x, a=-x), lambda r: list(r.values())),
    ],
    ids=["dataclass", "namedtuple", "nested", "ordered"],
)
def test_results_of_any_structure(wrap, unwrap):
    class Wraps(Net):
        def forward(self, x: torch.Tensor) -> Any:
            return wrap(super().forward(x))

    model = Wraps(lambda _, x: F.relu(x))
    result = quantized(model, images())
    x = images(3, seed=1)
    exact, actual = model(x), result(x)
    assert type(actual) is type(exact)
    for a, b in zip(unwrap(exact), unwrap(actual), strict=True):
        assert sqnr(a, b) > 25


class Options(Net):
    def forward(
        self,
        x: torch.Tensor,
        mask: torch.Tensor | None = None,
        *,
        scale: float = 1.0,
        flip: bool = False,
    ) -> torch.Tensor:
        y = self.a(x) * scale
        if mask is not None:
            y = y * mask
        if flip:
            y = -y
        return self.b(y)


def test_optional_arguments_given_or_not():
    model = Options(lambda _, x: x)
    x, mask = images(), (images(seed=3)[:, :1] > 0).float()
    result = quantized(model, x)
    assert sqnr(model(x), result(x)) > 25
    assert sqnr(model(x), result(x=x, mask=None)) > 25
    with pytest.warns(X86QuantWarning, match="arguments"):
        assert torch.equal(model(x, mask), result(x, mask))
    assert torch.equal(model(x, scale=3.0), result(x, scale=3.0))
    assert torch.equal(model(x, flip=True), result(x, flip=True))


def test_batches_with_a_mask_and_keywords():
    model = Options(lambda _, x: x)
    x, mask = images(), (images(seed=3)[:, :1] > 0).float()
    for batch, kwargs in [
        ({"x": x, "mask": mask, "scale": 2.0}, {"mask": mask, "scale": 2.0}),
        ({"x": x, "flip": True}, {"flip": True}),
    ]:
        result = quantized(model, [batch])
        assert result.quantization.int8_layers[0] == "a"
        assert sqnr(model(x, **kwargs), result(x, **kwargs)) > 25
        assert result.outside == 0


class Nested(Net):
    def forward(self, batch: Any) -> torch.Tensor:
        first, rest = batch["image"], batch["more"]
        return self.b(F.relu(self.a(first))) + rest[0].mean()


def test_nested_inputs():
    model = Nested(lambda _, x: x)
    call = {"batch": {"image": images(), "more": [images(seed=2)]}}
    result = quantized(model, [call])
    assert sqnr(model(**call), result(**call)) > 20
    assert result.quantization.int8_layers
