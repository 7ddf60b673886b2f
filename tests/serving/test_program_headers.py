"""The headers of program files: lengths, versions and where tensors lie."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.program_files import attempts, layout, plan, write
from tests.serving.served import CANNOT_READ, RefusedError, Served
from tests.step_files import copy_step
from x86quant.serving.program_file import VERSION, sealed

_LUT = torch.arange(255, -1, -1, dtype=torch.uint8).numpy().tobytes()
_ENTRY = {"dtype": "U8", "shape": [256], "data_offsets": [0, 256]}
_MOST_HEADER = 64 << 20
_NO_PROGRAM = "x86quant: the file is truncated, or is no program file"


def _header(**entries: Any) -> bytes:
    """Of a program that looks four bytes up in the tensor ``t``."""
    fields = {
        "a": [1, 0, 1, 1, 1, 1, 4, 4, 4, 4, 4], "out": [2, 0, 1, 1, 1, 1, 4, 4, 4, 4, 4],
        "lut": {"table": "t"},
    }  # fmt: skip
    ends = [layout([4], "uint8")]
    made = {"packs": [], "row_packs": [], "plans": [plan(64, ends, ends, [("lut", fields)])]}
    text = f"x86quant-program {VERSION} {'0' * 8}\n{json.dumps(made)}"
    return json.dumps({"__metadata__": {"x86quant": text}, "t": _ENTRY, **entries}).encode()


def _written(path: Path, header: bytes, tensors: bytes = _LUT, longer: int = 0) -> Path:
    length = (len(header) + longer).to_bytes(8, "little")
    path.write_bytes(sealed(length + header + tensors))
    return path


def test_a_tensor_is_read_where_its_entry_says(tmp_path: Path) -> None:
    entry = {**_ENTRY, "data_offsets": [3, 259]}
    assert attempts([
        _written(tmp_path / "a.xq", _header()),
        _written(tmp_path / "b.xq", _header(t=entry), b"123" + _LUT),
        _written(tmp_path / "c.xq", _header(t=entry), b"123" + _LUT + b"4"),
        _written(tmp_path / "d.xq", _header(e={**_ENTRY, "shape": [0], "data_offsets": [5, 5]})),
        _written(tmp_path / "e.xq", _header(e={**_ENTRY, "shape": [2, 0, 3],
                                               "data_offsets": [256, 256]})),
        _written(tmp_path / "f.xq", _header(e={"dtype": "F16", "shape": [2, 64],
                                               "data_offsets": [256, 512]}), _LUT * 2),
        _written(tmp_path / "g.xq", _header(e={"dtype": "I8", "shape": [],
                                               "data_offsets": [256, 257]}), _LUT + b"1"),
    ]) == ["ran; ran"] * 7  # fmt: skip


def test_tensors_that_lie_over_each_other_are_refused(tmp_path: Path) -> None:
    """A copy is made of each: names cost a file less than what they name."""
    over = {**_ENTRY, "shape": [1], "data_offsets": [255, 256]}
    (said,) = attempts([_written(tmp_path / "over.xq", _header(e=over))])
    assert "lie over each other" in said


_OUTSIDE, _OTHER_SIZE = "lies outside of it", "has not the size of its shape"


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        ({"data_offsets": [-1, 255]}, _OUTSIDE), ({"data_offsets": [1, 257]}, _OUTSIDE),
        ({"data_offsets": [256, 0]}, _OUTSIDE), ({"data_offsets": [0, 256, 256]}, _OUTSIDE),
        ({"data_offsets": [0]}, _OUTSIDE), ({"data_offsets": []}, _OUTSIDE),
        ({"data_offsets": [0, 2**63 - 1]}, _OUTSIDE),
        ({"data_offsets": [-(2**63), 2**63 - 1]}, _OUTSIDE),
        ({"data_offsets": [0, 255]}, _OTHER_SIZE), ({"data_offsets": [1, 256]}, _OTHER_SIZE),
        ({"shape": [257]}, _OTHER_SIZE), ({"shape": [16, 15]}, _OTHER_SIZE),
        ({"shape": [0]}, _OTHER_SIZE), ({"dtype": "F32"}, _OTHER_SIZE),
        ({"dtype": "F16"}, _OTHER_SIZE),
        # Its bytes would be none, modulo 2^64.
        ({"dtype": "F32", "shape": [2**62], "data_offsets": [0, 0]}, _OTHER_SIZE),
        ({"shape": [-256]}, "an impossible shape"), ({"shape": [-16, -16]}, "an impossible shape"),
        ({"shape": [2**62, 4]}, "an impossible shape"),
        ({"dtype": "F64"}, "has dtype F64"), ({"dtype": 1}, "a dtype is not a text"),
        ({"shape": 256}, "a shape is not a list"),
        ({"shape": [256.0]}, "a shape is not an integer"),
    ],
)  # fmt: skip
def test_a_tensor_that_is_not_in_the_file_is_refused(
    entry: dict[str, Any], why: str, tmp_path: Path
) -> None:
    (said,) = attempts([_written(tmp_path / "bad.xq", _header(t={**_ENTRY, **entry}))])
    assert why in said


def test_a_header_that_is_longer_than_the_file_is_refused(tmp_path: Path) -> None:
    """By a byte that is not there, also where the tensors are none of this program's."""
    header = _header(t={**_ENTRY, "shape": [0], "data_offsets": [0, 0]})
    files = [_written(tmp_path / f"{more}.xq", header, b"", more) for more in (0, 1, 2, 8, 9)]
    first, *others = attempts(files)
    assert "takes a tensor of 256 elements" in first
    assert others == [_NO_PROGRAM] * 4


