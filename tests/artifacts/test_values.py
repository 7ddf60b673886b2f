"""Arguments in artifacts: what is written reads as the same, and anything else is refused."""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Any

import pytest
import torch

from x86quant.artifacts.file.container import DTYPES, checksum, pack, unpack
from x86quant.artifacts.file.values import MAX_DEPTH, decode
from x86quant.errors import ArtifactError


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ({"tuple": [1, {"tuple": []}]}, (1, ())),
        ({"dict": {"a": [1.5], "b": None}}, {"a": [1.5], "b": None}),
        ({"ordered": [["b", 1], ["a", True]]}, OrderedDict([("b", 1), ("a", True)])),
        ({"slice": [None, 3, -1]}, slice(None, 3, -1)),
        ({"device": "cpu"}, torch.device("cpu")),
        ({"ellipsis": None}, ...),
        ({"float": "inf"}, math.inf),
        (2**63 - 1, 2**63 - 1),
        (-(2**63), -(2**63)),
        (nested(MAX_DEPTH), nested(MAX_DEPTH)),
    ],
)
def test_what_is_written_stands_for_a_value(written: Any, value: Any) -> None:
    found = decode(written, [])
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("written", "why"),
    [
        ({"tuple": {}}, "a tuple argument holds no list"),
        ({"dict": []}, "a dict argument holds no object"),
        ({"ordered": {}}, "no pairs of names and values"),
        ({"ordered": [1]}, "no pairs of names and values"),
        ({"ordered": ["ab"]}, "no pairs of names and values"),
        ({"ordered": [["a"]]}, "no pairs of names and values"),
        ({"ordered": [["a", 1, 2]]}, "no pairs of names and values"),
        ({"ordered": [[1, 2]]}, "no pairs of names and values"),
        ({"slice": [1, 2]}, "does not have three parts"),
        ({"slice": {"a": 1, "b": 2, "c": 3}}, "does not have three parts"),
        ({"device": "cuda"}, "is device 'cuda', and only cpu may be"),
        ({"device": None}, "only cpu may be"),
        ({"ellipsis": 0}, "an ellipsis argument has content"),
        ({"float": 1.0}, "the unknown float '1.0'"),
        ({"float": ["nan"]}, "the unknown float"),
        ({"dtype": "qint8.__class__"}, "the unknown dtype"),
        ({"node": 0}, "is node 0, but only nodes 0..-1 come before it"),
        ({"node": -1}, "is node -1"),
        ({"node": True}, "is node True"),
        ({"eval": "1"}, "the unknown kind 'eval'"),
        ({}, "stands for nothing"),
        ({"tuple": [], "dict": {}}, "stands for nothing"),
        (2**63, "more than 64 bits"),
        (-(2**63) - 1, "more than 64 bits"),
        (math.inf, "too large for a float"),
        (nested(MAX_DEPTH + 1), "nested more than"),
        ({"tuple": nested(MAX_DEPTH + 1)}, "nested more than"),
    ],
)
def test_anything_else_is_refused(written: Any, why: str) -> None:
    with pytest.raises(ArtifactError, match=why.replace("(", r"\(")):
        decode(written, [])


def test_tensors_of_each_type_come_back() -> None:
    tensors = {name: torch.arange(6).reshape(2, 3).to(dtype) for name, dtype in DTYPES.items()} | {
        "empty": torch.zeros(0, 3),
        "number": torch.tensor(2.5),
    }
    data = pack({"a": [1, None]}, tensors)
    manifest, found = unpack(data)
    assert manifest == {"a": [1, None]}
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype is tensor.dtype
        assert torch.equal(found[name], tensor)
    assert pack({"a": [1, None]}, dict(reversed(tensors.items()))) == data
    assert checksum(data) != checksum(pack({"a": [1, 2]}, tensors))
    for size in (0, 7, 8, 9, len(data) - 1):
        with pytest.raises(ArtifactError):
            unpack(data[:size])
    for place in range(0, len(data), 7):
        damaged = bytearray(data)
        damaged[place] ^= 1
        with pytest.raises(ArtifactError):
            unpack(bytes(damaged))
