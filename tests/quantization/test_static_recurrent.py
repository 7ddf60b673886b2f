"""LSTMs and GRUs in static int8: one native step a layer, with the bytes of plain torch."""

from __future__ import annotations

import itertools
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import x86quant
from tests import isa
from tests.op_checks import check_ops
from x86quant.compiled import CompiledModule
from x86quant.errors import InvalidInputError
from x86quant.lowering.float_forms import recurrent_graph
from x86quant.lowering.graph_tools import is_op
from x86quant.lowering.rounded import Int8Weight
from x86quant.quantization.static.conversion import rounded_recurrent
from x86quant.quantization.tracing.recurrent_layers import GRUCellLayer, LSTMCellLayer

FEATURES, UNITS, STEPS, BATCH = 20, 24, 9, 3
KINDS = (nn.LSTM, nn.GRU)
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"batch_first": True},
    {"bias": False},
    {"num_layers": 3},
    {"num_layers": 2, "bidirectional": True, "batch_first": True},
)
Use = Callable[[nn.Module, torch.Tensor], torch.Tensor]


class Tagger(nn.Module):
    """A linear, a recurrent layer and a linear; ``use`` is how the second is called."""

    def __init__(self, rnn: nn.RNNBase, use: Use) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, rnn.input_size)
        self.rnn, self.use = rnn, use
        width = (rnn.proj_size or rnn.hidden_size) * (2 if rnn.bidirectional else 1)
        self.head = nn.Linear(width, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.use(self.rnn, torch.relu(self.first(x))))
        return out


