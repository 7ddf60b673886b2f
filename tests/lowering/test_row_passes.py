"""The passes that fuse transformers, on small graphs: equal results, and what must not fuse."""

from __future__ import annotations

import collections
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from tests.lowering.row_graphs import Block, Forward, lowered, windows
from x86quant.capture.exported import ops_from_export
from x86quant.dynamic import to_dynamic
from x86quant.forms.call_form import CallForm
from x86quant.lowering.graph_tools import is_op, op_name
from x86quant.lowering.lower import lower_rows


def rms(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6, dim: int = -1) -> torch.Tensor:
    return weight * (x * torch.rsqrt(x.pow(2).mean(dim, keepdim=True) + eps))


# --- row codes and products ---

SPELLINGS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu by tanh": lambda x: (
        0.5 * x * (1.0 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))
    ),
    "gelu by erf": lambda x: x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0))),
    "silu": lambda x: x / (1.0 / torch.sigmoid(x)),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_activations_that_are_spelled_out_end_a_product(spelling: str) -> None:
    activation = SPELLINGS[spelling]
    found = lowered(lambda m, x: m.down(activation(m.up(x))))
    assert found == {"quantize_rows": 1, "linear_rows_rows": 1, "linear_rows": 1}


@pytest.mark.parametrize(
    "function",
    [
        lambda x: 0.5 * x * (1.0 + torch.tanh(0.8 * (x + 0.044715 * torch.pow(x, 3.0)))),
        lambda x: x * torch.tanh(F.softplus(x)),
        lambda x: x * 0.5 * (1.0 + torch.erf(x / 1.5)),
    ],
    ids=["another factor", "mish", "another width"],
)
def test_what_is_like_an_activation_stays_what_it_is(function: Callable[..., Any]) -> None:
    found = lowered(lambda m, x: m.down(function(m.up(x))))
    assert "linear_rows_rows" not in found


def test_a_spelled_activation_whose_steps_others_read_stays() -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        y = m.up(x)
        inner = torch.erf(y / math.sqrt(2.0))
        result: torch.Tensor = m.down(0.5 * y * (1.0 + inner)) + inner.mean()
        return result

    assert "linear_rows_rows" not in lowered(forward)


def _reals_of_codes(x: torch.Tensor) -> torch.Tensor:
    codes = torch.ops.x86quant.quantize(x, 0.05, 100)
    real: torch.Tensor = torch.ops.x86quant.dequantize(codes, 0.05, 100)
    return real


@pytest.mark.parametrize(
    "function",
    [F.gelu, lambda x: F.gelu(x, approximate="tanh"), F.hardswish, lambda x: x.neg().exp()],
    ids=["gelu", "by tanh", "hard swish", "two functions"],
)
@pytest.mark.parametrize("moved", [False, True])
def test_a_function_of_the_reals_of_codes_is_a_table(function: Any, moved: bool) -> None:
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        real = _reals_of_codes(x)
        found: torch.Tensor = function(
            real.flatten(1).view(2, 32, 5).transpose(1, 2) if moved else real
        )
        return found + x

    assert lowered(forward) == {"quantize": 1, "lut_real": 1}


def test_reals_of_codes_that_others_read_stay() -> None:
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        real = _reals_of_codes(x)
        return F.gelu(real) + real

    assert lowered(forward) == {"quantize": 1, "dequantize": 1}


def test_readers_of_one_value_share_its_codes_and_are_one_product() -> None:
    assert lowered(lambda m, x: (m.q(x), m.k(x), m.up(x))) == {"quantize_rows": 1, "linear_rows": 1}


def test_products_with_an_activation_are_not_joined() -> None:
    def forward(m: Any, x: Any) -> Any:
        return F.gelu(m.q(x)), m.k(x)

    assert lowered(forward) == {"quantize_rows": 1, "linear_rows": 2}


def test_a_product_that_is_only_quantized_quantizes_itself() -> None:
    assert lowered(lambda m, x: m.down(F.gelu(m.up(x)))) == {
        "quantize_rows": 1, "linear_rows_rows": 1, "linear_rows": 1
    }  # fmt: skip


@pytest.mark.parametrize("activation", [F.gelu, F.silu, F.relu])
def test_activations_fuse(activation: Any) -> None:
    assert "linear_rows_rows" in lowered(lambda m, x: m.down(activation(m.up(x))))


def test_a_product_that_is_read_twice_is_kept() -> None:
    def forward(m: Any, x: Any) -> Any:
        y = m.up(x)
        return m.down(y), y[..., :32]

    assert lowered(forward) == {"quantize_rows": 2, "linear_rows": 2}


