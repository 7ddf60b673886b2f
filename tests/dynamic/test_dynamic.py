"""Linears on float tensors: the numerics at every ISA level, the modules, whole models."""

from __future__ import annotations

import concurrent.futures
import copy
import gc
import io
import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import x86quant
from tests import isa
from x86quant.dynamic import (
    DynamicLinear,
    DynamicMultiheadAttention,
    Int8Linear,
    WeightOnlyEmbedding,
    WeightOnlyLinear,
    to_dynamic,
)
from x86quant.dynamic.group_weights import quantize_weight
from x86quant.errors import InvalidInputError, UnsupportedError
from x86quant.kernels import dynamic_kernels
from x86quant.ops.dynamic import ACTIVATIONS
from x86quant.ops.dynamic import linear_dynamic as reference
from x86quant.packing import linear_dynamic as linear_packs

INF, NAN = float("inf"), float("nan")


def layer(
    in_features: int, out_features: int, activation: str | None = None, seed: int = 0
) -> DynamicLinear:
    """A linear of full-range weights."""
    make = torch.Generator().manual_seed(seed)
    weight = torch.randint(-128, 128, (out_features, in_features), generator=make)
    scale = torch.rand(out_features, generator=make) / 100
    bias = torch.randn(out_features, generator=make)
    return DynamicLinear(weight.to(torch.int8), scale, bias, activation)


def expected(linear: Int8Linear, x: torch.Tensor, activation: str | None = None) -> torch.Tensor:
    return reference(x, linear.int8_weight, linear.weight_scale, linear.bias, activation)


def check(linear: DynamicLinear, x: torch.Tensor) -> None:
    """Bit for bit without an activation; the stated error with one."""
    plain = expected(linear, x)
    got = linear(x)
    if linear.activation is None:
        assert torch.equal(got, plain)
        return
    error = (got - ACTIVATIONS[linear.activation](plain)).abs()
    assert bool((error <= 1e-6 * (1 + plain.abs())).all())


def weight_only_is_close(linear: Int8Linear, x: torch.Tensor) -> None:
    """``linear_weight_only`` of these weights is the linear of their real values."""
    operands = (linear.int8_weight, linear.weight_scale, linear.bias)
    got = torch.ops.x86quant.linear_weight_only(x, *operands, "gelu")
    weight = linear.int8_weight.double() * linear.weight_scale.double()[:, None]
    want = F.gelu(F.linear(x.double(), weight, linear.bias.double()))
    reach = F.linear(x.abs().double(), weight.abs())
    assert bool(((got - want).abs() <= 1e-6 * (1 + reach)).all())


# ------------------------------------------------------------------------- numerics


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(0, 70),
    sizes=st.tuples(st.integers(1, 200), st.integers(1, 100)),
    activation=st.sampled_from([None, *ACTIVATIONS]),
    seed=st.integers(0, 99),
)
def test_any_shape_equals_the_reference(
    rows: int, sizes: tuple[int, int], activation: str | None, seed: int
) -> None:
    torch.manual_seed(seed)
    check(layer(*sizes, activation, seed), torch.randn(rows, sizes[0]) * 3)


AT_A_LEVEL = """
import torch, x86quant
from tests.dynamic.test_dynamic import check, layer, saturating, weight_only_is_close

assert x86quant.cpu().isa == {level!r}
torch.manual_seed(0)
for inputs, outputs in ((1, 1), (3, 5), (64, 32), (100, 33), (257, 70), (768, 64)):
    for rows in (1, 2, 5, 16, 17, 33, 64):
        for activation in (None, "gelu"):
            linear = layer(inputs, outputs, activation)
            check(linear, torch.randn(rows, inputs) * 5)
            assert {{c.kernel for _, c in linear.choices}} == {{"native"}}
for linear, x in saturating():
    check(linear, x)
for inputs, outputs in ((1, 1), (3, 5), (64, 32), (100, 33), (257, 70)):
    for rows in (1, 2, 3, 4, 5, 16, 17):
        weight_only_is_close(layer(inputs, outputs, "gelu"), torch.randn(rows, inputs))
x = torch.randn(5, 100)
x[1, 3], x[2, 99], x[3] = float("nan"), float("-inf"), 0
y = layer(100, 33)(x)
assert y[1:3].isnan().all() and not y[[0, 3, 4]].isnan().any()
print("done")
"""