def every_step(rnn: nn.Module, x: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = rnn(x)[0]
    return found


def last_of_lstm(rnn: nn.Module, x: torch.Tensor) -> torch.Tensor:
    _, (h, _) = rnn(x)
    found: torch.Tensor = h[-1]
    return found


def last_of_gru(rnn: nn.Module, x: torch.Tensor) -> torch.Tensor:
    _, h = rnn(x)
    found: torch.Tensor = h[-1]
    return found


def both_ends(rnn: nn.Module, x: torch.Tensor) -> torch.Tensor:
    _, (h, _) = rnn(x)
    return torch.cat((h[-2], h[-1]), 1)


def all_layers(rnn: nn.Module, x: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = rnn(x)[1][0]
    return found


def last_cell(rnn: nn.Module, x: torch.Tensor) -> torch.Tensor:
    _, (_, c) = rnn(x)
    found: torch.Tensor = c[-1]
    return found


def with_initial(rnn: nn.Module, x: torch.Tensor) -> torch.Tensor:
    zero = torch.zeros(1, BATCH, UNITS)
    found: torch.Tensor = rnn(x, (zero, zero))[0]
    return found


def twice(rnn: nn.Module, x: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = rnn(rnn(x)[0])[0]
    return found


def tagger(kind: Any, use: Use = every_step, **options: Any) -> Tagger:
    torch.manual_seed(0)
    return Tagger(kind(options.pop("inputs", 16), UNITS, **options), use).eval()


def batches(model: Tagger, count: int = 4, sequences: int = BATCH) -> list[torch.Tensor]:
    first = (sequences, STEPS) if model.rnn.batch_first else (STEPS, sequences)
    return [torch.randn(*first, FEATURES) for _ in range(count)]


def static(model: nn.Module, data: list[torch.Tensor], **options: Any) -> Any:
    return x86quant.quantize(
        model, data, mode="static", speed_check=False, progress=False, **options
    )


def decibels(exact: torch.Tensor, found: torch.Tensor) -> float:
    return float(10 * torch.log10(exact.square().sum() / (exact - found).square().sum()))


@pytest.mark.parametrize(
    ("kind", "options"),
    list(itertools.product(KINDS, OPTIONS)),
    ids=[f"{k.__name__} {o}" for k, o in itertools.product(KINDS, OPTIONS)],
)
def test_a_layer_is_one_step_with_the_bytes_of_plain_torch(kind: Any, options: Any) -> None:
    model = tagger(kind, **options)
    data = batches(model)
    int8 = static(model, data)
    assert isinstance(int8, CompiledModule)
    assert not int8.float_nodes
    found = [node for node in int8.graph_module.graph.nodes if is_op(node, "recurrent")]
    assert len(found) == model.rnn.num_layers
    for sequences in (BATCH, 1, 5):
        x = batches(model, 1, sequences)[0]
        with torch.no_grad():
            assert torch.equal(int8(x), int8.graph_module(x))
            assert decibels(model(x), int8(x)) > 30
    report = x86quant.assert_int8(int8, (data[0],))
    assert sum("recurrent" in op.op for op in report.int8) == model.rnn.num_layers
    assert "recurrent" in str(x86quant.explain(int8))


@pytest.mark.parametrize(
    ("kind", "use", "options"),
    [
        (nn.LSTM, last_of_lstm, {}),
        (nn.LSTM, last_of_lstm, {"num_layers": 2, "batch_first": True}),
        (nn.GRU, last_of_gru, {"num_layers": 2}),
        (nn.LSTM, both_ends, {"bidirectional": True}),
        (nn.LSTM, both_ends, {"bidirectional": True, "num_layers": 2, "batch_first": True}),
        (nn.LSTM, all_layers, {"num_layers": 2}),
        (nn.LSTM, twice, {"inputs": UNITS}),
    ],
)
def test_last_states_and_repeated_calls(kind: Any, use: Use, options: Any) -> None:
    model = tagger(kind, use, **options)
    data = batches(model)
    int8 = static(model, data)
    steps = [node for node in int8.graph_module.graph.nodes if is_op(node, "recurrent")]
    assert len(steps) == model.rnn.num_layers * (2 if use is twice else 1)
    with torch.no_grad():
        assert decibels(model(data[0]), int8(data[0])) > 25


class Stateful(nn.Module):
    """A recurrent layer that goes on from given states, and gives its own."""

    def __init__(self, rnn: nn.RNNBase) -> None:
        super().__init__()
        self.first, self.rnn = nn.Linear(FEATURES, rnn.input_size), rnn
        width = (rnn.proj_size or rnn.hidden_size) * (2 if rnn.bidirectional else 1)
        self.head = nn.Linear(width, 5)

    def forward(self, x: torch.Tensor, h: torch.Tensor, c: torch.Tensor | None = None) -> Any:
        if c is None:
            out, h = self.rnn(self.first(x), h)
            return self.head(out), h
        out, (h, c) = self.rnn(self.first(x), (h, c))
        return self.head(out), h, c


def calls(rnn: nn.RNNBase, count: int = 4, sequences: int | None = BATCH) -> list[tuple[Any, ...]]:
    """Inputs and initial states, which are larger than the states that a layer computes."""
    batch = () if sequences is None else (sequences,)
    layers = rnn.num_layers * (2 if rnn.bidirectional else 1)
    steps = (*batch, STEPS) if rnn.batch_first else (STEPS, *batch)
    widths = (rnn.proj_size or UNITS, UNITS) if isinstance(rnn, nn.LSTM) else (UNITS,)
    return [
        (torch.randn(*steps, FEATURES), *(2 * torch.randn(layers, *batch, w) for w in widths))
        for _ in range(count)
    ]


def compiled_in(int8: nn.Module) -> CompiledModule:
    """The one graph that is all of a model, perhaps behind a guard of its arguments."""
    (found,) = (x for x in int8.modules() if isinstance(x, CompiledModule))
    return found


def layers_of(int8: nn.Module) -> int:
    nodes = compiled_in(int8).graph_module.graph.nodes
    return sum(is_op(node, "recurrent", "recurrent_last") for node in nodes)


STATEFUL: tuple[tuple[Any, dict[str, Any]], ...] = (
    (nn.LSTM, {}),
    (nn.GRU, {}),
    (nn.LSTM, {"bidirectional": True, "num_layers": 2}),
    (nn.GRU, {"bidirectional": True, "num_layers": 2, "batch_first": True}),
    (nn.LSTM, {"proj_size": 7, "bias": False}),
    (nn.LSTM, {"proj_size": 7, "bidirectional": True, "num_layers": 2, "batch_first": True}),
)


@pytest.mark.parametrize(
    ("kind", "options", "sequences"),
    [(*one, BATCH) for one in STATEFUL] + [(*one, None) for one in STATEFUL[2:4]],
)
def test_states_that_are_given_and_asked_for(
    kind: Any, options: Any, sequences: int | None
) -> None:
    torch.manual_seed(0)
    model = Stateful(kind(16, UNITS, **options)).eval()
    data = calls(model.rnn, sequences=sequences)
    int8 = static(model, data)
    plain = compiled_in(int8).graph_module
    assert layers_of(int8) == model.rnn.num_layers
    for call in calls(model.rnn, 2, sequences):
        with torch.no_grad():
            found, exact = int8(*call), model(*call)
            assert all(map(torch.equal, found, plain(*call)))
            assert min(map(decibels, exact, found)) > 20
            if kind is nn.LSTM:  # no codes say them
                assert decibels(exact[2], found[2]) > 33
    ops = [layer.op for layer in x86quant.explain(int8).layers]
    assert sum("recurrent" in op for op in ops) == model.rnn.num_layers
    x86quant.assert_int8(int8, data[0])


@pytest.mark.parametrize("kind", KINDS)
def test_other_initial_states_give_other_answers(kind: Any) -> None:
    torch.manual_seed(0)
    model = Stateful(kind(16, UNITS)).eval()
    int8 = static(model, calls(model.rnn))
    (call,) = calls(model.rnn, 1)
    with torch.no_grad():
        expected = model(*call)[0] - model(call[0], *(x * 0 for x in call[1:]))[0]
        found = int8(*call)[0] - int8(call[0], *(x * 0 for x in call[1:]))[0]
        assert decibels(expected, found) > 20
    with pytest.raises(InvalidInputError, match="h must be of shape"):
        int8(call[0], call[1][:, :1], *call[2:])


class Translator(nn.Module):
    """A decoder that begins where an encoder ended."""

    def __init__(self, kind: Any, **options: Any) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 16)
        self.encoder, self.decoder = kind(16, UNITS, **options), kind(16, UNITS, **options)
        self.head = nn.Linear(UNITS * (2 if self.encoder.bidirectional else 1), 5)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        _, state = self.encoder(self.first(x))
        out: torch.Tensor = self.head(self.decoder(self.first(y), state)[0])
        return out


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [{}, {"num_layers": 2}, {"bidirectional": True}])
def test_a_decoder_begins_where_an_encoder_ended(kind: Any, options: Any) -> None:
    torch.manual_seed(0)
    model = Translator(kind, **options).eval()
    data = [(torch.randn(STEPS, BATCH, FEATURES), torch.randn(4, BATCH, FEATURES)) for _ in "abcd"]
    int8 = static(model, data)
    assert layers_of(int8) == 2 * model.encoder.num_layers
    if not model.encoder.bidirectional:
        assert not int8.float_nodes
    with torch.no_grad():
        assert torch.equal(int8(*data[0]), int8.graph_module(*data[0]))
        assert decibels(model(*data[0]), int8(*data[0])) > 30


def from_zeros(rnn: Any, x: torch.Tensor) -> torch.Tensor:
    zeros = torch.zeros(rnn.num_layers, x.shape[1], UNITS)
    found: torch.Tensor = rnn(x, (zeros, zeros) if isinstance(rnn, nn.LSTM) else zeros)[0]
    return found


@pytest.mark.parametrize(
    ("kind", "use", "options"),
    [
        (nn.LSTM, from_zeros, {"num_layers": 2}),
        (nn.GRU, from_zeros, {}),
        (nn.LSTM, with_initial, {}),
        (nn.LSTM, last_cell, {"num_layers": 2}),
        (nn.LSTM, every_step, {"proj_size": 7, "num_layers": 2, "bidirectional": True}),
    ],
)
def test_zeros_constants_cells_and_projections(kind: Any, use: Use, options: Any) -> None:
    model = tagger(kind, use, **options)
    data = batches(model)
    int8 = static(model, data)
    assert layers_of(int8) == model.rnn.num_layers
    assert not int8.float_nodes
    with torch.no_grad():
        assert torch.equal(int8(data[0]), int8.graph_module(data[0]))
        assert decibels(model(data[0]), int8(data[0])) > 30


class Cells(nn.Module):
    """A cell called step by step, from given states or zeros."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.first, self.cell, self.head = (
            nn.Linear(FEATURES, 16),
            kind(16, UNITS),
            nn.Linear(UNITS, 5),
        )

    def forward(self, x: torch.Tensor, state: Any = None) -> torch.Tensor:
        x, outs = self.first(x), []
        for i in range(STEPS):
            state = self.cell(x[i], state)
            outs.append(state[0] if isinstance(self.cell, nn.LSTMCell) else state)
        out: torch.Tensor = self.head(torch.stack(outs))
        return out


@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell])
@pytest.mark.parametrize("given", [False, True])
def test_cells_are_layers_of_one_step(kind: Any, given: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Cells(kind).eval()
    state = torch.randn(BATCH, UNITS)
    states = ((state, state) if kind is nn.LSTMCell else state,) if given else ()
    data = [(torch.randn(STEPS, BATCH, FEATURES), *states) for _ in range(4)]
    int8 = static(model, data, example_inputs=data[0])
    compiled = compiled_in(int8)
    nodes = [x for x in compiled.graph_module.graph.nodes if is_op(x, "recurrent_last")]
    assert len(nodes) == STEPS
    assert len({node.kwargs["weights"][0].target for node in nodes}) == 1  # weights are there once
    with torch.no_grad():
        assert decibels(model(*data[0]), int8(*data[0])) > 28
        leaves = [data[0][0], *([state] * (1 if kind is nn.GRUCell else 2) if given else [])]
        assert torch.equal(compiled(*leaves)[0], compiled.graph_module(*leaves)[0])
        x86quant.save(int8, tmp_path / "cells.x86q")
        assert torch.equal(x86quant.load(tmp_path / "cells.x86q")(*data[0]), int8(*data[0]))


class Packing(nn.Module):
    """Sequences of different lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.GRU(FEATURES, UNITS, batch_first=True), nn.Linear(UNITS, 5)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(
            x, lengths, batch_first=True, enforce_sorted=False
        )
        out: torch.Tensor = self.head(self.rnn(packed)[1][-1])
        return out


def test_packed_sequences_stay_float_and_a_note_says_so() -> None:
    torch.manual_seed(0)
    model = Packing().eval()
    data = [(torch.randn(BATCH, STEPS, FEATURES), torch.tensor([9, 4, 6])) for _ in range(3)]
    int8 = static(model, data)
    assert "in float: rnn; recurrent layers of packed sequences" in str(int8.quantization)
    with torch.no_grad():
        assert decibels(model(*data[0]), int8(*data[0])) > 30


def test_one_sequence_without_a_batch() -> None:
    model = tagger(nn.GRU, num_layers=2, batch_first=True)
    data = [torch.randn(STEPS, FEATURES) for _ in range(4)]
    int8 = static(model, data)
    with torch.no_grad():
        assert torch.equal(int8(data[0]), int8.graph_module(data[0]))
        assert decibels(model(data[0]), int8(data[0])) > 30


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [{}, {"batch_first": True, "bidirectional": True}])
def test_no_sequences_and_no_steps(kind: Any, options: Any) -> None:
    """As in torch: of no sequences there is a result of that size; no steps are an error."""
    model = tagger(kind, **options)
    int8 = static(model, batches(model))
    none, empty = (0, STEPS), (BATCH, 0)
    if not model.rnn.batch_first:
        none, empty = none[::-1], empty[::-1]
    with torch.no_grad():
        x = torch.randn(*none, FEATURES)
        assert int8(x).shape == model(x).shape
        with pytest.raises(RuntimeError, match="larger than 0"):
            model(torch.randn(*empty, FEATURES))
        with pytest.raises(InvalidInputError, match="at least one step"):
            int8(torch.randn(*empty, FEATURES))