def test_an_activation_of_a_value_that_is_read_twice_is_kept_apart() -> None:
    def forward(m: Any, x: Any) -> Any:
        y = m.up(x)
        return m.down(F.gelu(y)), y

    assert lowered(forward) == {"quantize_rows": 2, "linear_rows": 2}


# --- gates ---


def test_gates_fuse() -> None:
    assert lowered(lambda m, x: m.down(F.silu(m.gate(x)) * m.up(x))) == {
        "quantize_rows": 1, "gated_rows_rows": 1, "linear_rows": 1
    }  # fmt: skip
    assert "gated_rows_rows" in lowered(lambda m, x: m.down(m.up(x) * F.gelu(m.gate(x))))


@pytest.mark.parametrize(
    "forward",
    [
        lambda m, x: m.down(m.gate(x) * m.up(x)),
        lambda m, x: m.down(F.silu(m.gate(x)) * F.silu(m.up(x))),
        lambda m, x: m.down(F.silu(m.gate(x)) * m.up(x + 1)),
        lambda m, x: m.down(F.silu(m.gate(x)) + m.up(x)),
        lambda m, x: m.down(F.silu(m.gate(x)) * m.up(x)[:, :1]),
        lambda m, x: F.silu(m.gate(x)) * m.up(x),
    ],
)
def test_other_products_of_products_are_no_gates(forward: Forward) -> None:
    assert "gated_rows_rows" not in lowered(forward)


# --- norms ---


def test_post_norm() -> None:
    def forward(m: Any, x: Any) -> Any:
        y = m.norm(x + m.q(x))
        return m.norm(m.k(y) + y)

    found = lowered(forward)
    assert found == {"quantize_rows": 1, "linear_rows_norm": 2}


def test_pre_norm_reads_the_sum_again() -> None:
    def forward(m: Any, x: Any) -> Any:
        total = x + m.q(m.norm(x))
        return total + m.k(m.norm(total))

    assert lowered(forward) == {"norm_rows": 1, "linear_rows_norm": 2}


def test_the_weight_of_a_norm_may_be_computed_behind_the_sum() -> None:
    def forward(m: Any, x: Any) -> Any:
        total = x + m.q(x)
        return m.k(rms(total, 1 + m.rms)), total

    assert lowered(forward) == {"quantize_rows": 1, "linear_rows_norm": 1, "linear_rows": 1}


def test_a_sum_that_is_read_before_its_norm() -> None:
    def forward(m: Any, x: Any) -> Any:
        total = x + m.q(x)
        early = total * 2
        return m.norm(total) + early

    assert lowered(forward) == {"quantize_rows": 1, "linear_rows_norm": 1}


def test_norms_without_a_residual_or_a_product() -> None:
    assert lowered(lambda m, x: m.norm(m.q(x))) == {"quantize_rows": 1, "linear_rows_norm": 1}
    assert lowered(lambda m, x: m.q(m.norm(x + x.flip(0)))) == {"norm_rows": 1, "linear_rows": 1}


@pytest.mark.parametrize("spelled", [True, False])
def test_rms_norms(spelled: bool) -> None:
    def forward(m: Any, x: Any) -> Any:
        total = x + m.q(x)
        return rms(total, m.rms) if spelled else F.rms_norm(total, (32,), m.rms)

    assert lowered(forward) == {"quantize_rows": 1, "linear_rows_norm": 1}


@pytest.mark.parametrize(
    "forward",
    [
        lambda m, x: m.q(rms(x, m.rms, dim=1)),
        lambda m, x: m.q(rms(x, m.rms, dim=(1, 2))),
        lambda m, x: m.q(m.rms * (x * torch.rsqrt(x.pow(3).mean(-1, keepdim=True).abs() + 1))),
        lambda m, x: m.q(m.rms * (x * torch.rsqrt((x + 1).pow(2).mean(-1, keepdim=True) + 1))),
        lambda m, x: m.q(rms(x, x.mean((0, 1)))),
        lambda m, x: m.q(F.layer_norm(x, (5, 32))),
        lambda m, x: m.q(F.layer_norm(x, (32,), x.mean((0, 1)), m.rms)),
        lambda m, x: m.q(F.layer_norm(x.double(), (32,)).float()),
    ],
)
def test_other_norms_stay(forward: Forward) -> None:
    assert "norm_rows" not in lowered(forward)


@pytest.mark.parametrize(
    "forward",
    [
        lambda m, x: m.norm(x[:, :1] + m.q(x)),
        lambda m, x: m.norm(torch.add(x, m.q(x), alpha=2)),
        lambda m, x: m.norm(F.gelu(m.q(x)) + x),
    ],
)
def test_other_sums_do_not_enter_a_norm(forward: Forward) -> None:
    found = lowered(forward)
    assert "linear_rows_norm" not in found
    assert found["norm_rows"] == 1


