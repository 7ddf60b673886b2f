"""LSTMs and GRUs with int8 products: as the float modules in every way they can be called."""

from __future__ import annotations

import copy
import itertools
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

import x86quant
from x86quant.dynamic import (
    RECURRENT,
    DynamicCell,
    DynamicGRU,
    DynamicGRUCell,
    DynamicLinear,
    DynamicLSTM,
    DynamicRecurrent,
    to_dynamic,
)
from x86quant.dynamic.convert import LEAST_UNITS
from x86quant.errors import InvalidInputError

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "batch first": {"batch_first": True},
    "no bias": {"bias": False},
    "bidirectional": {"bidirectional": True},
    "deep": {"num_layers": 3},
    "deep, bidirectional, batch first": {
        "num_layers": 2,
        "bidirectional": True,
        "batch_first": True,
    },
    "projected": {"proj_size": 5},
    "projected, deep, bidirectional": {"proj_size": 5, "num_layers": 2, "bidirectional": True},
}
MODELS = [
    pytest.param(kind, options, id=f"{kind.__name__}, {name}")
    for kind, (name, options) in itertools.product((nn.LSTM, nn.GRU), KINDS.items())
    if kind is nn.LSTM or "proj_size" not in options
]
INPUTS, UNITS = 6, 11


def make(kind: type[nn.RNNBase], options: dict[str, Any]) -> tuple[nn.RNNBase, DynamicRecurrent]:
    torch.manual_seed(0)
    real = kind(INPUTS, UNITS, **options).eval()
    ours = RECURRENT[kind].from_float(real)
    assert isinstance(ours, DynamicRecurrent)
    return real, ours


def states(real: nn.RNNBase, sequences: int | None) -> Any:
    count = real.num_layers * (2 if real.bidirectional else 1)
    rows = () if sequences is None else (sequences,)
    h = torch.randn(count, *rows, real.proj_size or UNITS)
    return (h, torch.randn(count, *rows, UNITS)) if isinstance(real, nn.LSTM) else h


def flat(result: Any) -> list[torch.Tensor]:
    out, last = result
    assert not isinstance(last, list)
    first = out.data if isinstance(out, PackedSequence) else out
    return [first, *(last if isinstance(last, tuple) else (last,))]


def close(got: Any, want: Any) -> None:
    for one, other in zip(flat(got), flat(want), strict=True):
        assert one.shape == other.shape
        assert (one - other).abs().max() < 0.03
        assert (one - other).square().mean() < 1e-3 * other.square().mean()


@pytest.mark.parametrize(("kind", "options"), MODELS)
@pytest.mark.parametrize("initial", [True, False])
def test_batches_and_single_sequences(
    kind: type[nn.RNNBase], options: dict[str, Any], initial: bool
) -> None:
    real, ours = make(kind, options)
    with torch.no_grad():
        for shape in ((7, 3, INPUTS), (1, 1, INPUTS), (4, INPUTS)):
            x = torch.randn(shape)
            batched = x.dim() == 3
            sequences = None if not batched else shape[0 if real.batch_first else 1]
            hx = states(real, sequences) if initial else None
            close(ours(x, hx), real(x, hx))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_many_rows_give_what_each_sequence_gives_alone(kind: type[nn.RNNBase]) -> None:
    # More than the input's product is of at a time, some steps of more than that alone.
    _, ours = make(kind, {"bidirectional": True, "num_layers": 2})
    lengths = torch.randint(1, 6, (700,))
    x = torch.randn(5, 700, INPUTS)
    packed = pack_padded_sequence(x, lengths, enforce_sorted=False)
    with torch.no_grad():
        out, _ = nn.utils.rnn.pad_packed_sequence(ours(packed)[0])
        several = ours(x[:, :300])[0]
        for i in range(0, 300, 13):
            alone = ours(x[: lengths[i], i : i + 1])[0]
            assert torch.equal(out[: lengths[i], i : i + 1], alone)
            assert torch.equal(several[:, i : i + 1], ours(x[:, i : i + 1])[0])


