"""Small ONNX models, and what ONNX Runtime says of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper

from x86quant.onnx_models import from_onnx

RANDOM = np.random.default_rng(0)
FLOAT = TensorProto.FLOAT


def noise(*sizes: int) -> np.ndarray:
    return RANDOM.standard_normal(sizes).astype(np.float32)


def model(
    nodes: Sequence[onnx.NodeProto],
    inputs: dict[str, Any],
    outputs: Sequence[str],
    constants: dict[str, np.ndarray] | None = None,
    opset: int = 17,
) -> onnx.ModelProto:
    """A model of ``nodes``; inputs are of floats by their sizes, or declared as given."""
    declared = [
        helper.make_tensor_value_info(name, FLOAT, sizes)
        if isinstance(sizes, list)
        else helper.make_tensor_value_info(name, *sizes)
        for name, sizes in inputs.items()
    ]
    graph = helper.make_graph(
        nodes,
        "small",
        declared,
        [onnx.ValueInfoProto(name=name) for name in outputs],
        [numpy_helper.from_array(value, name) for name, value in (constants or {}).items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9)


def node(op: str, inputs: str, outputs: str, **attributes: Any) -> onnx.NodeProto:
    """A node, by names with spaces between."""
    return helper.make_node(op, inputs.split(" "), outputs.split(" "), **attributes)


def by_onnx_runtime(proto: onnx.ModelProto, **feed: np.ndarray) -> list[np.ndarray]:
    import onnxruntime

    options = onnxruntime.SessionOptions()  # fused, products saturate on CPUs without VNNI
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(proto.SerializeToString(), options)
    return session.run(None, feed)


def held_against_onnx_runtime(
    proto: onnx.ModelProto, tolerance: float = 1e-5, **feed: np.ndarray
) -> torch.fx.GraphModule:
    """The module of ``proto``, whose results on ``feed`` are those of ONNX Runtime."""
    right = by_onnx_runtime(proto, **feed)
    module: Any = from_onnx(proto)
    with torch.no_grad():
        found = module(*(torch.from_numpy(np.array(value)) for value in feed.values()))
    found = found if isinstance(found, tuple) else (found,)
    for mine, wanted in zip(found, right, strict=True):
        assert mine.shape == wanted.shape
        np.testing.assert_allclose(mine.numpy(), wanted, rtol=tolerance, atol=tolerance)
    return module


def convolutional(batch: Any = "n") -> onnx.ModelProto:
    """A convolution, its norm, an activation, a pool and a product, with a Reshape by sizes."""
    return model(
        [
            node("Conv", "x net.first.weight", "a", pads=[1, 1, 1, 1]),
            node("BatchNormalization", "a s b m v", "b0"),
            node("Relu", "b0", "c"),
            node("Conv", "c net.second.weight bias", "d", strides=[2, 2], auto_pad="SAME_UPPER"),
            node("Clip", "d low high", "e"),
            node("Shape", "e", "sizes"),
            node("Gather", "sizes zero", "rows"),
            node("Unsqueeze", "rows axes", "rows1"),
            node("Concat", "rows1 rest", "wanted", axis=0),
            node("Reshape", "e wanted", "flat"),
            node("MatMul", "flat w", "p"),
            node("Add", "p q", "y"),
        ],
        {"x": [batch, 3, 8, 8]},
        ["y"],
        {
            "net.first.weight": noise(8, 3, 3, 3),
            "s": noise(8),
            "b": noise(8),
            "m": noise(8),
            "v": np.abs(noise(8)) + 0.5,
            "net.second.weight": noise(8, 8, 3, 3) * 0.2,
            "bias": noise(8),
            "low": np.float32(0).reshape(()),
            "high": np.float32(6).reshape(()),
            "zero": np.array(0),
            "axes": np.array([0]),
            "rest": np.array([-1]),
            "w": noise(128, 5) * 0.1,
            "q": noise(5),
        },
    )
