"""Every trap of the stock engine: shown on the stock engine, then shown to be gone."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch.ao.nn.quantized import dynamic as nnqd

import x86quant
from tests.stock_tensors import (
    activation,
    engine,
    exact_conv,
    exact_linear,
    exact_linear_float,
    run_python,
    steps_apart,
    weight,
)

Q = torch.ops.quantized


@pytest.fixture
def routed():
    with engine("x86"), x86quant.enable():
        yield


def stock_kernel(pack, kind):
    """The class of a stock pack."""
    record = x86quant.explain_pack(kind, pack)
    assert not record[0].routed
    return record[0].kernel


def conv_pack(w, bias=None, padding=0, dilation=1, groups=1):
    return Q.conv2d_prepack(w, bias, [1, 1], [padding] * 2, [dilation] * 2, groups)


needs_vnni = pytest.mark.skipif(
    "avx512_vnni" not in x86quant.cpu().features,
    reason="the stock engine only uses oneDNN where there is AVX512-VNNI",
)

SLOW_ON_FBGEMM = {
    "depthwise 3x3 dilated": ((128, 1, 3, 3), {"padding": 2, "dilation": 2, "groups": 128}),
    "132 groups": ((132, 1, 3, 3), {"padding": 1, "groups": 132}),
    "depthwise 9x9": ((128, 1, 9, 9), {"padding": 4, "groups": 128}),
    "depth multiplier 2": ((256, 1, 3, 3), {"padding": 1, "groups": 128}),
}


@needs_vnni
@pytest.mark.parametrize("shape", SLOW_ON_FBGEMM.values(), ids=SLOW_ON_FBGEMM)
def test_many_groups_off_fbgemms_fast_path_go_elsewhere(shape):
    size, geometry = shape
    with engine("x86"):
        assert stock_kernel(conv_pack(weight(*size), **geometry), "conv2d") == "fbgemm"
        with x86quant.enable():
            pack = conv_pack(weight(*size), **geometry)
    assert x86quant.explain_pack("conv2d", pack)[-1].kernel in ("native", "onednn")


@needs_vnni
def test_conv1d_with_many_groups_goes_elsewhere(routed):
    pack = Q.conv1d_prepack(weight(256, 1, 31), None, [1], [15], [1], 256)
    assert x86quant.explain_pack("conv2d", pack)[-1].kernel in ("native", "onednn")


@pytest.mark.skipif(not x86quant.cpu().amx, reason="with AMX only is oneDNN slow there")
def test_few_channels_a_group_leave_onednn():
    w = weight(128, 4, 3, 3, largest=40)
    with engine("x86"):
        assert stock_kernel(conv_pack(w, padding=1, groups=32), "conv2d") == "onednn"
        with x86quant.enable():
            pack = conv_pack(w, padding=1, groups=32)
    assert x86quant.explain_pack("conv2d", pack)[-1].kernel in ("native", "fbgemm")


def test_depthwise_does_not_saturate_at_16_bits():
    x, w = activation(1, 128, 12, 12, zero_point=0), weight(128, 1, 3, 3, largest=127)
    x = torch._make_per_tensor_quantized_tensor(torch.full_like(x.int_repr(), 255), 0.05, 0)
    w = torch._make_per_channel_quantized_tensor(
        torch.full_like(w.int_repr(), 127),
        w.q_per_channel_scales(),
        w.q_per_channel_zero_points(),
        0,
    )
    exact = exact_conv(x, w, None, [1, 1], [1, 1], [1, 1], 128, 1.0, 0)
    with engine("x86"):
        stock = Q.conv2d(x, conv_pack(w, padding=1, groups=128), 1.0, 0)
        with x86quant.enable():
            routed = Q.conv2d(x, conv_pack(w, padding=1, groups=128), 1.0, 0)
    assert steps_apart(stock, exact) > 10
    assert steps_apart(routed, exact) <= 1


@needs_vnni
def test_linear_then_linear_relu_on_one_pack_keeps_the_relu():
    x, w = activation(8, 64), weight(32, 64)
    with engine("onednn"):
        pack = Q.linear_prepack(w, None)
        Q.linear(x, pack, 0.5, 100)
        stock = Q.linear_relu(x, pack, 0.5, 100)
    with engine("x86"), x86quant.enable(), x86quant.override("onednn", op="linear"):
        pack = Q.linear_prepack(w, None)
        Q.linear(x, pack, 0.5, 100)
        routed = Q.linear_relu(x, pack, 0.5, 100)
    assert stock.int_repr().min() < 100  # the stock engine dropped the ReLU
    exact = exact_linear(x, w, None, 0.5, 100).int_repr().clamp(min=100)
    assert (routed.int_repr().int() - exact.int()).abs().max() <= 1


STATIC_THEN_DYNAMIC = """
import torch
import x86quant
from tests.stock_tensors import activation, engine, weight
with engine({engine!r}):
    {routing}
    pack = torch.ops.quantized.linear_prepack(weight(32, 64), None)
    torch.ops.quantized.linear(activation(8, 64), pack, 0.5, 100)
    torch.ops.quantized.linear_dynamic(torch.randn(8, 64), pack)
