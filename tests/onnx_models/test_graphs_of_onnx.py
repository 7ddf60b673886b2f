"""Graphs that are made: layers, sizes, names, branches; held against ONNX Runtime."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from onnx import TensorProto, helper
from torch import nn

from tests.onnx_models.small_models import (
    FLOAT,
    by_onnx_runtime,
    convolutional,
    held_against_onnx_runtime,
    model,
    node,
    noise,
)
from x86quant import UnsupportedError, from_onnx


def kinds(module: nn.Module) -> list[str]:
    return [type(one).__name__ for one in module.modules() if not list(one.children())]


def test_weights_become_layers_and_batches_stay_free() -> None:
    proto = convolutional()
    module = held_against_onnx_runtime(proto, x=noise(1, 3, 8, 8))
    assert kinds(module) == ["Conv2d", "Conv2d", "BatchNorm2d", "Linear"]
    assert isinstance(module.get_submodule("net.first"), nn.Conv2d)
    x = noise(5, 3, 8, 8)
    (right,) = by_onnx_runtime(proto, x=x)
    np.testing.assert_allclose(module(torch.from_numpy(x)).detach().numpy(), right, rtol=1e-4)


def test_constants_for_each_channel_go_into_the_layer() -> None:
    constants = {"w": noise(4, 3, 1, 1), "s": noise(4, 1, 1), "t": noise(1, 4, 1, 1)}
    nodes = [node("Conv", "x w", "a"), node("Mul", "a s", "b"), node("Add", "t b", "y")]
    proto = model(nodes, {"x": [1, 3, 4, 4]}, ["y"], constants)
    module = held_against_onnx_runtime(proto, x=noise(1, 3, 4, 4))
    assert not any(one.op == "call_function" and "mul" in one.name for one in module.graph.nodes)


def test_a_layer_whose_result_is_used_elsewhere_is_not_changed() -> None:
    constants = {"w": noise(4, 3, 1, 1), "s": noise(4, 1, 1)}
    nodes = [node("Conv", "x w", "a"), node("Mul", "a s", "b"), node("Add", "a b", "y")]
    proto = model(nodes, {"x": [1, 3, 4, 4]}, ["y"], constants)
    held_against_onnx_runtime(proto, x=noise(1, 3, 4, 4))
    held_against_onnx_runtime(
        model(nodes[:2], {"x": [1, 3, 4, 4]}, ["b", "a"], constants), x=noise(1, 3, 4, 4)
    )


def test_names_of_inputs_and_the_order_of_results() -> None:
    nodes = [node("Sub", "input.1 b:0", "first"), node("Neg", "first", "second")]
    proto = model(nodes, {"input.1": [3], "b:0": [3]}, ["second", "first"])
    module = from_onnx(proto)
    assert module.input_names == ("input.1", "b:0")
    assert module.output_names == ("second", "first")
    second, first = module(input_1=torch.ones(3), b_0=torch.zeros(3))
    assert first.tolist() == [1, 1, 1]
    assert second.tolist() == [-1, -1, -1]


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize("lengths", [False, True])
def test_recurrent_layers(kind: str, direction: str, lengths: bool) -> None:
    gates = {"LSTM": 4, "GRU": 3, "RNN": 1}[kind]
    d = 2 if direction == "bidirectional" else 1
    constants = {
        "w": noise(d, gates * 5, 3),
        "r": noise(d, gates * 5, 5),
        "b": noise(d, gates * 10),
        "h": noise(d, 2, 5),
        "c": noise(d, 2, 5),
    }
    if lengths:
        constants["n"] = np.array([4, 2], np.int32)
    attributes: dict[str, Any] = {"direction": direction, "hidden_size": 5}
    if kind == "GRU":
        attributes["linear_before_reset"] = 1
    names = ["x", "w", "r", "b", "n" if lengths else "", "h", *(["c"] if kind == "LSTM" else [])]
    outputs = ["y", "last", *(["cell"] if kind == "LSTM" else [])]
    made = helper.make_node(kind, names, outputs, **attributes)
    module = held_against_onnx_runtime(
        model([made], {"x": [4, 2, 3]}, outputs, constants), x=noise(4, 2, 3)
    )
    assert (kind in kinds(module)) == (not lengths)


def test_a_gru_that_resets_before_its_product() -> None:
    constants = {"w": noise(1, 15, 3), "r": noise(1, 15, 5), "b": noise(1, 30)}
    made = helper.make_node("GRU", ["x", "w", "r", "b"], ["y", "h"], hidden_size=5)
    held_against_onnx_runtime(
        model([made], {"x": [4, 2, 3]}, ["y", "h"], constants), x=noise(4, 2, 3)
    )


@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
@pytest.mark.parametrize(
    "place", ["half_pixel", "asymmetric", "align_corners", "pytorch_half_pixel"]
)
@pytest.mark.parametrize("how", ["up", "odd", "sizes"])
def test_resize(mode: str, place: str, how: str) -> None:
    scales = {"up": [1, 1, 2, 2], "odd": [1, 1, 1.7, 0.6]}.get(how)
    constants = (
        {"sizes": np.array([1, 2, 9, 4])}
        if scales is None
        else {"scales": np.array(scales, np.float32)}
    )
    inputs = ["x", "", "scales"] if scales else ["x", "", "", "sizes"]
    made = helper.make_node(
        "Resize", inputs, ["y"], mode=mode, coordinate_transformation_mode=place
    )
    sizes: list[Any] = ["n", 2, "h", "w"]
    held_against_onnx_runtime(model([made], {"x": sizes}, ["y"], constants), x=noise(1, 2, 5, 7))


def test_a_resize_of_which_onnx_and_its_runtime_differ_is_refused() -> None:
    made = helper.make_node(
        "Resize", ["x", "", "s"], ["y"], mode="linear", name="up",
        coordinate_transformation_mode="align_corners",
    )  # fmt: skip
    scales = {"s": np.array([1, 1, 1.7, 1.7], np.float32)}
    with pytest.raises(UnsupportedError, match=r"Resize .* node 'up'.* ONNX Runtime differ"):
        from_onnx(model([made], {"x": [1, 2, 5, 7]}, ["y"], scales))


@pytest.mark.parametrize("axis", [0, 1, 2, -1])
def test_softmax_of_old_versions_takes_all_that_follows(axis: int) -> None:
    proto = model([node("Softmax", "x", "y", axis=axis)], {"x": [2, 3, 4]}, ["y"], opset=11)
    held_against_onnx_runtime(proto, x=noise(2, 3, 4))


def test_old_versions_with_attributes() -> None:
    nodes = [
        node("Unsqueeze", "x", "a", axes=[0, 2]),
        node("Slice", "a", "b", axes=[1, 3], starts=[0, -3], ends=[1, 100]),
        node("Squeeze", "b", "c", axes=[0]),
        node("ReduceSum", "c", "d", axes=[1], keepdims=0),
        node("Clip", "d", "e", min=-1.0, max=0.5),
        node("Split", "e", "f g", axis=1, split=[1, 2]),
        node("Pad", "g", "h", pads=[0, 1, 0, 0], value=3.0),
        node("TopK", "h", "v i", axis=1, k=2),
        node("Upsample", "a scales", "u", mode="nearest"),
    ]
    constants = {"scales": np.array([1, 1, 2, 3], np.float32)}
    proto = model(nodes, {"x": [2, 4]}, ["f", "v", "i", "u"], constants, opset=9)
    held_against_onnx_runtime(proto, x=noise(2, 4))


@pytest.mark.parametrize("ceil", [0, 1])
@pytest.mark.parametrize("pads", [[0, 0, 0, 0], [1, 1, 1, 1], [0, 0, 1, 2]])
@pytest.mark.parametrize("op", ["MaxPool", "AveragePool"])
def test_pooling(op: str, pads: list[int], ceil: int) -> None:
    made = node(op, "x", "y", kernel_shape=[3, 3], strides=[2, 2], pads=pads, ceil_mode=ceil)
    held_against_onnx_runtime(
        model([made], {"x": [1, 2, 8, 7]}, ["y"], opset=19), x=noise(1, 2, 8, 7)
    )


@pytest.mark.parametrize(
    "attributes",
    [
        {"pads": [1, 1, 1, 1], "strides": [2, 2], "output_padding": [1, 1]},
        {"pads": [0, 1, 1, 0], "strides": [2, 2]},
        {"output_shape": [9, 10], "strides": [2, 2]},
        {"auto_pad": "SAME_UPPER", "strides": [2, 2]},
        {"auto_pad": "SAME_LOWER", "strides": [2, 2]},
        {"group": 2},
    ],
)
def test_transposed_convolutions(attributes: dict[str, Any]) -> None:
    weight = {"w": noise(4, 3, 3, 3), "b": noise(3 * attributes.get("group", 1))}
    proto = model(
        [node("ConvTranspose", "x w b", "y", **attributes)], {"x": [1, 4, 5, 5]}, ["y"], weight
    )
    held_against_onnx_runtime(proto, x=noise(1, 4, 5, 5))


def branches(condition: str) -> list[Any]:
    info = helper.make_tensor_value_info
    up = helper.make_graph([node("Add", "x w", "r")], "up", [], [info("r", FLOAT, [4])])
    down = helper.make_graph([node("Sub", "x w", "r2")], "down", [], [info("r2", FLOAT, [4])])
    return [helper.make_node("If", [condition], ["y"], then_branch=up, else_branch=down, name="if")]


@pytest.mark.parametrize("taken", [True, False])
def test_branches(taken: bool) -> None:
    inputs: dict[str, Any] = {"x": [4], "c": (TensorProto.BOOL, [])}
    proto = model(branches("c"), inputs, ["y"], {"w": noise(4)})
    held_against_onnx_runtime(proto, x=noise(4), c=np.array(taken))
    known = model(branches("c"), {"x": [4]}, ["y"], {"w": noise(4), "c": np.array(taken)})
    module = held_against_onnx_runtime(known, x=noise(4))
    assert not list(module.children())


def quantized(kind: str = "u") -> Any:
    """A convolution with rounded weights between rounded activations."""
    zero = np.uint8(128) if kind == "u" else np.int8(0)
    constants = {
        "sx": np.float32(0.02).reshape(()),
        "z": np.array(zero),
        "w": RANDOM_CODES,
        "sw": np.abs(noise(4)) * 0.01 + 0.01,
        "zw": np.zeros(4, np.int8),
        "sy": np.float32(0.05).reshape(()),
    }
    nodes = [
        node("QuantizeLinear", "x sx z", "qx"),
        node("DequantizeLinear", "qx sx z", "dx"),
        node("DequantizeLinear", "w sw zw", "dw", axis=0),
        node("Conv", "dx dw", "c"),
        node("QuantizeLinear", "c sy z", "qc"),
        node("DequantizeLinear", "qc sy z", "y"),
    ]
    return model(nodes, {"x": ["n", 3, 6, 6]}, ["y"], constants)


RANDOM_CODES = np.random.default_rng(1).integers(-127, 128, (4, 3, 3, 3)).astype(np.int8)


@pytest.mark.parametrize("kind", ["u", "s"])
def test_quantized_models_round_as_the_file_says(kind: str) -> None:
    x = noise(2, 3, 6, 6)
    proto = quantized(kind)
    (right,) = by_onnx_runtime(proto, x=x)
    module = from_onnx(proto)
    found = module(torch.from_numpy(x)).detach().numpy()
    assert np.abs(found - right).max() <= 0.0501  # one step, where a sum lies between two
    assert (np.abs(found - right) < 1e-6).mean() > 0.99
    assert "Conv2d" in kinds(module)


def test_rounding_is_left_out_where_it_is_not_kept() -> None:
    x = torch.from_numpy(noise(2, 3, 6, 6))
    module = from_onnx(quantized(), keep_rounding=False)
    (conv,) = (one for one in module.modules() if isinstance(one, nn.Conv2d))
    assert torch.equal(module(x), conv(x))


def test_training_is_refused() -> None:
    constants = {"r": np.float32(0.5).reshape(()), "t": np.array(True)}
    with pytest.raises(UnsupportedError, match=r"Dropout .* at random"):
        from_onnx(model([node("Dropout", "x r t", "y")], {"x": [4]}, ["y"], constants))