def test_padding_by_nothing_goes() -> None:
    def padded(m: Block, x: torch.Tensor, *by: int) -> torch.Tensor:
        return m.down(F.relu(m.up(F.pad(m.norm(x), by))))

    without = lowered(lambda m, x: padded(m, x, 0, 0, 0, 0))
    assert without["norm_rows"] == 1
    assert "quantize_rows" not in without
    assert lowered(lambda m, x: padded(m, x, 0, 0, 0, 1))["quantize_rows"] == 1


def test_dropout_stays_where_it_drops() -> None:
    def forward(m: Any, x: Any) -> Any:
        return m.norm(x + m.dropout(m.q(x)))

    assert "linear_rows_norm" in lowered(forward)
    assert "linear_rows_norm" not in lowered(forward, train=True)


# --- sums without a norm, and rows that are joined ---


def test_a_product_and_a_residual_are_one_op_without_a_norm() -> None:
    assert lowered(lambda m, x: torch.tanh(m.q(x) + x)) == {
        "quantize_rows": 1, "linear_rows_norm": 1
    }  # fmt: skip
    apart = {"quantize_rows": 1, "linear_rows": 1}
    assert lowered(lambda m, x: torch.tanh(F.relu(m.q(x)) + x)) == apart
    assert lowered(lambda m, x: torch.tanh(m.q(x) + x[:1])) == apart
    assert lowered(lambda m, x: torch.sub(x, m.q(x))) == apart


def test_rows_of_native_code_are_joined_for_native_code() -> None:
    def merged(m: Any, x: Any) -> Any:
        total = x + m.q(x)
        return m.down(torch.cat([total[:, 0::2], total[:, 1::2]], -1))

    x = torch.randn(2, 6, 32)
    assert lowered(merged, x) == {
        "quantize_rows": 2, "linear_rows_norm": 1, "join": 1, "linear_rows": 1
    }  # fmt: skip
    assert "join" not in lowered(lambda m, x: torch.cat([m.q(x), m.k(x)], -1))  # nobody goes on
    assert "join" not in lowered(lambda m, x: m.down(torch.cat([x, x.sin()], -1)))


def undone(x: torch.Tensor) -> torch.Tensor:
    return x.view(2, 2, 2, 3, 2, 32).permute(0, 1, 3, 2, 4, 5).reshape(2, 6, 4, 32)


PIXELS = torch.randn(2, 6, 4, 32)


MOVED = {"norm_rows": 1, "linear_rows": 1, "quantize_rows": 1, "linear_rows_norm": 1}


def test_windows_are_made_and_undone_as_codes() -> None:
    def forward(m: Any, x: Any) -> Any:
        return m.norm(x + undone(m.k(m.q(windows(m.norm(x))).sin())))

    assert lowered(forward, PIXELS) == MOVED


def test_rows_are_rolled_as_codes() -> None:
    def forward(m: Any, x: Any) -> Any:
        inner = m.q(windows(torch.roll(m.norm(x), (-1, -2), (1, 2)))).sin()
        return m.norm(x + torch.roll(undone(m.k(inner)), (1, 2), (1, 2)))

    assert lowered(forward, PIXELS) == MOVED


def test_sizes_of_a_move_may_be_computed_behind_the_product() -> None:
    def forward(m: Any, x: Any) -> Any:
        y = m.q(x)
        return y.reshape(y.shape[0] * 2, 3, 4, 32).sin()

    assert lowered(forward, PIXELS, free=True) == {"quantize_rows": 1, "linear_rows": 1}


@pytest.mark.parametrize(
    "move",
    [
        lambda x: x.permute(0, 3, 1, 2).reshape(2, 6, 4, 32),
        lambda x: torch.roll(x, 1, 3),
        lambda x: x.transpose(2, 3).reshape(2, 6, 4, 32),
        lambda x: x.reshape(2, 6, 8, 16).transpose(1, 2).reshape(2, 6, 4, 32),
    ],
)
def test_what_takes_rows_apart_moves_floats(move: Any) -> None:
    codes = {"quantize_rows": 1, "linear_rows": 1}
    assert lowered(lambda m, x: m.q(move(m.norm(x))), PIXELS) == {"norm_rows": 1, **codes}
    assert lowered(lambda m, x: m.norm(x + move(m.q(x))), PIXELS) == {"norm_rows": 1, **codes}


@pytest.mark.parametrize("move", [lambda x: x.permute(0, 2, 1), lambda x: x.transpose(-1, -2)])
def test_as_many_rows_as_features_are_not_mistaken_for_them(move: Any) -> None:
    x = torch.randn(2, 32, 32)
    assert "quantize_rows" in lowered(lambda m, x: m.q(move(m.norm(x))), x)
    assert "linear_rows_norm" not in lowered(lambda m, x: m.norm(x + move(m.q(x))), x)


