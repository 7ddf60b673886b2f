"""A program file for each kind of step, in which it has every field that it reads."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tests.program_files import layout, plan, write

ARENA = 1 << 16
BYTES = [layout([ARENA], "uint8")]

_AT = [0, 0, 1, 1, 2, 2, 4, 16, 16, 8, 4]  # an image of codes; its place is given below
_OUT = {"a": "image", "out": "image"}
_CODES = {"a_zp": 3, "out_zp": 5}
_WINDOW = {"kernel": [1] * 3, "stride": [1] * 3, "padding": [0] * 3, "dilation": [1] * 3}
_UP = {"scale": [1.0] * 3, "align_corners": False, **_CODES, "a_mult": 1.0}
_ROWS = {"codes": "at", "scale": "at", "zero_point": "at"}
_HEADS = {"q_strides": [16, 8, 4], "k_strides": [16, 8, 4], "v_strides": [16, 8, 4]}
_CACHE = {
    f"{name}_strides": [64, 32, 4][:rank]
    for name, rank in (("keys", 3), ("values", 3), ("key_scales", 2), ("value_scales", 2))
}
_TOKENS = {"batch": 2, "tokens": 3}

#: A step of each kind with every field that it reads, and behind a comma its other forms. "at"
#: stands for an address of its own, "image" and "floats" for a tensor.
STEPS: dict[str, dict[str, Any]] = {
    "copy": _OUT,
    "lut": {**_OUT, "lut": {"table": "lut"}},
    "requantize": {**_OUT, **_CODES, "a_mult": 0.5, "lo": 1, "hi": 99, "lut": {"table": "lut"}},
    "add": {**_OUT, "b": "image", **_CODES, "b_zp": 1, "a_mult": 0.5, "b_mult": 0.25},
    "mul": {**_OUT, "b": "image", **_CODES, "b_zp": 1, "mult": 0.5},
    "shuffle": {**_OUT, "groups": 2},
    "max_pool": {**_OUT, **_WINDOW},
    "avg_pool": {**_OUT, **_WINDOW, **_CODES, "a_mult": 1.0, "count_include_pad": True},
    "adaptive_avg_pool": {**_OUT, **_CODES, "a_mult": 1.0},
    "nearest": {**_OUT, **_UP},
    "bilinear": {**_OUT, **_UP},
    "quantize": {"a": "floats", "a_stride_c": 4, "out": "image", "a_mult": 1.0, "out_zp": 3},
    "dequantize": {"a": "image", "out": "floats", "out_stride_c": 4, "a_mult": 1.0, "a_zp": 3},
    "lut_real": {"a": "image", "out": "floats", "out_stride_c": 4, "table": {"table": "reals"}},
    "affine": {**_OUT, **_CODES, "scale_c": {"table": "four"}, "shift_c": {"table": "four"}},
    "group_norm": {
        **_OUT, "groups": 2, "a_mult": 1.0, "eps": 0.5, "scale_c": {"table": "four"},
        "shift_c": {"table": "four"}, "out_zp": 3, "lo": 1, "hi": 99, "lut": {"table": "lut"},
    },
    "layer_norm": {
        **_OUT, "a_mult": 1.0, "eps": 0.5, "scale_c": {"table": "four"},
        "shift_c": {"table": "four"}, "out_zp": 3,
    },
    "conv": {"pack": {"pack": 0}, "in": "image", "out": "image", "residual": "image"},
    "conv_real": {
        "pack": {"row_pack": 3}, "a": "image", "out": "at", **_WINDOW, "kernel": [1, 2, 1],
        "padding": [0, 1, 0], "a_scale": 0.5, "a_zp": 3,
    },
    "conv_columns": {
        "pack": {"row_pack": 3}, "a": "image", "out": "at", **_WINDOW, "kernel": [1, 2, 1],
        "padding": [0, 1, 0], "a_zp": 3, "columns": 2, "apart": 1, "scale": {"table": "two"},
        "bias": {"table": "two"},
    },
    "float_conv": {
        "a": "floats", "out": "image", "weight": {"table": "panel"}, "bias": {"table": "eight"},
        "depthwise": False, **_WINDOW, "kernel": [1, 2, 1], "padding": [0, 1, 0], "out_zp": 3,
        "dilation": [1, 2, 1], "out_mult": 1.0, "functions": [0, 4], "numbers": {"table": "two"},
    },
    "pad": {**_OUT, "before": [0] * 3, "mode": 1, "a_zp": 3},
    "strided_copy": {
        "element_size": 4, "sizes": [2, 3], "from": "at", "to": "at", "from_strides": [16, 4],
        "to_strides": [4, 8],
    },
    "rows": {
        "rows": 2, "features": 4, "pack": {"row_pack": 0}, **_ROWS, "residual": "at", "total": "at",
        "normed": "at", **{f"out_{name}": "at" for name in _ROWS}, "count": "at", "norm": 1,
        "eps": 0.5, "norm_weight": {"table": "four"}, "norm_bias": {"table": "four"},
    },
    "reorder_codes": {
        "rows": 2, "features": 4, "codes": "at", "out_codes": "at", "order": {"table": "order"},
        "count": "at",
    },
    "rotate": {
        "batch": 2, "tokens": 2, "heads": 2, "size": 4, "x": "at", "cos": "at", "sin": "at",
        "out": "at", "x_strides": [16, 8, 4], "cos_strides": [8, 4], "sin_strides": [8, 4],
    },
    "attention": {
        "batch": 2, "queries": 2, "keys": 2, "heads": 2, "kv_heads": 2, "size": 4, "q": "at",
        "k": "at", "v": "at", "out": "at", **_HEADS, "causal": False, "scale": 0.5, "mask": "at",
        "mask_is_bool": True, "mask_strides": [2, 0, 0], "starts": "at",
    },
    "cached_attention": {
        "batch": 2, "tokens": 2, "heads": 2, "kv_heads": 2, "size": 4, "capacity": 8, "q": "at",
        "k": "at", "v": "at", "keys": "at", "values": "at", "key_scales": "at",
        "value_scales": "at", **_HEADS, **_CACHE, "length": "at", "hidden": "at", "out": "at",
        "scale": 0.5,
    },
    "present_tokens": {
        **_TOKENS, "first": True, "mask": "at", "places": "at", "starts": "at", "seen": "at"
    },
    "gather_tokens": {
        **_TOKENS, "features": 2, "starts": "at", "x": "at", "out": "at", "places": "at"
    },
    "scatter_tokens": {
        **_TOKENS, "features": 2, "starts": "at", "x": "at", "out": "at", "places": "at"
    },
    "take_tokens": {**_TOKENS, "features": 2, "taken": 2, "x": "at", "out": "at", "places": "at"},
    "lookup": {
        "bags": 3, "tables": 2, "last_offset": False, "out": "at", "out_stride": 20,
        "table0": [9, 8, 4, 8, 0, 4, 1, 0, -1, 0, 6, 8], "rows0": {"table": "rows"},
        "name0": [65], "offsets0": "at", "indices0": "at", "weights0": "at",
        "table1": [9, 8, 4, 8, 0, 4, 1, 1, -1, 2, 6, 4], "rows1": {"table": "rows"},
        "strides1": [2, 1], "indices1": "at",
        "dense": "at", "dense_stride": 4, "places": [0, 1, 2], "a_mult": 1.0, "out_zp": 3,
    },
    "recurrent": {
        "lstm": True, "batch_first": False, "steps": 2, "sequences": 2, "features": 4, "units": 4,
        **{f"{name}{i}": {"row_pack": 1} for name in ("input", "hidden") for i in (0, 1)},
        "projection0": {"row_pack": 2}, "projection1": {"row_pack": 2}, "x": "at", "out": "at",
        "h": "at", "c": "at", "last": "at", "x_scale": 1.0, "x_zp": 3, "h_scale": 1.0, "h_zp": 3,
        "h_mult": 1.0,
    },
}  # fmt: skip
#: Of these, the fields that a step writes.
WRITTEN = {
    "dequantize": {"out"},
    "lut_real": {"out"},
    "strided_copy": {"to"},
    "rows": {"total", "normed", "out_codes", "out_scale", "out_zero_point"},
    "cached_attention": {"out", "keys", "values", "key_scales", "value_scales"},
    "present_tokens": {"places", "starts", "seen"},
    "reorder_codes": {"out_codes"},
    "recurrent": {"out", "last"},
}
_APART = 2048  # bytes from one address of a step to the next


def copy_step(
    source: tuple[int, int], to: tuple[int, int], size: int, to_stride: int = 1
) -> tuple[str, dict[str, Any]]:
    """A copy of so many bytes."""
    strides = {"from_strides": [1], "to_strides": [to_stride]}
    return "strided_copy", {
        "element_size": 1, "sizes": [size], "from": [*source], "to": [*to], **strides
    }  # fmt: skip


# ------------------------------------------------------------------------ files that got out once


def _tables() -> dict[str, torch.Tensor]:
    return {
        "lut": torch.arange(256, dtype=torch.uint8), "reals": torch.arange(256).float(),
        "four": torch.ones(4), "eight": torch.ones(16),
        "rows": torch.ones(9, 8, dtype=torch.uint8),
        "order": torch.tensor([2, 0, 3, 1], dtype=torch.int32),
        "w": torch.ones(4, 4, 1, 1, 1, dtype=torch.int8),
        "rw": torch.ones(4, 4, dtype=torch.int8), "gw": torch.ones(16, 4, dtype=torch.int8),
        "cw": torch.ones(4, 8, dtype=torch.int8), "panel": torch.ones(8 * 16),
        "two": torch.ones(2), "taps": torch.ones(2 * 4),
    }  # fmt: skip


def _linear(weight: str, scale: str) -> dict[str, Any]:
    return {"linears": [{"weight": weight, "scale": scale, "bias": None}], "activation": ""}


def _packs() -> dict[str, Any]:
    conv = {
        "weight": "w", "mult": "four", "bias": "four", "lut": None, "slopes": None,
        "codes": [3, 5, 0, 255, 1, 2],
        "geometry": [1, 1, 1, 1, 1, 1, 0, 0, 0, 1, 1, 1, 1, 0], "res_mult": 1.0,
    }  # fmt: skip
    rows = [_linear("rw", "four"), _linear("gw", "eight"), _linear("rw", "four")]
    rows.append(_linear("cw", "four"))
    return {"tensors": _tables(), "packs": [conv], "row_packs": rows}


def _without(form: str, *names: str, **others: Any) -> dict[str, Any]:
    """The fields of a form but some, and others."""
    return {**{name: x for name, x in STEPS[form].items() if name not in names}, **others}


STEPS["rows, of one scale"] = _without(
    "rows", "scale", "zero_point", scale_of_all=1.0, zero_point_of_all=3
)
STEPS["rows, of floats"] = _without("rows", "pack", *_ROWS, x="at")
STEPS["float_conv, depthwise"] = _without(
    "float_conv",
    "out_zp",
    "out_mult",
    "functions",
    "numbers",
    depthwise=True,
    out="floats",
    weight={"table": "taps"},
    bias={"table": "four"},
)
STEPS["attention, causal"] = _without("attention", "mask", "mask_is_bool", "mask_strides", "starts",
                                      causal=True)  # fmt: skip
STEPS["cached_attention, of floats"] = _without(
    "cached_attention", "key_scales", "value_scales", "key_scales_strides", "value_scales_strides"
)
STEPS["lookup, of floats"] = _without(
    "lookup", "dense", "dense_stride", "places", "a_mult", "out_zp", out_stride=16
)


def kind_of(form: str) -> str:
    """The kind of step."""
    return form.partition(",")[0]


def placed(form: str) -> dict[str, Any]:
    """The fields of a step in an arena, in places of their own."""
    fields = copy.deepcopy(STEPS[form])
    for number, (name, field) in enumerate(fields.items()):
        at = number * _APART
        if field == "image":
            fields[name] = [0, at, *_AT[2:7], 16, 16, 8, 4]
        elif field == "floats":
            fields[name] = [0, at, *_AT[2:7], 64, 64, 32, 16]
        elif field == "at":
            fields[name] = [0, at]
    return fields


def addresses(form: str) -> list[str]:
    """The fields that say where something lies."""
    return [name for name, field in STEPS[form].items() if field in ("at", "image", "floats")]


def step_file(path: Path, form: str, fields: Mapping[str, Any]) -> Path:
    """A program that fills the arena from its input, takes the step and returns all of it."""
    steps = [
        copy_step((1, 0), (0, 0), ARENA),
        (kind_of(form), fields),
        copy_step((0, 0), (2, 0), ARENA),
    ]
    return write(path, [plan(ARENA, BYTES, BYTES, steps)], **_packs())