def test_a_header_of_64_mib_is_read_and_no_longer_one(tmp_path: Path) -> None:
    header = _header()
    files = [
        _written(tmp_path / f"{size}.xq", header.ljust(size))
        for size in (_MOST_HEADER, _MOST_HEADER + 1)
    ]
    assert attempts(files) == ["ran; ran", _NO_PROGRAM]


def test_a_header_that_ends_in_its_checksum_is_refused(tmp_path: Path) -> None:
    mark = f'{{"x86quant-program {VERSION} '.encode()
    cut = _written(tmp_path / "cut.xq", mark + b"00000000", b"")
    short = tmp_path / "short.xq"
    short.write_bytes((len(mark) + 7).to_bytes(8, "little") + mark + b"0000000")
    bare = tmp_path / "bare.xq"
    bare.write_bytes((len(mark) - 1).to_bytes(8, "little") + mark[:-1])
    said = attempts([cut, short, bare])
    assert "bad JSON" in said[0]
    assert said[1:] == ["x86quant: the file is damaged"] * 2


def test_another_version_is_told_in_so_many_letters(tmp_path: Path) -> None:
    text = b'{"x86quant-program ' + b"7" * 40 + b' 00000000"}'
    (tmp_path / "new.xq").write_bytes(len(text).to_bytes(8, "little") + text)
    (said,) = attempts([tmp_path / "new.xq"])
    assert f"version {'7' * 16}, and this library reads versions 4 to {VERSION}:" in said


def test_a_file_that_cannot_be_read_says_why(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, why in (
        (tmp_path / "none", "No such file or directory"),
        (tmp_path, "it is no regular file"),
        (tmp_path / "pipe", "it is no regular file"),
    ):
        with pytest.raises(RefusedError, match=f"cannot read .*: {why}$") as caught:
            Served(path)
        assert caught.value.status == CANNOT_READ


def test_a_manifest_has_a_line_of_its_own(tmp_path: Path) -> None:
    text = f"x86quant-program {VERSION} {'0' * 8} {{}}"
    header = json.dumps({"__metadata__": {"x86quant": text}}).encode()
    (said,) = attempts([_written(tmp_path / "bad.xq", header, b"")])
    assert "the manifest is missing" in said


@pytest.mark.parametrize("name", ["uint8", "int32", "float32", "int64"])
def test_tensors_are_as_large_as_their_types_say(name: str, tmp_path: Path) -> None:
    """Three of each are copied whole, with no byte left out or beyond."""
    size = 3 * getattr(torch, name).itemsize
    ends = [layout([3], name)]
    paths = [
        write(tmp_path / f"{count}.xq", [plan(64, ends, ends, [copy_step((1, 0), (2, 0), count)])])
        for count in (size - 1, size, size + 1)
    ]
    less, whole, more = attempts(paths)
    assert "no step of a plan writes all of output 0" in less
    assert whole == "ran; ran"
    assert f"reaches bytes 0 to {size + 1} of {size}" in more
