"""The hook behind the stock engine: what it routes, what it leaves alone, how it restores."""

from __future__ import annotations

import threading

import pytest
import torch

import x86quant
from tests.stock_tensors import activation, engine, steps_apart, weight
from x86quant.stock.hook import saturation_policy

Q = torch.ops.quantized

CONV_PREPACKS = {
    "conv1d": lambda: Q.conv1d_prepack(weight(8, 8, 3), None, [1], [1], [1], 1),
    "conv2d": lambda: Q.conv2d_prepack(weight(8, 8, 3, 3), None, [1, 1], [1, 1], [1, 1], 1),
    "conv2d_legacy": lambda: Q.conv_prepack(weight(8, 8, 3, 3), None, [1, 1], [1, 1], [1, 1], 1),
    "conv3d": lambda: Q.conv3d_prepack(weight(8, 8, 3, 3, 3), None, [1] * 3, [1] * 3, [1] * 3, 1),
    "conv_transpose1d": lambda: Q.conv_transpose1d_prepack(
        tensor_weight(8, 8, 3), None, [1], [1], [0], [1], 1
    ),
    "conv_transpose2d": lambda: Q.conv_transpose2d_prepack(
        tensor_weight(8, 8, 3, 3), None, [1, 1], [1, 1], [0, 0], [1, 1], 1
    ),
    "conv_transpose3d": lambda: Q.conv_transpose3d_prepack(
        tensor_weight(8, 8, 3, 3, 3), None, [1] * 3, [1] * 3, [0] * 3, [1] * 3, 1
    ),
    "linear": lambda: Q.linear_prepack(weight(8, 8), None),
}


def tensor_weight(*shape):
    return torch.quantize_per_tensor(torch.randn(shape), 0.02, 0, torch.qint8)


def kind(op):
    return "linear" if op == "linear" else "conv3d" if "3d" in op else "conv2d"


def routed(op, pack):
    return x86quant.explain_pack(kind(op), pack)[0].routed


@pytest.mark.parametrize("op", CONV_PREPACKS)
def test_every_prepack_is_routed_under_x86_only(op):
    prepack = CONV_PREPACKS[op]
    with x86quant.enable():
        for name in torch.backends.quantized.supported_engines:
            if name == "none":
                continue
            with engine(name):
                try:
                    pack = prepack()
                except RuntimeError:
                    assert name == "qnnpack"  # which lacks some, with routing as without
                    continue
                assert routed(op, pack) == (name == "x86")
    with engine("x86"):
        assert not routed(op, prepack())


def test_enable_as_a_context_manager_restores_what_was():
    assert not x86quant.is_enabled()
    with x86quant.enable():
        with x86quant.enable(saturation="7bit"):
            assert x86quant.is_enabled()
            assert saturation_policy() == "7bit"
        assert x86quant.is_enabled()
        assert saturation_policy() == "exact"
        with x86quant.enable():  # whoever says nothing asks for what is always right
            assert saturation_policy() == "exact"
    assert not x86quant.is_enabled()


def test_enable_twice_then_disable_once_is_off():
    x86quant.enable()
    x86quant.enable()
    x86quant.disable()
    assert not x86quant.is_enabled()
    x86quant.disable()


def test_an_unknown_saturation_policy_is_refused():
    with pytest.raises(x86quant.InvalidInputError, match="'exact' or '7bit'"):
        x86quant.enable(saturation="fast")


def test_disable_restores_stock_results_bit_for_bit():
    x, w = activation(1, 8, 6, 6), weight(8, 8, 3, 3)

    def run():
        pack = Q.conv2d_prepack(w, None, [1, 1], [1, 1], [1, 1], 1)
        return Q.conv2d(x, pack, 0.5, 100).int_repr()

    with engine("x86"):
        before = run()
        with x86quant.enable():
            run()
        assert torch.equal(run(), before)
        with pytest.raises(NotImplementedError):
            Q.linear(torch.randn(2, 8), Q.linear_prepack(weight(8, 8), None), 0.5, 100)


def test_a_routed_pack_outlives_disable():
    x = activation(4, 16)
    with engine("x86"):
        with x86quant.enable():
            pack = Q.linear_prepack(weight(8, 16), torch.randn(8))
            expected = Q.linear(x, pack, 0.5, 100)
        assert torch.equal(Q.linear(x, pack, 0.5, 100).int_repr(), expected.int_repr())


@pytest.mark.parametrize("chosen", ["fbgemm", "onednn", "x86"])
def test_the_engine_stays_as_set_even_when_packing_fails(chosen):
    with engine(chosen), x86quant.enable():
        CONV_PREPACKS["conv2d"]()
        assert torch.backends.quantized.engine == chosen
        with pytest.raises((RuntimeError, ValueError)):
            Q.linear_prepack(tensor_weight(2, 3, 4), None)
        assert torch.backends.quantized.engine == chosen