@pytest.mark.parametrize("bidirectional", [False, True])
def test_steps_are_no_batch_that_is_run_in_parts(bidirectional: bool) -> None:
    # More than the second-level cache holds, as if the first dimension were images.
    model = Tagger(nn.GRU(160, 64, bidirectional=bidirectional), every_step).eval()
    data = [torch.randn(256, 64, FEATURES)] * 2
    int8 = static(model, data)
    with torch.no_grad():  # linears of this size may be another provider's, which rounds otherwise
        assert decibels(int8.graph_module(data[0]), int8(data[0])) > 50
    (found,) = (x for x in check_ops(int8.graph_module, (data[0],)) if x.op == "recurrent")
    assert found.different == 0


class Whole(nn.Module):
    """Returns what a recurrent layer returns, as one value, as two, or as all tensors."""

    def __init__(self, rnn: nn.RNNBase, form: str) -> None:
        super().__init__()
        self.rnn, self.form = rnn, form

    def forward(self, x: torch.Tensor) -> Any:
        if self.form == "as it is":
            return self.rnn(x)
        out, last = self.rnn(x)
        if self.form == "states alone":
            return last
        return {"out": out, "last": last}


def tensors_of(result: Any) -> list[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        return [result]
    values = result.values() if isinstance(result, dict) else result
    return [x for value in values for x in tensors_of(value)]


@pytest.mark.parametrize("form", ["as it is", "states alone", "by name"])
@pytest.mark.parametrize("options", [*OPTIONS, {"num_layers": 2, "proj_size": 8}], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_what_a_layer_returns_may_be_the_result(
    kind: Any, options: Any, form: str, tmp_path: Path
) -> None:
    if kind is nn.GRU and "proj_size" in options:
        pytest.skip("nn.GRU has no projections")
    model = Whole(kind(FEATURES, UNITS, **options), form).eval()
    batches = [torch.randn(STEPS, BATCH, FEATURES) for _ in range(4)]
    small = x86quant.quantize(
        model, batches, mode="static", speed_check=False, progress=False, strict=True
    )
    x = batches[0]
    with torch.no_grad():
        want, got = model(x), small(x)
    if form != "by name":
        assert isinstance(got, type(want))
    assert [t.shape for t in tensors_of(got)] == [t.shape for t in tensors_of(want)]
    for a, b in zip(tensors_of(got), tensors_of(want), strict=True):
        assert (a - b).abs().max() < 0.05
    x86quant.export_program(small, tmp_path / "layer.xq", (x,))  # all of it runs natively
    x86quant.save(small, tmp_path / "layer.x86q")
    again = x86quant.load(tmp_path / "layer.x86q")(x)
    assert all(map(torch.equal, tensors_of(again), tensors_of(got)))


@pytest.mark.parametrize("kind", KINDS)
def test_files_and_pickles(kind: Any, tmp_path: Path) -> None:
    model = tagger(kind, num_layers=2, bidirectional=True)
    data = batches(model)
    int8 = static(model, data)
    x86quant.save(int8, tmp_path / "tagger.x86q")
    loaded = x86quant.load(tmp_path / "tagger.x86q")
    with torch.no_grad():
        expected = int8(data[0])
        assert torch.equal(loaded(data[0]), expected)
        assert torch.equal(pickle.loads(pickle.dumps(int8))(data[0]), expected)


def test_layers_can_stay_float() -> None:
    model = tagger(nn.LSTM, num_layers=2)
    data = batches(model)
    for wanted in ("rnn", nn.LSTM, "rnn.layer0"):
        int8 = static(model, data, float_layers=[wanted])
        kept = {"rnn.layer0"} if wanted == "rnn.layer0" else {"rnn.layer0", "rnn.layer1"}
        assert set(int8.quantization.float_layers) == kept
        with torch.no_grad():
            assert decibels(model(data[0]), int8(data[0])) > 30


def test_by_itself_quantize_keeps_them_dynamic() -> None:
    model = tagger(nn.LSTM)
    assert x86quant.quantize(model, batches(model), progress=False).quantization.mode == "dynamic"


_AT_A_LEVEL = """
import hashlib, sys, torch, x86quant
module, digest = x86quant.load(sys.argv[1]), hashlib.sha256()
with torch.no_grad():
    for call in torch.load(sys.argv[2]):
        answer = module(*call)
        for x in answer if isinstance(answer, tuple) else (answer,):
            digest.update(x.numpy().tobytes())
print(digest.hexdigest())
"""


def at_every_level(int8: nn.Module, data: list[tuple[Any, ...]], folder: Path) -> set[str]:
    """What ``int8`` answers, as each level gives it, in short."""
    model, inputs = folder / "model.x86q", folder / "inputs.pt"
    x86quant.save(int8, model)
    torch.save(data, inputs)
    return {
        subprocess.run(
            [sys.executable, "-c", _AT_A_LEVEL, str(model), str(inputs)],
            env=isa.environment(level), capture_output=True, text=True, check=True,
        ).stdout
        for level in isa.LEVELS
        if isa.has(level)
    }  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_every_level_gives_the_same_bytes(kind: Any, tmp_path: Path) -> None:
    model = tagger(kind, num_layers=2)
    data = [(x,) for x in batches(model)]
    assert len(at_every_level(static(model, [x for (x,) in data]), data, tmp_path)) == 1


@pytest.mark.parametrize(("kind", "options"), STATEFUL[3:])
def test_every_level_goes_on_from_states_alike(kind: Any, options: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Stateful(kind(16, UNITS, **options)).eval()
    data = calls(model.rnn)
    assert len(at_every_level(static(model, data), data, tmp_path)) == 1


def operands(kind: str = "lstm") -> dict[str, Any]:
    rows = (4 if kind == "lstm" else 3) * 5
    return {
        "x": torch.randint(0, 256, (4, 2, 6), dtype=torch.uint8),
        "weights": [torch.ones(rows, 6, dtype=torch.int8), torch.ones(rows, 5, dtype=torch.int8)],
        "scales": [torch.ones(rows)] * 2,
        "biases": [torch.zeros(rows)] * 2,
        "kind": kind,
        "batch_first": False,
        "x_scale": 0.1,
        "x_zp": 3,
        "out_scale": 1 / 128,
        "out_zp": 128,
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": torch.zeros(4, 2, 6)}, "must be uint8"),
        ({"x": torch.zeros(4, 2, 7, dtype=torch.uint8)}, "weight 0 must be of shape"),
        ({"kind": "rnn"}, "takes an lstm or a gru"),
        ({"kind": "gru"}, "weight 0 must be of shape"),
        ({"biases": [torch.zeros(20)]}, "one scale and one bias"),
        ({"out_zp": 256}, "zero point must be in 0..255"),
        ({"x_scale": 0.0}, "scale must be positive"),
    ],
)
def test_operands_that_do_not_fit_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        torch.ops.x86quant.recurrent(**{**operands(), **changes})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("states", ["", "h"])
def test_a_simulation_runs_natively_with_the_bytes_of_plain_torch(kind: Any, states: str) -> None:
    torch.manual_seed(0)
    layer = (LSTMCellLayer if kind is nn.LSTM else GRUCellLayer)(FEATURES, UNITS).eval()
    weights = [
        Int8Weight(torch.randint(-127, 128, x.shape, dtype=torch.int8), torch.rand(len(x)) / 99, 0)
        for x in (layer.weight_ih_l0, layer.weight_hh_l0)
    ]
    biases = [layer.bias_ih_l0.detach(), layer.bias_hh_l0.detach()]
    plain = rounded_recurrent(layer, (weights, biases), (0.02, 120), (0.008, 128))
    native = CompiledModule(recurrent_graph(plain, [*states]))
    given = {"x": torch.randn(STEPS, BATCH, FEATURES)}
    given |= {name: torch.randn(1, BATCH, UNITS) for name in states}
    with torch.no_grad():
        for found, expected in zip(native(**given), plain(**given), strict=True):
            assert torch.equal(found, expected)
    assert native.segments
    assert not native.float_nodes
