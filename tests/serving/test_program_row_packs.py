"""Weights of linears in program files: which are taken, and which are refused when they load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.program_files import attempts, layout, plan, write
from tests.step_files import copy_step


def _pack(*linears: dict[str, Any], activation: str = "") -> dict[str, Any]:
    return {"linears": list(linears), "activation": activation}


def _linear(weight: str = "w", scale: str = "s", bias: str | None = None) -> dict[str, Any]:
    return {"weight": weight, "scale": scale, "bias": bias}


def _tensors() -> dict[str, torch.Tensor]:
    """By name; a digit says the size of what is cut or longer."""
    codes, nibbles = torch.ones(4, 16, dtype=torch.int8), torch.full((4, 8), 153, dtype=torch.uint8)
    return {
        "w": codes, "w0": torch.ones(0, 16, dtype=torch.int8), "wide": codes[None].clone(),
        "one": codes[:1].clone(), "flat": codes[0].clone(), "other": codes[:, :8].clone(),
        "n": nibbles, "n0": nibbles[:, :0].clone(), "f": torch.ones(4, 16),
        "s": torch.ones(4), "s3": torch.ones(3), "s5": torch.ones(5), "scalar": torch.ones(()),
        "h": torch.ones(4).half(), "g": torch.ones(4, 2), "gh": torch.ones(4, 2).half(),
        "g1": torch.ones(4, 1), "go": torch.ones(4, 2, 2), "gho": torch.ones(4, 2, 2).half(),
        "g3": torch.ones(4, 3), "g0": torch.ones(4, 0), "gx": torch.ones(5, 2),
        "go1": torch.ones(4, 2, 1), "go3": torch.ones(4, 2, 3), "g4": torch.ones(4, 2, 2, 1),
        "gb": torch.ones(4, 2, dtype=torch.uint8), "gi": torch.ones(4, 2, dtype=torch.int8),
    }  # fmt: skip


def _said(folder: Path, pack: dict[str, Any]) -> str:
    ends = [layout([4], "uint8")]
    steps = [plan(64, ends, ends, [copy_step((1, 0), (2, 0), 4)])]
    (said,) = attempts([write(folder / "rows.xq", steps, _tensors(), row_packs=[pack])])
    return said


@pytest.mark.parametrize(
    "pack",
    [
        _pack(_linear()), _pack(_linear(bias="s")), _pack(_linear(), activation="gelu"),
        _pack(_linear(), _linear(bias="s")), _pack(_linear(scale="g")), _pack(_linear(scale="gh")),
        _pack(_linear(scale="go")), _pack(_linear(scale="gho")), _pack(_linear(scale="g1")),
        _pack(_linear("n", "g")), _pack(_linear("n", "gho", "s")),
        _pack(_linear(), _linear("n", "g")),
    ],
)  # fmt: skip
def test_right_weights_are_taken(pack: dict[str, Any], tmp_path: Path) -> None:
    assert _said(tmp_path, pack) == "ran; ran"


def test_a_scale_without_dimensions_is_that_of_one_result(tmp_path: Path) -> None:
    """A read behind the end of its sizes ended the process."""
    assert _said(tmp_path, _pack(_linear("one", "scalar"))) == "ran; ran"
    assert "a float for each of its 4 results" in _said(tmp_path, _pack(_linear("w", "scalar")))


_WEIGHT = "takes an int8 weight of two dimensions"
_FLOATS = "takes a float for each of its"
_GROUPS = "takes a scale, or a scale and an offset, for each group"
_KERNEL = "refuses this linear"


@pytest.mark.parametrize(
    ("pack", "why"),
    [
        (_pack(), "has 0 linears"), (_pack(*[_linear()] * 3), "has 3 linears"),
        (_pack(_linear(), activation="x"), 'no activation "x"'),
        (_pack(_linear(), _linear("other")), "must have one shape"),
        (_pack(_linear(), _linear("one", "scalar")), "must have one shape"),
        *((_pack(_linear(name)), _WEIGHT) for name in ("wide", "flat", "n", "f", "w0")),
        *((_pack(_linear(scale=name)), _FLOATS) for name in ("s3", "s5", "h")),
        *((_pack(_linear(bias=name)), _FLOATS) for name in ("s3", "s5", "h", "w")),
        *((_pack(_linear("n", "g", bias=name)), _FLOATS) for name in ("s3", "s5", "h")),
        *((_pack(_linear("n", name)), _GROUPS) for name in ("g0", "gx", "go1", "go3", "g4", "gb",
                                                            "gi")),
        (_pack(_linear("f", "g")), _WEIGHT), (_pack(_linear("n0", "g")), _WEIGHT),
        (_pack(_linear("n", "s")), _WEIGHT), (_pack(_linear("n", "g3")), _KERNEL),
        (_pack(_linear(scale="g3")), _KERNEL),
    ],
)  # fmt: skip
def test_wrong_weights_are_refused(pack: dict[str, Any], why: str, tmp_path: Path) -> None:
    assert why in _said(tmp_path, pack)


@pytest.mark.parametrize("sign", [-1, 1])
def test_sums_of_rows_beyond_32_bits_are_refused(sign: int, tmp_path: Path) -> None:
    """The sum of weights of one sign may be a 255th of what an int32 holds, and no more."""
    most = (2**31 - 1) // 255
    ends = [layout([4], "uint8")]
    steps = [plan(64, ends, ends, [copy_step((1, 0), (2, 0), 4)])]
    files = []
    for total in (most, most + 1):
        weight = torch.zeros(1, 70_000, dtype=torch.int8)
        weight[0, : total // 127] = sign * 127
        weight[0, -1] = sign * (total % 127)
        tensors = {"w": weight, "s": torch.ones(1)}
        file = tmp_path / f"{total}.xq"
        files.append(write(file, steps, tensors, row_packs=[_pack(_linear())]))
    first, second = attempts(files)
    assert first == "ran; ran"
    assert "do not fit 32 bits" in second
