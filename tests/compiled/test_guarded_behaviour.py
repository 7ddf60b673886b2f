"""Guarded models as modules: conversions, copies, tracers, changed weights."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

import x86quant
from tests.compiled.small_modules import (
    FLOAT_TYPES,
    REFUSED,
    Net,
    saved,
    write,
    x,
)
from x86quant.compiled import CompiledModule, GuardedModule
from x86quant.errors import InvalidInputError, UnsupportedError

__all__ = ["x"]

pytestmark = [
    pytest.mark.filterwarnings("ignore:Please use quant_min and quant_max:UserWarning"),
    pytest.mark.filterwarnings("ignore:.torch.jit.(trace|save|load):DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.isinstance.treespec:FutureWarning"),
]


class Branches(Net):
    def __init__(self) -> None:
        super().__init__(nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return y * 2 if x.shape[2] > 10 else y


@pytest.fixture(scope="module")
def built_guarded() -> GuardedModule:
    torch.manual_seed(0)
    batches = [torch.randn(4, 3, 8, 8) for _ in range(4)]
    found = x86quant.quantize(Branches().eval(), batches, progress=False, speed_check=False)
    assert isinstance(found, GuardedModule)
    return found


@pytest.fixture
def guarded(built_guarded: GuardedModule) -> GuardedModule:
    return copy.deepcopy(built_guarded)


@pytest.fixture(params=[(2, 3, 8, 8), (2, 3, 12, 12)], ids=["inside", "outside"])
def given(request: pytest.FixtureRequest) -> torch.Tensor:
    return torch.randn(request.param, generator=torch.Generator().manual_seed(1))


outside_is_warned = pytest.mark.filterwarnings("ignore:a call runs in float")


@outside_is_warned
@pytest.mark.parametrize("how", FLOAT_TYPES)
def test_a_guarded_model_takes_another_floating_type(
    how: str, guarded: GuardedModule, given: torch.Tensor
) -> None:
    convert, dtype = FLOAT_TYPES[how]
    converted = convert(copy.deepcopy(guarded))
    out = converted(given.to(dtype))
    assert out.dtype == dtype
    assert torch.equal(out, guarded(given.to(dtype).float()).to(dtype))
    assert converted.outside == guarded.outside


@pytest.mark.parametrize("how", REFUSED)
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_guarded_model_refuses_what_cannot_be_done(how: str, guarded: GuardedModule) -> None:
    convert, why = REFUSED[how]
    with pytest.raises(InvalidInputError, match=why):
        convert(guarded)


@outside_is_warned
def test_copies_of_a_guarded_model(guarded: GuardedModule, given: torch.Tensor) -> None:
    expected = guarded(given)
    for other in (copy.deepcopy(guarded), pickle.loads(pickle.dumps(guarded)), saved(guarded)):
        assert torch.equal(other(given), expected)
    assert torch.equal(guarded.train()(given), expected)
    assert not guarded.training


@outside_is_warned
def test_torch_compile_keeps_the_guard(guarded: GuardedModule, given: torch.Tensor) -> None:
    torch._dynamo.reset()
    fast = torch.compile(guarded, backend="aot_eager")
    with torch.no_grad():
        for x in (given, torch.randn(1, 3, 8, 8), torch.randn(1, 3, 12, 12), given):
            assert torch.equal(fast(x), guarded(x))


def test_jit_trace_of_a_guarded_model_is_refused(guarded: GuardedModule, x: torch.Tensor) -> None:
    with pytest.raises(UnsupportedError, match="checks at every call"):
        torch.jit.trace(guarded, (x,))


def test_a_guarded_model_follows_its_weights(guarded: GuardedModule, x: torch.Tensor) -> None:
    compiled = guarded.compiled
    assert isinstance(compiled, CompiledModule)
    before = guarded(x)
    with torch.no_grad():
        write(compiled)
    assert not torch.equal(guarded(x), before)
    assert torch.equal(guarded(x), compiled.graph_module(x)[0])


@outside_is_warned
def test_the_float_model_does_not_answer_for_changed_weights(guarded: GuardedModule) -> None:
    outside = torch.randn(2, 3, 12, 12)
    expected = guarded(outside)
    state = {name: tensor.clone() for name, tensor in guarded.state_dict().items()}
    guarded.load_state_dict(state)  # the same numbers
    assert torch.equal(guarded(outside), expected)
    compiled = guarded.compiled
    assert isinstance(compiled, CompiledModule)
    with torch.no_grad():
        write(compiled)
    for module in (guarded, copy.deepcopy(guarded), pickle.loads(pickle.dumps(guarded))):
        with pytest.raises(InvalidInputError, match="int8 ones were changed"):
            module(outside)
    guarded.load_state_dict(state)
    assert torch.equal(guarded(outside), expected)
