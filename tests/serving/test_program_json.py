"""The JSON of program files: what is read, as what, and what is refused with the byte it is at."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.program_files import attempts, layout, plan
from x86quant.serving.program_file import VERSION, sealed

_COPY = {
    "element_size": 1, "sizes": [4], "from": [1, 0], "to": [2, 0], "from_strides": [1],
    "to_strides": [1],
}  # fmt: skip

_MARKED = f'{{"x86quant-program {VERSION} {"0" * 8}":1'


def _sealed(path: Path, header: str, tensors: bytes = b"") -> Path:
    text = header.encode("utf-8", "surrogatepass")
    path.write_bytes(sealed(len(text).to_bytes(8, "little") + text + tensors))
    return path


def _with(path: Path, more: str) -> Path:
    """A program that copies four bytes, with ``more`` as a value that nobody asks for."""
    ends = [layout([4], "uint8")]
    made = json.dumps({"packs": [], "row_packs": [],
                       "plans": [plan(64, ends, ends, [("strided_copy", _COPY)])]})  # fmt: skip
    manifest = f'x86quant-program {VERSION} {"0" * 8}\n{made[:-1]}, "more": {more}}}'
    return _sealed(path, json.dumps({"__metadata__": {"x86quant": manifest}}))


def _said(folder: Path, values: list[str]) -> dict[str, str]:
    files = [_with(folder / f"{number}.xq", value) for number, value in enumerate(values)]
    return dict(zip(values, attempts(files), strict=True))


_READ = [
    "0", "9", "-1", "10", "9223372036854775807", "-9223372036854775808", "0.0", "-9.5", "1e3",
    "1E+3", "1.5e-3", "1e308", "true", "false", "null", '""', '"a b~ !"', r'"\"\\\/\n\t\r\b\f"',
    r'"\u0000\u007f\u0080\u07ff\u0800\uffff\uABCD\uabcd"', "[]", "[ ]", "[1]", "[1 , 2]", "{}",
    "{ }", '{"a":1}', '{ "a" : 1 , "b" : [ ] }', "\t\n\r 1 \t\n\r", r'"\ud83d\ude00"',
    "[" * 32 + "]" * 32, '{"a":' * 31 + "1" + "}" * 31,
]  # fmt: skip

_REFUSED = {
    "9223372036854775808": "a bad number", "-9223372036854775809": "a bad number",
    "1-2": "a bad number", "--1": "a bad number", "-": "a bad number", "+1": "a bad number",
    "1e309": "a bad number", "1e": "a bad number", "1.5.5": "a bad number", ".": "a bad number",
    "Infinity": "a bad number", "truth": "unknown word", "tru": "unknown word",
    "falsE": "unknown word", "nul": "unknown word", "'a'": "a bad number",
    '"\x1f"': "a control character in a string", '"\n"': "a control character in a string",
    r'"\x"': "an unknown escape", r'"\u12"': r"a bad \u escape", r'"\uabcg"': r"a bad \u escape",
    r'"\u00:0"': r"a bad \u escape", r'"\u00/0"': r"a bad \u escape",
    r'"\u00`0"': r"a bad \u escape", r'"\u00@0"': r"a bad \u escape",
    r'"\u00G0"': r"a bad \u escape", "[1": "a list does not end", "[1,]": "a bad number",
    "[1 2]": "a list does not end", "{,": "a key is missing", "{1:2}": "a key is missing",
    '{"a" 1}': "a colon is missing", '{"a":1,}': "a key is missing",
    '{"a":1,"a":1}': "a key occurs twice", '{"a":1 "b":2}': "an object does not end",
    "1 2": "an object does not end", "1}": "something follows the value",
    "1}x": "something follows the value", "[" * 33 + "]" * 33: "it is nested too deeply",
    '{"a":' * 32 + "1" + "}" * 32: "it is nested too deeply",
    "[" * 100000: "it is nested too deeply",
}  # fmt: skip


def test_right_values_are_read(tmp_path: Path) -> None:
    said = _said(tmp_path, _READ)
    assert {value: text for value, text in said.items() if text != "ran; ran"} == {}


def test_wrong_values_are_refused_with_what_is_wrong(tmp_path: Path) -> None:
    said = _said(tmp_path, [*_REFUSED])
    wrong = {v: t for v, t in said.items() if "bad JSON at byte" not in t or _REFUSED[v] not in t}
    assert wrong == {}


@pytest.mark.parametrize(
    ("end", "why"),
    [
        ("", "an object does not end"), (",", "a key is missing"), (',"a', "it ends too early"),
        (',"a"', "a colon is missing"), (',"a":', "it ends too early"),
        (',"a":"\\', "it ends too early"), (',"a":"\\u1', "it ends too early"),
        (',"a":[', "it ends too early"), (',"a":[1', "a list does not end"),
        (',"a":tru', "unknown word"),
    ],
)  # fmt: skip
def test_json_that_ends_too_early_is_refused(end: str, why: str, tmp_path: Path) -> None:
    """A header whose text ends there; the mark that makes it a program file is in a key."""
    (said,) = attempts([_sealed(tmp_path / "cut.xq", _MARKED + end)])
    assert f"bad JSON at byte {len(_MARKED + end) - 3 * (why == 'unknown word')}: {why}" in said


def test_the_byte_that_is_wrong_is_told(tmp_path: Path) -> None:
    (said,) = attempts([_sealed(tmp_path / "bad.xq", _MARKED + "x}")])
    assert f"bad JSON at byte {len(_MARKED)}: an object does not end" in said


@pytest.mark.parametrize("digits", [str.lower, str.upper])
@pytest.mark.parametrize(
    "name",
    [
        "a",
        "\x7f",
        "\x80",
        "é",
        "\u07ff",
        "\u0800",
        "€",
        "\uffff",
        "\uabcd\uefab",
        "tab\there",
        'q"\\/',
    ],
)
def test_names_are_the_same_however_they_are_written(
    name: str, digits: Callable[[str], str], tmp_path: Path
) -> None:
    """As bytes of UTF-8 in the header, by escapes in the manifest."""
    lut = torch.arange(255, -1, -1, dtype=torch.uint8).numpy().tobytes()
    entry = {"dtype": "U8", "shape": [256], "data_offsets": [0, 256]}
    fields = {
        "a": [1, 0, 1, 1, 1, 1, 4, 4, 4, 4, 4], "out": [2, 0, 1, 1, 1, 1, 4, 4, 4, 4, 4],
        "lut": {"table": name},
    }  # fmt: skip
    ends = [layout([4], "uint8")]
    made = {"packs": [], "row_packs": [], "plans": [plan(64, ends, ends, [("lut", fields)])]}
    escaped = re.sub(r"(?<=\\u)[0-9a-f]{4}", lambda four: digits(four[0]), json.dumps(made))
    manifest = f"x86quant-program {VERSION} {'0' * 8}\n{escaped}"
    header = {"__metadata__": {"x86quant": manifest}, name: entry}
    (said,) = attempts([_sealed(tmp_path / "n.xq", json.dumps(header, ensure_ascii=False), lut)])
    assert said == "ran; ran"