def saturating() -> list[tuple[DynamicLinear, torch.Tensor]]:
    """Products of the largest codes and weights, all of one sign: 16 bits cannot hold a pair."""
    found = []
    for weight in (127, -128):
        for rows in (1, 7, 40):
            codes = torch.full((37, 130), weight, dtype=torch.int8)
            x = torch.full((rows, 130), 2.0)
            found.append((DynamicLinear(codes, torch.full((37,), 0.01)), x))
    return found


@pytest.mark.parametrize("level", isa.LEVELS)
def test_every_isa_level_equals_the_reference(level: str) -> None:
    if not isa.has(level):
        pytest.skip(f"this CPU has no {level}")
    run = subprocess.run(
        [sys.executable, "-c", AT_A_LEVEL.format(level=level)],
        env=isa.environment(level),
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.stdout == "done\n", run.stderr


def test_saturating_sums_are_the_exact_ones() -> None:
    for linear, x in saturating():
        total = 255 * 130 * int(linear.int8_weight[0, 0])
        one = torch.tensor(float(total)) * (torch.tensor(2.0) / 255 * linear.weight_scale[0])
        assert torch.equal(linear(x), one.expand(len(x), 37))


def test_a_row_does_not_see_the_others() -> None:
    linear, x = layer(50, 20), torch.randn(6, 50) * torch.tensor([[1.0, 100, 1e-3, 1, 1e6, 7]]).T
    together = linear(x)
    assert torch.equal(together, torch.cat([linear(row) for row in x.split(1)]))


def test_a_row_without_a_finite_range_is_nan_and_alone() -> None:
    linear = layer(20, 6, "relu")
    x = torch.randn(6, 20)
    want = linear(x)
    for row, value in ((1, NAN), (3, INF), (4, -INF)):
        x[row, 7] = value
    got = linear(x)
    assert bool(got[[1, 3, 4]].isnan().all())
    assert torch.equal(got[[0, 2, 5]], want[[0, 2, 5]])
    assert torch.equal(got.isnan(), expected(linear, x, "relu").isnan())


@pytest.mark.parametrize("value", [0.0, -0.0, 1e-44, 1e-38, 3e38, -3e38])
def test_constant_rows(value: float) -> None:
    linear = layer(20, 6)
    check(linear, torch.full((2, 20), value))
    if abs(value) < 1e-37:
        assert torch.allclose(linear(torch.full((1, 20), value)), linear.bias)


def test_a_range_wider_than_float32_is_kept() -> None:
    x = torch.tensor([[3e38, -3e38, 0.0, 1e38]])
    linear = DynamicLinear(torch.eye(4, dtype=torch.int8), torch.full((4,), 1e-10))
    assert torch.allclose(linear(x), x * 1e-10, atol=1.3e26)
    check(linear, x)


def strided() -> dict[str, torch.Tensor]:
    base = torch.randn(12, 40)
    return {
        "every second row": base[::2, :20],
        "every second column": base[:, ::2],
        "transposed": torch.randn(20, 12).t(),
        "one row for all": base[:1, :20].expand(5, 20),
        "one value for all": torch.ones(1, 1).expand(4, 20),
        "rank 3": torch.randn(3, 4, 20).transpose(0, 1),
        "rank 4": torch.randn(2, 3, 2, 20),
        "a vector": base[0, :20],
        "not aligned": torch.randn(61)[1:].view(3, 20),
        "flipped": base[:, :20].flip(0),
    }


@pytest.mark.parametrize("name", strided())
def test_any_strides(name: str) -> None:
    x, linear = strided()[name], layer(20, 9)
    got = linear(x)
    assert got.is_contiguous()
    assert got.shape == (*x.shape[:-1], 9)
    assert torch.equal(got, expected(linear, x.contiguous()))


@pytest.mark.parametrize("shape", [(0, 20), (2, 0, 20), (0, 3, 20)])
def test_empty_batches(shape: tuple[int, ...]) -> None:
    assert layer(20, 9)(torch.zeros(shape)).shape == (*shape[:-1], 9)


@pytest.mark.parametrize("sizes", [(0, 3), (3, 0)])
def test_empty_weights_run_on_the_reference(sizes: tuple[int, int]) -> None:
    linear = layer(*sizes)
    assert [choice.kernel for _, choice in linear.choices] == ["reference"]
    got = linear(torch.zeros(2, sizes[0]))
    assert torch.equal(got, linear.bias.expand(2, -1))


def test_sums_beyond_int32_run_on_the_reference() -> None:
    linear = DynamicLinear(torch.full((1, 70_000), 127, dtype=torch.int8), torch.ones(1))
    assert linear.choices[-1][1].kernel == "reference"
    check(linear, torch.ones(2, 70_000))
    assert linear(torch.full((1, 70_000), 1.0)).item() == pytest.approx(70_000 * 127)


@pytest.mark.parametrize("kind", [DynamicLinear, WeightOnlyLinear])
@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.zeros(2, 19), "expected 20 input features"),
        (torch.tensor(1.0), "expected 20 input features"),
        (torch.zeros(2, 20, dtype=torch.float64), "must be float32"),
        (torch.zeros(2, 20, dtype=torch.uint8), "must be float32"),
    ],
)
def test_bad_input_is_refused(kind: type[Int8Linear], x: torch.Tensor, message: str) -> None:
    linear = kind.from_float(nn.Linear(20, 9))
    with pytest.raises(InvalidInputError, match=message):
        linear(x)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"int8_weight": torch.zeros(9, 20)}, "weight must be int8"),
        ({"int8_weight": torch.zeros(9, 20, 1, dtype=torch.int8)}, "of shape"),
        ({"weight_scale": torch.ones(8)}, r"weight_scale must be float32 of shape \(9,\)"),
        ({"weight_scale": torch.ones(9).half()}, "weight_scale must be float32"),
        ({"bias": torch.ones(1)}, "bias must be float32"),
        ({"activation": "elu"}, "unknown activation 'elu'"),
    ],
)
def test_bad_weights_are_refused(changes: dict[str, Any], message: str) -> None:
    good = {
        "int8_weight": torch.zeros(9, 20, dtype=torch.int8),
        "weight_scale": torch.ones(9),
        "bias": torch.zeros(9),
        "activation": None,
    }
    with pytest.raises(InvalidInputError, match=message):
        DynamicLinear(**{**good, **changes})(torch.zeros(2, 20))