def test_rows_that_are_read_before_they_are_moved_are_quantized_once() -> None:
    def forward(m: Any, x: Any) -> Any:
        y = m.norm(x)
        return m.q(y), m.k(y.transpose(1, 2)), y

    assert lowered(forward, PIXELS) == {"norm_rows": 1, "linear_rows": 2}


def test_products_of_the_same_codes_are_joined_rather_than_moved() -> None:
    def forward(m: Any, x: Any) -> Any:
        return m.q(x), m.k(x).transpose(1, 2).sin()

    assert lowered(forward, PIXELS) == {"quantize_rows": 1, "linear_rows": 1}


# --- gates of one product ---


@pytest.mark.parametrize("factor", [1.702, 1.0, 2])
def test_gates_by_a_sigmoid_are_silu(factor: float) -> None:
    def forward(m: Any, x: Any) -> Any:
        y = m.up(x)
        return m.down(y * torch.sigmoid(factor * y))

    fused = {"quantize_rows": 1, "linear_rows_rows": 1, "linear_rows": 1}
    assert lowered(forward) == fused
    apart = {"quantize_rows": 2, "linear_rows": 2}

    def read_twice(m: Any, x: Any) -> Any:
        y = m.gate(x)
        return m.down(torch.sigmoid(y * factor) * y) - y.sum()

    assert lowered(read_twice) == apart


def test_a_gate_that_others_read_is_divided_for_them() -> None:
    def forward(m: Any, x: Any) -> Any:
        y = m.gate(x)
        z = y * torch.sigmoid(1.702 * y)
        return m.down(z), z

    assert lowered(forward) == {"quantize_rows": 2, "linear_rows": 2}


def test_gates_that_fall_are_no_silu() -> None:
    def forward(m: Any, x: Any) -> Any:
        y = m.gate(x)
        return m.down(y * torch.sigmoid(-1.702 * y))

    assert lowered(forward) == {"quantize_rows": 2, "linear_rows": 2}


# --- shifted windows ---


def test_a_float_linear_by_the_weight_of_an_int8_layer_is_int8() -> None:
    def forward(m: Any, x: Any) -> Any:
        return F.linear(x, m.q.weight, m.q.bias), F.linear(x, m.up.weight)

    model, x = to_dynamic(Block(forward).eval()), torch.randn(2, 5, 32)
    form, leaves = CallForm.of(model, (x,), {})
    fused, _ = lower_rows(ops_from_export(model, form, leaves, free=False).graph_module)
    ops = collections.Counter(op_name(n) for n in fused.graph.nodes if is_op(n))
    assert ops == {"quantize_rows": 1, "linear_rows": 1}
    for got, want in zip(fused(x), model(x), strict=True):  # which multiplies in int8, too
        torch.testing.assert_close(got, want, rtol=0, atol=1e-5)


def test_a_float_linear_by_another_weight_stays() -> None:
    def forward(m: Any, x: Any) -> Any:
        return F.linear(x, 2 * m.q.weight), F.linear(x, m.k.int8_weight * m.q.bias[None, :])

    assert lowered(forward) == {}


def test_what_depends_on_sizes_alone_is_computed_once() -> None:
    def forward(m: Any, x: Any) -> Any:
        numbers = x.new_zeros((4, 4))
        numbers[:2, 1:] = 3
        return x @ m.q.bias.new_ones((32, 4)) + numbers.unsqueeze(1).sum(0) * x.new_full((4,), 2.0)

    model = Block(forward).eval()
    form, leaves = CallForm.of(model, (torch.randn(2, 5, 32),), {})
    exported = ops_from_export(model, form, leaves, free=True)
    fused, _ = lower_rows(exported.graph_module)
    called = [node for node in fused.graph.nodes if node.op == "call_function"]
    assert len(called) == 2  # a product and a sum
    x = torch.randn(3, 5, 32)
    torch.testing.assert_close(fused(x)[0], forward(model, x))


def test_what_depends_on_a_free_size_is_computed_on_each_run() -> None:
    def forward(m: Any, x: Any) -> Any:
        return m.q(x) + x.new_zeros((x.shape[1], 1)) + x.new_ones((x.shape[1], 1)).cumsum(0)

    model = to_dynamic(Block(forward).eval())
    form, leaves = CallForm.of(model, (torch.randn(2, 5, 32),), {})
    exported = ops_from_export(model, form, leaves, free=True)
    fused, _ = lower_rows(exported.graph_module)
    x = torch.randn(3, 9, 32)
    torch.testing.assert_close(fused(x)[0], model(x), rtol=0, atol=1e-5)
