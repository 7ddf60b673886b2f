"""Linears on float tensors: the op, its packs and kernels, the modules."""

from __future__ import annotations

import concurrent.futures
import copy
import gc
import io
import pickle

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import x86quant
from tests.dynamic.int8_linears import INF, expected, layer
from x86quant.dynamic import (
    DynamicLinear,
    Int8Linear,
    WeightOnlyLinear,
)
from x86quant.dynamic.group_weights import quantize_weight
from x86quant.errors import UnsupportedError
from x86quant.kernels import dynamic_kernels
from x86quant.ops.dynamic import linear_dynamic as reference
from x86quant.packing import linear_dynamic as linear_packs

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