def test_a_float_weight_that_is_not_finite_is_refused() -> None:
    linear = nn.Linear(4, 4)
    linear.weight.data[1, 2] = NAN
    with pytest.raises(InvalidInputError, match="NaN or infinity"):
        DynamicLinear.from_float(linear)


def test_layers_of_other_float_types_are_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"bfloat16, expected float32; call model.float"):
        DynamicLinear.from_float(nn.Linear(4, 4).bfloat16())


# ------------------------------------------------------------------------- the op


def test_the_op_runs_packed_and_sees_weights_change() -> None:
    linear, x = layer(30, 8), torch.randn(4, 30)
    weight = linear.int8_weight.clone()
    run = lambda: torch.ops.x86quant.linear_dynamic(x, weight, linear.weight_scale)  # noqa: E731
    first = run()
    assert torch.equal(first, reference(x, weight, linear.weight_scale))
    weight[3] += 1
    assert torch.equal(run(), reference(x, weight, linear.weight_scale))
    assert not torch.equal(run(), first)


def test_packs_of_freed_weights_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    # As in a process that has run nothing yet: others' packs would put the sweep off.
    monkeypatch.setattr(linear_packs, "_CACHE", {})
    monkeypatch.setattr(linear_packs, "_sweep_at", linear_packs._SWEEP_FROM)
    x = torch.randn(1, 16)
    for seed in range(200):
        linear = layer(16, 4, seed=seed)
        got = torch.ops.x86quant.linear_dynamic(
            x, linear.int8_weight, linear.weight_scale, linear.bias
        )
        assert torch.equal(got, expected(linear, x))
    gc.collect()
    assert len(linear_packs._CACHE) < 150