@pytest.mark.parametrize(("kind", "options"), MODELS)
@pytest.mark.parametrize("lengths", [(5, 3, 3, 1), (1, 4, 2, 4), (2, 2, 2, 2)])
@pytest.mark.parametrize("initial", [True, False])
def test_packed_sequences(
    kind: type[nn.RNNBase], options: dict[str, Any], lengths: tuple[int, ...], initial: bool
) -> None:
    real, ours = make(kind, options)
    x = torch.randn(max(lengths), 4, INPUTS)
    packed = pack_padded_sequence(x, torch.tensor(lengths), enforce_sorted=False)
    hx = states(real, 4) if initial else None
    with torch.no_grad():
        got, want = ours(packed, hx), real(packed, hx)
    close(got, want)
    for name in ("batch_sizes", "sorted_indices", "unsorted_indices"):
        assert torch.equal(getattr(got[0], name), getattr(want[0], name))


@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell])
@pytest.mark.parametrize("bias", [True, False])
def test_cells(kind: type[nn.RNNCellBase], bias: bool) -> None:
    torch.manual_seed(0)
    real = kind(INPUTS, UNITS, bias=bias).eval()  # type: ignore[call-arg]
    ours = RECURRENT[kind].from_float(real)
    assert isinstance(ours, DynamicCell)
    with torch.no_grad():
        for shape in ((3, INPUTS), (INPUTS,)):
            state = None
            for _ in range(3):
                x = torch.randn(shape)
                got, want = ours(x, state), real(x, state)
                both = [(got, want)] if kind is nn.GRUCell else list(zip(got, want, strict=True))
                for one, other in both:
                    assert one.shape == other.shape
                    assert (one - other).abs().max() < 0.02
                state = want


def test_long_sequences_do_not_drift() -> None:
    for kind in (nn.LSTM, nn.GRU):
        torch.manual_seed(0)
        real = kind(32, 64, num_layers=2).eval()
        x = torch.randn(200, 4, 32)
        with torch.no_grad():
            want, got = real(x)[0], RECURRENT[kind].from_float(real)(x)[0]
        noise = (got - want).square().mean() / want.square().mean()
        assert noise < 10**-3.5


def test_tracers_follow_the_steps() -> None:
    for kind in (nn.LSTM, nn.GRU):
        _, ours = make(kind, {"bidirectional": True})
        x = torch.randn(3, 2, INPUTS)
        program = torch.export.export(ours, (x,))
        assert "x86quant.linear_dynamic" in program.graph_module.code
        for one, other in zip(flat(program.module()(x)), flat(ours(x)), strict=True):
            assert torch.allclose(one, other, atol=5e-3)


@pytest.mark.parametrize(("kind", "options"), MODELS)
def test_the_native_sequence_computes_what_the_steps_do(
    kind: type[nn.RNNBase], options: dict[str, Any]
) -> None:
    real, ours = make(kind, options)
    x = torch.randn(6, 4, INPUTS)
    packed = pack_padded_sequence(x, torch.tensor([2, 6, 1, 6]), enforce_sorted=False)
    for given in (x, packed):
        hx = states(real, 6 if real.batch_first and given is x else 4)
        native = ours(given, hx)
        assert ours._native() is not None
        kept = [None if state is None else state.clone() for state in flat((given, hx))]
        with x86quant.override("reference", op="linear"):
            ours.pack_again()
            steps = ours(given, hx)
            assert ours._native() is None
        ours.pack_again()
        # Gates that differ in the last bit may round a state to another code.
        for one, other in zip(flat(native), flat(steps), strict=True):
            assert (one - other).abs().max() < 0.01
        assert all(torch.equal(a, b) for a, b in zip(flat((given, hx)), kept, strict=True))