def test_packing_and_running_from_many_threads():
    x, w = activation(4, 64), weight(32, 64)
    failures = []

    def work():
        for _ in range(20):
            pack = Q.linear_prepack(w, None)
            if not routed("linear", pack):
                failures.append("not routed")
            if steps_apart(Q.linear(x, pack, 0.5, 100), expected):
                failures.append("wrong")
            if steps_apart(Q.linear(x, shared, 0.5, 100), expected):
                failures.append("shared pack wrong")

    with engine("x86"), x86quant.enable():
        shared = Q.linear_prepack(w, None)
        expected = Q.linear(x, Q.linear_prepack(w, None), 0.5, 100)
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert torch.backends.quantized.engine == "x86"
    assert not failures


def test_bad_input_is_named_with_a_remedy():
    with engine("x86"), x86quant.enable():
        conv = CONV_PREPACKS["conv2d"]()
        linear = Q.linear_prepack(weight(8, 16), None)
        with pytest.raises(ValueError, match="must have 8 channels"):
            Q.conv2d(activation(1, 4, 6, 6), conv, 0.5, 100)
        with pytest.raises(ValueError, match="must have 4 dimensions"):
            Q.conv2d(activation(8, 6, 6), conv, 0.5, 100)
        with pytest.raises(ValueError, match="last dimension must be 16"):
            Q.linear(activation(4, 15), linear, 0.5, 100)
        with pytest.raises(ValueError, match="finite and positive"):
            Q.conv2d(activation(1, 8, 6, 6), conv, float("nan"), 100)
        with pytest.raises(ValueError, match="finite and positive"):
            Q.linear(activation(4, 16), linear, float("inf"), 100)
        with pytest.raises(x86quant.InvalidInputError, match=r"torch\.quantize_per_tensor"):
            Q.linear(torch.randn(4, 16), linear, 0.5, 100)
        with pytest.raises(TypeError, match=r"x\.float\(\)"):
            Q.linear_dynamic(torch.randn(4, 16, dtype=torch.float64), linear)


def test_bad_weights_are_named_with_a_remedy():
    with engine("x86"), x86quant.enable():
        unsigned = torch.quantize_per_tensor(torch.randn(8, 8), 0.1, 0, torch.quint8)
        with pytest.raises(x86quant.InvalidInputError, match=r"quint8, expected torch\.qint8"):
            Q.linear_prepack(unsigned, None)
        scales = torch.tensor([0.1, float("nan")], dtype=torch.double)
        broken = torch._make_per_channel_quantized_tensor(
            torch.ones(2, 8, dtype=torch.int8), scales, torch.zeros(2, dtype=torch.long), 0
        )
        with pytest.raises(x86quant.InvalidInputError, match="output channel 1 is nan"):
            Q.linear_prepack(broken, None)


def test_errors_name_the_layer_once_it_is_known():
    with engine("x86"), x86quant.enable():
        linear = torch.ao.nn.quantized.Linear(16, 8)
        model = x86quant.reroute(torch.nn.Sequential(linear))
        with pytest.raises(ValueError, match="layer 0 "):
            model(activation(4, 15))


def test_seven_bit_policy_clamps_what_calibration_did_not_see():
    x = torch._make_per_tensor_quantized_tensor(
        torch.full((1, 128, 6, 6), 255, dtype=torch.uint8), 0.05, 0
    )
    w = torch._make_per_channel_quantized_tensor(
        torch.full((128, 1, 3, 3), 127, dtype=torch.int8),
        torch.full((128,), 0.01, dtype=torch.double),
        torch.zeros(128, dtype=torch.long),
        0,
    )
    with (
        engine("x86"),
        x86quant.enable(saturation="7bit"),
        x86quant.override("fbgemm", op="conv2d", activation_max=127),
    ):
        pack = Q.conv2d_prepack(w, None, [1, 1], [1, 1], [1, 1], 128)
        assert x86quant.explain_pack("conv2d", pack)[0].kernel == "fbgemm"
        y = Q.conv2d(x, pack, 10.0, 0)
    clamped = torch.nn.functional.conv2d(
        torch.full((1, 128, 6, 6), 127 * 0.05), w.dequantize(), padding=1, groups=128
    )
    assert steps_apart(y, torch.quantize_per_tensor(clamped, 10.0, 0, torch.quint8)) <= 1


def test_scripted_prepack_is_routed():
    @torch.jit.script
    def prepack(w: torch.Tensor):
        return torch.ops.quantized.linear_prepack(w, None)

    with engine("x86"), x86quant.enable():
        assert routed("linear", prepack(weight(8, 8)))