@pytest.mark.parametrize("kind", [DynamicLinear, WeightOnlyLinear])
def test_export_keeps_the_op(kind: type[Int8Linear]) -> None:
    model = nn.Sequential(kind.from_float(nn.Linear(6, 5), "gelu"), nn.Linear(5, 2))
    x = torch.randn(3, 6)
    batch = torch.export.Dim("batch")
    program = torch.export.export(model, (x,), dynamic_shapes=({0: batch},))
    targets = [str(node.target) for node in program.graph.nodes]
    assert f"x86quant.{kind.op}.default" in targets
    wide = torch.randn(11, 6)
    assert torch.equal(program.module()(wide), model(wide))


@pytest.mark.parametrize("kind", [DynamicLinear, WeightOnlyLinear])
def test_tracers_see_the_op(kind: type[Int8Linear]) -> None:
    model, x, other = kind.from_float(nn.Linear(6, 5)), torch.randn(3, 6), torch.randn(2, 6)
    traced = torch.jit.trace(model, x)
    assert f"x86quant::{kind.op}" in str(traced.inlined_graph)
    assert torch.equal(traced(other), model(other))
    graph = make_fx(model)(x)
    assert f"x86quant.{kind.op}" in graph.code
    assert torch.equal(torch.fx.symbolic_trace(model)(other), model(other))


def test_a_lazy_negation_is_seen() -> None:
    linear, x = layer(6, 5), torch.randn(3, 6)
    assert torch.equal(linear(torch._neg_view(x)), linear(-x))


# ------------------------------------------------------------------------- routing


def test_the_kernel_shows_in_repr_and_explain() -> None:
    model = nn.Sequential(layer(16, 8))
    assert "kernel=native" in repr(model)
    (choice,) = x86quant.explain(model)
    assert (choice.layer, choice.kernel, choice.op) == ("0", "native", "linear")


def narrow(linear: DynamicLinear) -> DynamicLinear:
    """The same with weights that cannot saturate any kernel's sums."""
    return DynamicLinear(
        linear.int8_weight // 2, linear.weight_scale, linear.bias, linear.activation
    )


@pytest.mark.parametrize("kernel", ["fbgemm", "onednn"])
def test_stock_kernels_take_one_row_and_agree_within_a_step(kernel: str) -> None:
    # Weights that they may run without VNNI too.
    linear, x = narrow(DynamicLinear.from_float(nn.Linear(64, 16), "relu")), torch.randn(1, 64)
    want = linear(x)
    with x86quant.override(kernel, op="linear", dynamic=True, rows="<= 1"):
        forced = copy.deepcopy(linear)
        assert [choice.kernel for _, choice in forced.choices] == [kernel, "native"]
        got = forced(x)
        assert torch.equal(forced(x.expand(3, 64)), want.expand(3, 16))
        assert bool(forced(torch.full((1, 64), INF)).isnan().all())
    step = (x.max() - x.min()).item() / 255
    largest = linear.weight_scale * linear.int8_weight.abs().sum(1)
    assert bool(((got - want).abs() <= step * largest).all())
    assert not torch.equal(got, want * 0)


def test_stock_kernels_refuse_more_rows() -> None:
    refused = "quantizes all rows by one range"
    with (
        x86quant.override("fbgemm", op="linear", dynamic=True),
        pytest.raises(UnsupportedError, match=refused),
    ):
        narrow(layer(8, 8))(torch.zeros(2, 8))


def test_every_kernel_is_built() -> None:
    for name in dynamic_kernels():
        pack = linear_packs.packed_for(
            layer(8, 3).int8_weight, torch.ones(3), None, "gelu", [-1], [name], "[]"
        )
        assert pack.run(torch.randn(1, 8)).shape == (1, 3)
    with pytest.raises(ValueError, match="no dynamic linear kernel"):
        linear_packs.packed_for(
            layer(8, 3).int8_weight, torch.ones(3), None, None, [-1], ["none"], "[]"
        )


def test_threads_share_the_work_and_several_may_call() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for inputs, outputs, rows in ((700, 900, 3), (300, 200, 300), (2000, 1100, 2)):
            linear, x = layer(inputs, outputs), torch.randn(rows, inputs)
            want = expected(linear, x)
            with concurrent.futures.ThreadPoolExecutor(3) as pool:
                results = list(pool.map(linear, [x] * 6))
            assert [torch.equal(result, want) for result in results] == [True] * 6
    finally:
        torch.set_num_threads(before)


