"""The file as such: what its header may say, and what is refused before anything is made of it."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from x86quant.artifacts.file import container
from x86quant.errors import ArtifactError

ENTRY = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}


def test_a_file_without_tensors_is_one() -> None:
    data = container.pack({"a": 1}, {})
    length = int.from_bytes(data[:8], "little")
    assert 8 + length == len(data)
    assert container.unpack(data) == ({"a": 1}, {})
    with pytest.raises(
        ArtifactError, match=f"would take {length} bytes of the file's {length + 7}"
    ):
        container.unpack(data[:-1])


def test_it_is_read_up_to_its_header() -> None:
    data = container.pack({"a": 1}, {"x": torch.ones(2)})
    with pytest.raises(ArtifactError, match="the file has 7 bytes"):
        container.unpack(data[:7])
    with pytest.raises(ArtifactError, match="would take"):
        container.unpack(data[:8])


def test_a_header_may_be_as_long_as_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    data = container.pack({"a": 1}, {"x": torch.ones(2)})
    length = int.from_bytes(data[:8], "little")
    monkeypatch.setattr(container, "MAX_HEADER_BYTES", length)
    assert container.unpack(container.pack({"a": 1}, {"x": torch.ones(2)}))[0] == {"a": 1}
    monkeypatch.setattr(container, "MAX_HEADER_BYTES", length - 1)
    with pytest.raises(ArtifactError, match=f"would take {length} bytes"):
        container.unpack(data)
    with pytest.raises(ArtifactError, match=f"take {length} bytes, more than the {length - 1}"):
        container.pack({"a": 1}, {"x": torch.ones(2)})


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"a": 1, "a": 2}', "a key occurs twice"),
        ('{"a": {"b": 1, "b": 1}}', "a key occurs twice"),
        ("[NaN]", "NaN is not JSON"),
        ("-Infinity", "-Infinity is not JSON"),
        ("[" * 100_000, "its text is nested too deeply"),
        ("{", r"its text is not JSON \(Expecting"),
    ],
)
def test_json_that_others_would_take(text: str, why: str) -> None:
    with pytest.raises(ArtifactError, match=why) as raised:
        container.parse_json(text, "text")
    assert ("is not JSON (" in str(raised.value)) == why.startswith("its text is not JSON")


def test_an_entry_of_a_tensor() -> None:
    container._check_entry("x", ENTRY)
    container._check_entry("x", {**ENTRY, "shape": []})
    container._check_entry("x", {**ENTRY, "shape": [0, 1 << 48]})


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        ([], "is not described"),
        ({"dtype": "F32", "shape": [2, 3]}, "is not described"),
        ({**ENTRY, "more": 1}, "is not described"),
        ({**ENTRY, "dtype": "F8"}, "has dtype 'F8'"),
        ({**ENTRY, "dtype": ["F32"]}, "has dtype"),
        ({**ENTRY, "shape": 6}, "impossible"),
        ({**ENTRY, "shape": "23"}, "impossible"),
        ({**ENTRY, "shape": [2, -3]}, "impossible"),
        ({**ENTRY, "shape": [2, 3.0]}, "impossible"),
        ({**ENTRY, "shape": [True, 3]}, "impossible"),
        ({**ENTRY, "shape": [(1 << 48) + 1]}, "impossible"),
        ({**ENTRY, "shape": {"2": 3}}, "impossible"),
        ({**ENTRY, "data_offsets": [0]}, "impossible"),
        ({**ENTRY, "data_offsets": [0, 24, 24]}, "impossible"),
        ({**ENTRY, "data_offsets": [-24, 0]}, "impossible"),
        ({**ENTRY, "shape": [1 << 24, (1 << 24) + 1]}, "larger than any file"),
        ({**ENTRY, "shape": [0, 1 << 48, 1 << 48]}, "larger than any file"),
    ],
)
def test_entries_that_are_impossible(entry: Any, why: str) -> None:
    with pytest.raises(ArtifactError, match=why):
        container._check_entry("x", entry)


def file(header: Any, body: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (file([]), "not a JSON object"),
        (file({}), "no x86quant manifest"),
        (file({"__metadata__": {"x86quant": 1}}), "no x86quant manifest"),
        (file({"__metadata__": {"x86quant": "x86quant-artifact 2 short\n{}"}}), "no x86quant"),
        (file({"__metadata__": {"x86quant": f"x86quant-artifact 1 {'0' * 64}\n{{}}"}}),
         "format version 1, and this x86quant reads version 2"),
        (file({"__metadata__": {"x86quant": f"x86quant-artifact 2 {'0' * 64}\n{{}}"}}),
         "checksum is wrong"),
    ],
)  # fmt: skip
def test_headers_that_are_none(data: bytes, why: str) -> None:
    with pytest.raises(ArtifactError, match=why):
        container.unpack(data)


def test_more_than_one_entry_of_metadata_or_place_for_the_checksum() -> None:
    digest = "0" * 64
    text = f"x86quant-artifact 2 {digest}\n{{}}"
    with pytest.raises(ArtifactError, match="no x86quant manifest"):
        container.unpack(file({"__metadata__": {"x86quant": text, "more": ""}}))
    twice = f"x86quant-artifact 2 {digest}\n {digest}\n{{}}"
    with pytest.raises(ArtifactError, match="not in its place"):
        container.unpack(file({"__metadata__": {"x86quant": twice}}))
    sealed = container.seal(file({"__metadata__": {"x86quant": text}}), digest)
    assert container.unpack(sealed) == ({}, {})
    listed = container.seal(file({"__metadata__": {"x86quant": text.replace("{}", "[]")}}), digest)
    with pytest.raises(ArtifactError, match="its manifest is not a JSON object"):
        container.unpack(listed)


def test_booleans_are_zeros_and_ones() -> None:
    data = container.pack({}, {"x": torch.tensor([True, False])})
    assert container.unpack(data)[1]["x"].tolist() == [True, False]
    bad = container.seal(data[:-1] + b"\x02", container.checksum(data))
    with pytest.raises(ArtifactError, match="holds other bytes than 0 and 1"):
        container.unpack(bad)