print("survived")
"""


@needs_vnni
def test_linear_then_linear_dynamic_on_one_pack_does_not_crash():
    stock = run_python(STATIC_THEN_DYNAMIC.format(engine="onednn", routing="pass"))
    assert "survived" not in stock.stdout
    routed = run_python(
        STATIC_THEN_DYNAMIC.format(
            engine="x86",
            routing="x86quant.enable(); x86quant.override('onednn', op='linear')",
        )
    )
    assert "survived" in routed.stdout, routed.stderr


ADD_RELU_ON_FBGEMM_PACK = """
import torch
import x86quant
from tests.stock_tensors import activation, engine, weight
with engine("fbgemm"):
    pack = torch.ops.quantized.conv2d_prepack(weight(8, 8, 1, 1), None, [1, 1], [0, 0], [1, 1], 1)
{routing}
x = activation(1, 8, 4, 4)
with engine("onednn"):
    torch.ops.quantized.conv2d_add_relu(x, x, pack, 0.5, 100)
print("survived")
"""


def test_conv_add_relu_on_a_fbgemm_pack_is_an_error_not_a_crash():
    stock = run_python(ADD_RELU_ON_FBGEMM_PACK.format(routing=""))
    # Killed by a signal, unless a sanitizer is there to catch it.
    assert stock.returncode < 0 or "AddressSanitizer: SEGV" in stock.stderr
    routed = run_python(ADD_RELU_ON_FBGEMM_PACK.format(routing="x86quant.enable()"))
    assert routed.returncode == 1
    assert "x86quant.reroute(model)" in routed.stderr


def test_fused_add_and_activations_work_under_x86():
    x, w = activation(2, 8, 6, 6), weight(8, 8, 3, 3)
    lx, lw = activation(4, 16), weight(8, 16)
    with engine("x86"):
        with pytest.raises(RuntimeError):
            Q.conv2d_add_relu(x, x, conv_pack(w, padding=1), 0.5, 100)
        with pytest.raises(RuntimeError):
            Q.linear_leaky_relu(lx, Q.linear_prepack(lw, None), 0.5, 100, 0.1)
        with x86quant.enable():
            added = Q.conv2d_add_relu(x, x, conv_pack(w, padding=1), 0.5, 100)
            leaky = Q.linear_leaky_relu(lx, Q.linear_prepack(lw, None), 0.5, 100, 0.1)
            tanh = Q.linear_tanh(lx, Q.linear_prepack(lw, None), 0.01, 128)
    wf = w.dequantize()
    real = torch.nn.functional.conv2d(x.dequantize(), wf, padding=1) + x.dequantize()
    assert steps_apart(added, torch.quantize_per_tensor(real.relu(), 0.5, 100, torch.quint8)) <= 1
    line = exact_linear_float(lx, lw, None)
    expected = torch.quantize_per_tensor(
        torch.nn.functional.leaky_relu(line, 0.1), 0.5, 100, torch.quint8
    )
    assert steps_apart(leaky, expected) <= 1
    expected = torch.quantize_per_tensor(line.tanh(), 0.01, 128, torch.quint8)
    assert steps_apart(tanh, expected) <= 1


def test_weight_zero_points_are_never_ignored():
    x, w = activation(2, 8, 6, 6), weight(8, 8, 3, 3, largest=60, zero_point=20)
    exact = exact_conv(x, w, None, [1, 1], [1, 1], [1, 1], 1, 1.0, 100)
    with engine("onednn"):
        try:
            stock = Q.conv2d(x, conv_pack(w, padding=1), 1.0, 100)
        except RuntimeError:
            stock = None
    assert stock is None or steps_apart(stock, exact) > 1
    with engine("x86"), x86quant.enable():
        routed = Q.conv2d(x, conv_pack(w, padding=1), 1.0, 100)
    assert steps_apart(routed, exact) <= 1


def sqnr(reference, value):
    return 10 * torch.log10(reference.pow(2).mean() / (reference - value).pow(2).mean()).item()


def test_dynamic_linear_uses_all_8_bits():
    torch.manual_seed(0)
    linear, x = torch.nn.Linear(256, 256), torch.randn(64, 256)
    exact = linear(x)

    def quantized():
        model = torch.nn.Sequential(copy.deepcopy(linear))
        return torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear})(x)

    with engine("x86"), torch.no_grad():
        stock = sqnr(exact, quantized())
        with x86quant.enable():
            routed = sqnr(exact, quantized())
    assert routed > stock + 2


def small_model():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 128, 3, padding=1),
        torch.nn.Conv2d(128, 128, 3, padding=2, dilation=2, groups=128),
        torch.nn.AdaptiveAvgPool2d(1),
        torch.nn.Flatten(),
        torch.nn.Linear(128, 10),
    ).eval()


def converted():
    from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx

    x = torch.randn(2, 3, 16, 16)
    prepared = prepare_fx(small_model(), x86quant.get_default_qconfig_mapping(), (x,))
    prepared(x)
    return convert_fx(prepared)


def choices(model):
    return [(c.layer, c.kernel, c.rule) for c in x86quant.explain(model)]


def test_choices_survive_deepcopy_save_jit_and_state_dict(routed):
    model, x = converted(), torch.randn(2, 3, 16, 16)
    before, expected = choices(model), model(x)
    assert all(rule for _, _, rule in before)

    copied = copy.deepcopy(model)
    assert not all(rule for _, _, rule in choices(copied))  # lost in C++
    assert choices(x86quant.reroute(copied)) == before

    file = io.BytesIO()
    torch.jit.save(torch.jit.script(model), file)
    file.seek(0)
    scripted = x86quant.reroute(torch.jit.load(file))
    assert sorted(k for _, k, _ in choices(scripted)) == sorted(k for _, k, _ in before)
    assert torch.allclose(scripted(x), expected, atol=0.1)

    other = converted()
    other.load_state_dict(model.state_dict())
    assert choices(other) == before
    assert torch.equal(other(x), expected)


def test_choices_survive_torch_save_of_a_whole_module(routed):
    model = torch.nn.Sequential(torch.nn.Linear(32, 16), torch.nn.LSTM(16, 24))
    model = torch.ao.quantization.quantize_dynamic(model)
    before = choices(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert not all(rule for _, _, rule in choices(loaded))
    assert choices(x86quant.reroute(loaded)) == before
    x = torch.randn(5, 1, 32)
    assert torch.allclose(loaded(x)[0], model(x)[0], atol=1e-5)


def test_dynamic_rnn_is_routed_and_rerouted(routed):
    torch.manual_seed(0)
    model = torch.ao.quantization.quantize_dynamic(
        torch.nn.ModuleDict({"rnn": torch.nn.LSTM(32, 48, num_layers=2)}), {torch.nn.LSTM}
    )
    before = choices(model)
    assert len(before) >= 4
    assert all(rule for _, _, rule in before)
    x = torch.randn(5, 1, 32)
    expected, _ = model["rnn"](x)
    rerouted = x86quant.reroute(copy.deepcopy(model))
    assert choices(rerouted) == before
    assert torch.allclose(rerouted["rnn"](x)[0], expected, atol=1e-6)


@pytest.mark.parametrize("cell", [nnqd.LSTMCell, nnqd.GRUCell])
def test_rnn_cells_are_routed(routed, cell):
    model = torch.nn.Sequential(cell(16, 24))
    assert len({layer for layer, _, _ in choices(model)}) == 2
    assert all(rule for _, _, rule in choices(model))
    before = choices(model)
    assert choices(x86quant.reroute(model)) == before


class Functional(torch.nn.Module):
    """Layers without modules: their packs become attributes of the converted graph."""

    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Parameter(torch.randn(8, 3, 3, 3))
        self.fc = torch.nn.Parameter(torch.randn(10, 8))

    def forward(self, x):
        x = torch.nn.functional.conv2d(x, self.conv, None, [1, 1], [1, 1], [1, 1], 1)
        return torch.nn.functional.linear(x.mean([2, 3]), self.fc)


def test_functional_layers_are_explained_and_rerouted(routed):
    from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx

    x = torch.randn(2, 3, 8, 8)
    prepared = prepare_fx(Functional().eval(), x86quant.get_default_qconfig_mapping(), (x,))
    prepared(x)
    model = convert_fx(prepared)
    before = choices(model)
    assert {c.op for c in x86quant.explain(model)} == {"conv2d", "linear"}
    assert all(rule for _, _, rule in before)
    expected = model(x)
    with x86quant.use_rules("pytorch-2.0"):
        x86quant.reroute(model)
        # Where its kernel would saturate, the choice falls back to an exact one.
        rules = [rule for _, _, rule in choices(model)]
        assert all(rule.startswith("pytorch-2.0#") or rule == "fallback" for rule in rules)
    assert choices(x86quant.reroute(model)) == before
    assert torch.allclose(model(x), expected, atol=0.2)


def test_explain_of_a_float_model_says_so():
    assert "no packed int8 layers" in str(x86quant.explain(torch.nn.Linear(2, 2)))


def test_explanations_are_data_and_json(routed):
    import json

    found = x86quant.explain(converted())
    rows = json.loads(found.to_json())
    assert [row["layer"] for row in rows] == [c.layer for c in found]
    assert all(row["steps"] and row["reason"] for row in rows)
    assert found[0].layer in str(found)