# ------------------------------------------------------------------------- modules


@pytest.mark.parametrize("kind", [DynamicLinear, WeightOnlyLinear])
def test_from_float_is_close_and_state_survives(kind: type[Int8Linear]) -> None:
    torch.manual_seed(0)
    real, x = nn.Linear(64, 48), torch.randn(10, 64)
    linear = kind.from_float(real, "gelu")
    want = linear(x)
    noise = (want - F.gelu(real(x))).square().mean() / F.gelu(real(x)).square().mean()
    assert noise < 1e-3
    for other in (copy.deepcopy(linear), pickle.loads(pickle.dumps(linear))):
        assert torch.equal(other(x), want)
    file = io.BytesIO()
    torch.save(linear.state_dict(), file)
    file.seek(0)
    fresh = kind.from_float(nn.Linear(64, 48), "gelu")
    assert not torch.equal(fresh(x), want)
    fresh.load_state_dict(torch.load(file))
    assert torch.equal(fresh(x), want)


@pytest.mark.parametrize("name", ["int8_weight", "weight_scale", "bias"])
def test_a_changed_state_is_packed_again(name: str) -> None:
    linear, x = layer(16, 4), torch.randn(2, 16)
    before = linear(x)
    getattr(linear, name).mul_(2)
    assert not torch.equal(linear(x), before)
    assert torch.equal(linear(x), expected(linear, x))
    linear.activation = "relu"
    assert bool((linear(x) >= 0).all())


def test_weight_only_is_the_dequantized_linear() -> None:
    linear = WeightOnlyLinear.from_float(nn.Linear(40, 30))
    for x in (torch.randn(40), torch.randn(1, 40), torch.randn(40, 5).t(), torch.randn(7, 10, 40)):
        real = F.linear(x, linear.int8_weight * linear.weight_scale[:, None], linear.bias)
        assert torch.allclose(linear(x), real, atol=1e-5)


def test_quantized_weights_are_the_nearest() -> None:
    weight = torch.randn(5, 33)
    weight[2] = 0
    codes, scale = quantize_weight(weight)
    error = (codes * scale[:, None] - weight).abs()
    assert bool((error <= scale[:, None] * 0.5001).all())
    assert int(codes.abs().amax()) == 127


# ------------------------------------------------------------------------- attention

ATTENTION_CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"attn_mask": nn.Transformer.generate_square_subsequent_mask(7), "is_causal": True},
    "boolean mask": {"attn_mask": torch.ones(7, 7).triu(1).bool()},
    "a mask a head": {"attn_mask": torch.randn(12, 7, 7)},
    "padding": {"key_padding_mask": torch.arange(21).view(3, 7) % 7 > 4},
    "no weights": {"need_weights": False, "key_padding_mask": torch.arange(21).view(3, 7) % 7 > 4},
    "a weight a head": {"average_attn_weights": False},
}


@pytest.mark.parametrize("call", ATTENTION_CALLS)
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("cross", [True, False])
def test_attention_is_close_to_the_float_one(call: str, batch_first: bool, cross: bool) -> None:
    torch.manual_seed(0)
    real = nn.MultiheadAttention(32, 4, batch_first=batch_first).eval()
    ours = DynamicMultiheadAttention.from_float(real)
    x, y = torch.randn(3, 7, 32), torch.randn(3, 7, 32)
    if not batch_first:
        x, y = x.transpose(0, 1), y.transpose(0, 1)
    inputs = (x, y, y) if cross else (x, x, x)
    with torch.no_grad():
        want, want_weights = real(*inputs, **ATTENTION_CALLS[call])
        got, weights = ours(*inputs, **ATTENTION_CALLS[call])
    assert got.shape == want.shape
    assert (got - want).abs().max() < 0.02
    if want_weights is None:
        assert weights is None
    else:
        assert torch.allclose(weights, want_weights, atol=0.01)