def test_what_explains_a_sequence_is_what_runs() -> None:
    _, ours = make(nn.LSTM, {"num_layers": 2})
    model = nn.Sequential(ours)
    names = [f"0.{kind}_l{layer}" for layer in (0, 1) for kind in ("ih", "hh")]

    def kernels() -> dict[str, str]:
        return {choice.layer: choice.kernel for choice in x86quant.explain(model)}

    assert kernels() == dict.fromkeys(names, "native")
    ours(torch.randn(2, 3, INPUTS))
    with x86quant.override("reference", op="linear"):
        assert kernels() == dict.fromkeys(names, "native")  # as it is packed
        x86quant.reroute(model)
        assert kernels() == dict.fromkeys(names, "reference")
    assert all(choice.reason for choice in x86quant.explain(model))


def test_a_sequence_that_grows_is_refused() -> None:
    _, ours = make(nn.GRU, {})
    native = ours._native()
    assert native is not None
    h = torch.zeros(1, 1, UNITS)
    for sizes in ([1, 2], [1, -1], [2, 1], [1, 1], []):
        with pytest.raises(ValueError, match=r"must not grow|initial states"):
            native.run(torch.randn(3, INPUTS), sizes, [h])


def test_what_parents_read() -> None:
    real, ours = make(nn.LSTM, {"num_layers": 2, "bidirectional": True, "dropout": 0.5})
    for name in ("input_size", "hidden_size", "num_layers", "batch_first", "bidirectional",
                 "dropout", "proj_size", "bias", "mode"):  # fmt: skip
        assert getattr(ours, name) == getattr(real, name)
    ours.flatten_parameters()
    weight = ours.weight_ih_l1_reverse
    assert weight.dtype == torch.float32
    assert (weight - real.weight_ih_l1_reverse).abs().max() < 0.01
    assert torch.equal(ours.bias_hh_l0, real.bias_hh_l0)
    with pytest.raises(AttributeError, match="weight_ih_l7"):
        _ = ours.weight_ih_l7
    assert not list(ours.parameters())
    held = [value for module in ours.modules() for value in vars(module).values()]
    assert not any(isinstance(value, list) for value in held)


def test_copies_and_states() -> None:
    for kind in (nn.LSTM, nn.GRU):
        _, ours = make(kind, {})
        _, other = make(kind, {})
        for product in other.children():
            product.weight_scale.mul_(2)
        x = torch.randn(3, 2, INPUTS)
        for twin in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
            assert torch.equal(twin(x)[0], ours(x)[0])
        assert not torch.equal(other(x)[0], ours(x)[0])
        other.load_state_dict(ours.state_dict())
        assert torch.equal(other(x)[0], ours(x)[0])


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_bad_input_is_refused(kind: type[nn.RNNBase]) -> None:
    _, ours = make(kind, {})
    good = states(ours if kind is nn.GRU else nn.LSTM(INPUTS, UNITS), 2)
    for x, hx, message in (
        (torch.randn(3, 2, 5), None, "expected 6 features"),
        (torch.randn(3, 2, 1, INPUTS), None, "2 or 3 dimensions"),
        (torch.randn(0, 2, INPUTS), None, "at least one step"),
        (torch.randn(3, 4, INPUTS), good, "expected initial states"),
    ):
        with pytest.raises(InvalidInputError, match=message):
            ours(x, hx)


def test_what_stays_in_float() -> None:
    class Own(nn.LSTM):
        def forward(self, *args: Any) -> Any:
            return super().forward(*args)

    large = [nn.RNN, nn.RNNCell, Own, nn.GRU, nn.LSTM, nn.GRUCell]
    model = nn.ModuleList([nn.LSTM(3, 8), *(kind(3, LEAST_UNITS) for kind in large)])
    kinds = [type(module) for module in to_dynamic(model)]
    assert kinds == [nn.LSTM, nn.RNN, nn.RNNCell, Own, DynamicGRU, DynamicLSTM, DynamicGRUCell]
    kept = to_dynamic(model, weight_only=True)
    assert not any(isinstance(module, DynamicLinear) for module in kept.modules())
    assert set(RECURRENT) == {nn.LSTM, nn.GRU, nn.LSTMCell, nn.GRUCell}
