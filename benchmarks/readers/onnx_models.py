"""ONNX models, with fields of their messages changed."""

from __future__ import annotations

import contextlib
import random
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import helper

from benchmarks.readers.changes import anything
from benchmarks.readers.reader import Depth, Reader, in_file, refused
from tests.onnx_models.small_models import convolutional, model, node, noise
from x86quant.errors import InvalidInputError, UnsupportedError
from x86quant.onnx_models import from_onnx

_INTS = (0, 1, -1, 2, 3, 7, 12, 64, 2**31 - 1, 2**31, -(2**31), 2**62, -(2**63), 2**63 - 1)
_FLOATS = (0.0, -1.0, 1e-30, 3e38, float("nan"), float("inf"))
_TEXTS = ("", "x", "Relu", "Loop", "If", "Conv", "../../etc/passwd", "a" * 200, "NOTSET", "é")


def _recurrent() -> onnx.ModelProto:
    weights = {"w": noise(1, 16, 3), "r": noise(1, 16, 4), "b": noise(1, 32)}
    nodes = [node("LSTM", "x w r b", "y h c", hidden_size=4), node("Softmax", "y", "z", axis=-1)]
    return model(nodes, {"x": ["t", 2, 3]}, ["z", "h"], weights)


def _shaped() -> onnx.ModelProto:
    nodes = [
        node("Shape", "x", "s"), node("Gather", "s i", "n", axis=0),
        node("Concat", "n m", "t", axis=0),
        node("Reshape", "x t", "y"), node("Slice", "y a e", "z"), node("MatMul", "z w", "p"),
        node("Transpose", "p", "q", perm=[1, 0]), node("Pad", "q d", "out"),
    ]  # fmt: skip
    whole = {"i": [0], "m": [-1], "a": [0], "e": [1], "d": [0, 0, 1, 1]}
    constants = {name: np.array(value, dtype=np.int64) for name, value in whole.items()}
    constants["w"] = noise(6, 4)
    return model(nodes, {"x": ["n", 2, 3]}, ["out"], constants)


def _rounded() -> onnx.ModelProto:
    scale, zero = np.float32(0.02), np.uint8(128)
    nodes = [
        node("QuantizeLinear", "x s z", "a"), node("DequantizeLinear", "a s z", "b"),
        node("DequantizeLinear", "w ws", "v", axis=0), node("Conv", "b v", "c", strides=[2, 2]),
        node("Resize", "c r k", "y", mode="nearest"),
    ]  # fmt: skip
    constants = {
        "s": np.array(scale), "z": np.array(zero), "ws": np.full(4, 0.01, np.float32),
        "w": np.arange(4 * 3 * 9, dtype=np.int8).reshape(4, 3, 3, 3), "r": np.zeros(0, np.float32),
        "k": np.array([1, 1, 2, 2], np.float32),
    }  # fmt: skip
    return model(nodes, {"x": ["n", 3, 9, 9]}, ["y"], constants)


def _branches() -> onnx.ModelProto:
    def branch(op: str) -> onnx.GraphProto:
        return helper.make_graph([node(op, "x", f"of_{op}")], op, [], [
            onnx.ValueInfoProto(name=f"of_{op}")])  # fmt: skip

    nodes = [
        node("ReduceSum", "x axes", "total", keepdims=0), node("Greater", "total zero", "up"),
        helper.make_node(
            "If", ["up"], ["y"], then_branch=branch("Relu"), else_branch=branch("Neg")
        ),
    ]  # fmt: skip
    constants = {"axes": np.array([0, 1], np.int64), "zero": np.array(0, np.float32)}
    return model(nodes, {"x": [2, 3]}, ["y"], constants)


def _messages(message: Any) -> list[Any]:
    """``message`` and all within it."""
    found = [message]
    for field, value in message.ListFields():
        if field.message_type is not None:
            for one in value if field.is_repeated else [value]:
                found += _messages(one)
    return found


def _odd(rng: random.Random, field: Any) -> Any:
    """A value for ``field`` that hardly a model has."""
    if field.type == field.TYPE_STRING:
        return rng.choice(_TEXTS)
    if field.type == field.TYPE_BYTES:
        return rng.choice(_TEXTS).encode()
    if field.cpp_type in (field.CPPTYPE_FLOAT, field.CPPTYPE_DOUBLE):
        return rng.choice(_FLOATS)
    limit = 2**31 if field.cpp_type in (field.CPPTYPE_INT32, field.CPPTYPE_ENUM) else 2**63
    value = rng.choice(_INTS)
    if field.cpp_type == field.CPPTYPE_ENUM:
        return rng.choice([one.number for one in field.enum_type.values])
    unsigned = field.cpp_type in (field.CPPTYPE_UINT32, field.CPPTYPE_UINT64)
    return abs(value) % limit if unsigned or value >= limit or value < -limit else value


def _change_one(rng: random.Random, proto: onnx.ModelProto) -> None:
    everything = _messages(proto)
    message = rng.choice(everything)
    fields = message.ListFields()
    if not fields:
        return
    field, value = rng.choice(fields)
    if field.message_type is not None:
        if not field.is_repeated:
            message.ClearField(field.name)
        elif rng.random() < 0.5:
            del value[rng.randrange(len(value))]
        else:
            value.add().CopyFrom(rng.choice(value))
    elif field.is_repeated:
        how = rng.randrange(3)
        if how == 0:
            del value[rng.randrange(len(value))]
        elif how == 1:
            value.append(rng.choice([*value, _odd(rng, field)]))
        else:
            value[rng.randrange(len(value))] = rng.choice([*value, _odd(rng, field)])
    else:
        alike = [getattr(one, field.name) for one in everything
                 if one.DESCRIPTOR is message.DESCRIPTOR]  # fmt: skip
        setattr(message, field.name, rng.choice([*alike, _odd(rng, field), _odd(rng, field)]))


def _change(rng: random.Random, data: bytes) -> bytes:
    if rng.random() < 0.1:
        return anything(rng, data)
    proto = onnx.load_from_string(data)
    for _ in range(rng.choice((1, 1, 2))):
        _change_one(rng, proto)
    return bytes(proto.SerializeToString())


def onnx_file(folder: Path) -> Reader:
    """Files of ONNX."""

    def read(path: Path) -> Depth:
        try:
            found = from_onnx(path)
        except (InvalidInputError, UnsupportedError) as error:
            return refused(error, ("onnx_models.reading:read",))
        with torch.no_grad(), contextlib.suppress(Exception):  # of sizes that do not fit, say
            found(*inputs[len(found.input_names) - 1])  # type: ignore[arg-type]
        return Depth.READ

    inputs = [(torch.randn(2, 3, 9, 9),), (torch.randn(2, 3, 9, 9), torch.randn(2, 3))]
    makers = (convolutional, _recurrent, _shaped, _rounded, _branches)
    return Reader(
        [bytes(make().SerializeToString()) for make in makers],
        _change,
        in_file(folder, "net.onnx", read),  # type: ignore[arg-type]
    )