def test_cross_attention_packs_once_and_sees_a_new_state() -> None:
    real = [nn.MultiheadAttention(32, 4).eval() for _ in "ab"]
    ours = [DynamicMultiheadAttention.from_float(attention) for attention in real]
    x, y = torch.randn(7, 2, 32), torch.randn(5, 2, 32)
    first = ours[0](x, y, y)[0]
    packs = [part.pack() for part in ours[0]._parts()]
    ours[0](x, y, y)
    assert [part.pack() for part in ours[0]._parts()] == packs
    for twin in (copy.deepcopy(ours[0]), pickle.loads(pickle.dumps(ours[0]))):
        assert torch.equal(twin(x, y, y)[0], first)
        assert twin._parts()[0].int8_weight.data_ptr() == twin.in_proj.int8_weight.data_ptr()
    ours[0].load_state_dict(ours[1].state_dict())
    assert torch.equal(ours[0](x, y, y)[0], ours[1](x, y, y)[0])


def test_unbatched_attention() -> None:
    real = nn.MultiheadAttention(32, 4).eval()
    x = torch.randn(7, 32)
    with torch.no_grad():
        want, got = real(x, x, x), DynamicMultiheadAttention.from_float(real)(x, x, x)
    assert (got[0] - want[0]).abs().max() < 0.02
    assert got[1].shape == want[1].shape


@pytest.mark.parametrize(
    ("settings", "why"),
    [({"kdim": 16}, "key or value size"), ({"add_bias_kv": True}, "appends to keys")],
)
def test_attention_that_cannot_be_quantized_stays(settings: dict[str, Any], why: str) -> None:
    real = nn.MultiheadAttention(32, 4, **settings).eval()
    with pytest.raises(InvalidInputError, match=why):
        DynamicMultiheadAttention.from_float(real)
    assert type(to_dynamic(nn.Sequential(real))[0]) is nn.MultiheadAttention


# ------------------------------------------------------------------------- whole models


def close(ours: nn.Module, real: nn.Module, *inputs: Any, **more: Any) -> None:
    with torch.no_grad():
        want, got = real(*inputs, **more), ours(*inputs, **more)
    keep = ~want.isnan()
    assert (got - want)[keep].abs().max() < 0.1
    assert (got - want)[keep].square().mean() < 1e-3 * want[keep].square().mean()


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_transformer_encoders_leave_their_float_fast_path(
    norm_first: bool, activation: str
) -> None:
    torch.manual_seed(0)
    block = nn.TransformerEncoderLayer(
        64, 4, 128, batch_first=True, norm_first=norm_first, activation=activation
    )
    real = nn.TransformerEncoder(block, 2, enable_nested_tensor=not norm_first).eval()
    ours = to_dynamic(real)
    kinds = {type(module) for module in ours.modules()}
    assert not kinds & {nn.Linear, nn.MultiheadAttention}
    x = torch.randn(3, 7, 64)
    padding = torch.zeros(3, 7, dtype=torch.bool)
    causal = nn.Transformer.generate_square_subsequent_mask(7)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nested tensors are a prototype, says torch
        close(ours, real, x)
        close(ours, real, x, src_key_padding_mask=padding)
        close(ours, real, x, mask=causal, is_causal=True)
        close(pickle.loads(pickle.dumps(ours)), real, x)


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
def test_a_whole_transformer() -> None:
    torch.manual_seed(0)
    real = nn.Transformer(64, 4, 1, 1, 128).eval()
    close(to_dynamic(real), real, torch.randn(5, 2, 64), torch.randn(6, 2, 64))


def test_the_model_itself_is_not_changed_unless_asked() -> None:
    real = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    ours = to_dynamic(real)
    assert type(real[0]) is nn.Linear
    assert type(ours[0]) is DynamicLinear
    assert to_dynamic(real, inplace=True) is real
    assert type(real[0]) is DynamicLinear
    assert type(to_dynamic(nn.Linear(3, 3))) is DynamicLinear


def test_what_stays_in_float() -> None:
    class Special(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + 1

    hooked = nn.Linear(4, 4)
    hooked.register_forward_hook(lambda *_: None)
    normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
    model = nn.Sequential(Special(4, 4), hooked, normed, nn.Linear(4, 4), nn.Linear(4, 4))
    ours = to_dynamic(model, keep=lambda name, module: name == "3")
    assert [isinstance(module, Int8Linear) for module in ours] == [False] * 4 + [True]


class SpelledOut(nn.Linear):
    """As some models have it, Falcon for one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x @ self.weight.T
        return y if self.bias is None else y + self.bias


@pytest.mark.parametrize("bias", [True, False])
def test_a_linear_that_is_spelled_out_is_one(bias: bool) -> None:
    real = nn.Sequential(SpelledOut(24, 16, bias=bias), nn.ReLU())
    ours = to_dynamic(real)
    assert isinstance(ours[0], Int8Linear)
    close(ours, real, torch.randn(5, 24))


@pytest.mark.parametrize(
    "own",
    [
        lambda self, x: F.linear(x, self.weight, self.bias) + x,
        lambda self, x: F.linear(x, self.weight, self.bias) * 1.0001,
        lambda self, x: F.linear(x.clamp(-9, 9), self.weight, self.bias),
        lambda self, x: F.linear(x, self.weight) + self.bias + self.bias,
        lambda self, x: F.linear(x, self.weight, self.bias) if x.max() < 99 else x,
        lambda self, x: F.linear(x, self.weight.mT, self.bias),
        lambda self, x, scale=None: F.linear(x, self.weight, self.bias),
    ],
)
def test_another_computation_stays_in_float(own: Any) -> None:
    kind = type("Own", (nn.Linear,), {"forward": own})
    ours = to_dynamic(nn.Sequential(kind(8, 8), nn.Linear(8, 8)))
    assert [isinstance(module, Int8Linear) for module in ours] == [False, True]


def test_a_shared_linear_stays_shared_and_unfused() -> None:
    linear = nn.Linear(4, 4)
    ours = to_dynamic(nn.Sequential(linear, nn.ReLU(), linear))
    assert ours[0] is ours[2]
    assert ours[0].activation is None


def test_embeddings_on_request() -> None:
    real = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 4))
    assert type(to_dynamic(real)[0]) is nn.Embedding
    ours = to_dynamic(real, embeddings=True)
    assert type(ours[0]) is WeightOnlyEmbedding
    close(ours, real, torch.randint(0, 50, (3, 7)))


# ------------------------------------------------------------------------- compiled models


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("per_channel", [True, False])
def test_stock_dynamic_models_lower(per_channel: bool) -> None:
    torch.manual_seed(0)
    real = nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 8), nn.GELU()).eval()
    ao = torch.ao.quantization
    qconfig = ao.per_channel_dynamic_qconfig if per_channel else ao.default_dynamic_qconfig
    stock = ao.quantize_dynamic(real, {nn.Linear: qconfig})
    x = torch.randn(6, 16)
    compiled = x86quant.compile(stock, (x,))
    calls = [n for n in compiled.graph_module.graph.nodes if n.op == "call_function"]
    assert [n.target for n in calls] == [torch.ops.x86quant.linear_dynamic.default] * 2
    assert [n.kwargs["activation"] for n in calls] == ["relu", "gelu"]
    close(compiled, real, x)


def test_our_modules_compile() -> None:
    model = to_dynamic(nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 8)))
    x = torch.randn(6, 16)
    compiled = x86quant.compile(model, (x,))
    assert torch.equal(compiled(x), model(x))
    assert not compiled.float_nodes


# ------------------------------------------------------------------------- what parents read


def test_a_linear_answers_as_the_float_one_did() -> None:
    real = nn.Linear(12, 7)
    real.note = "mine"  # type: ignore[assignment]
    ours = to_dynamic(real)
    weight = ours.weight
    assert (weight.dtype, weight.shape, weight.device) == (
        torch.float32,
        (7, 12),
        real.weight.device,
    )
    assert weight.is_floating_point()
    assert (ours.in_features, ours.out_features, ours.note) == (12, 7, "mine")
    assert torch.equal(torch.ones(2, 12, dtype=torch.float64).to(weight.dtype), torch.ones(2, 12))
    assert "weight" not in dict(ours.named_buffers())
    step = ours.weight_scale[:, None] * 0.5001
    for read in (weight, weight.data, weight.detach(), copy.deepcopy(weight), weight.t().t()):
        assert bool(((read - real.weight).abs() <= step).all())
    assert torch.tensor(weight.tolist()).equal(torch.from_numpy(weight.numpy()))


@pytest.mark.parametrize(
    "write",
    [
        lambda layer: layer.weight.zero_(),
        lambda layer: layer.weight.data.mul_(2),
        lambda layer: nn.init.ones_(layer.weight),
        lambda layer: layer.weight.__setitem__(0, 1.0),
        lambda layer: layer.weight.view(-1).chunk(2)[0].zero_(),
        lambda layer: setattr(layer.weight, "data", torch.zeros(7, 12)),
    ],
)
def test_a_write_to_a_weight_on_demand_is_refused(write: Callable[[nn.Module], Any]) -> None:
    with pytest.raises(InvalidInputError, match="cannot be written to"):
        write(to_dynamic(nn.Linear(12, 7)))


class Casting(nn.Module):
    """Casts its input to the dtype of a weight, as T5 and Whisper do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x.to(self.linear.weight.dtype))


@pytest.mark.parametrize("weight_only", [True, False])
def test_a_parent_that_casts_to_the_weights_dtype(weight_only: bool) -> None:
    torch.manual_seed(0)
    real, x = Casting().eval(), torch.randn(5, 12)
    ours = to_dynamic(real, weight_only=weight_only)
    close(ours, real, x)
    program = torch.export.export(ours, (x,), strict=False)
    assert torch.equal(program.module()(x), ours(x))
    op = "linear_weight_only" if weight_only else "linear_dynamic"
    assert f"x86quant.{op}" in program.graph_module.code
    assert torch.equal(torch.fx.symbolic_trace(ours)(x), ours(x))


class Reading(nn.Module):
    """Computes with the weights of its layers instead of calling them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.other = nn.Linear(12, 7), nn.Linear(12, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.linear.weight, self.linear.bias) + x @ self.other.weight.t()


def test_a_parent_that_reads_weights() -> None:
    torch.manual_seed(0)
    real, x = Reading().eval(), torch.randn(5, 12)
    ours = to_dynamic(real)
    close(ours, real, x)
    with torch.profiler.profile() as seen:
        ours(x)
    assert "x86quant::linear_dynamic" in {event.key for event in seen.key_averages()}


def test_a_float_attention_by_the_weights_of_ours() -> None:
    torch.manual_seed(0)
    real, x = nn.MultiheadAttention(32, 4).eval(), torch.randn(7, 2, 32)
    ours = to_dynamic(real)
    with torch.no_grad():
        got, _ = F.multi_head_attention_forward(
            x, x, x, ours.embed_dim, ours.num_heads, ours.in_proj_weight, ours.in_proj_bias,
            ours.bias_k, ours.bias_v, ours.add_zero_attn, 0.0, ours.out_proj.weight,
            ours.out_proj.bias, training=False,
        )  # fmt: skip
        want, _ = real(x, x, x)
    assert (got - want).abs().max() < 0.02
    assert (ours.kdim, ours.vdim, ours.head_dim) == (32, 32, 8)


def test_a_plain_subclass_of_linear_is_int8() -> None:
    class Named(nn.Linear):
        """Nothing but a name."""

    kinds = [Named(4, 4), nn.modules.linear.NonDynamicallyQuantizableLinear(4, 4)]
    assert [type(layer) for layer in to_dynamic(nn.Sequential(*kinds))] == [DynamicLinear] * 2


@pytest.mark.parametrize("weight_only", [True, False])
def test_the_linear_that_hugging_face_calls_conv1d(weight_only: bool) -> None:
    kind = type(
        "Conv1D",
        (nn.Module,),
        {
            "__module__": "transformers.pytorch_utils",
            "forward": lambda self, x: x @ self.weight + self.bias,
        },
    )
    torch.manual_seed(0)
    real = kind()
    real.nf, real.nx = 7, 12
    real.weight, real.bias = nn.Parameter(torch.randn(12, 7)), nn.Parameter(torch.randn(7))
    ours = to_dynamic(real, weight_only=weight_only)
    assert isinstance(ours, Int8Linear)
    assert (ours.nf, ours.nx, ours.weight.shape) == (7, 12, (12, 7))
    x = torch.randn(2, 5, 12)
    close(ours, real, x)
    with torch.no_grad():
        assert torch.allclose(torch.addmm(ours.bias, x[0], ours.weight), real(x[0]), atol=0.1)
