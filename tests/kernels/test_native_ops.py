"""The native ops beside convolutions, and the interface: against plain loops, and torch's."""

from __future__ import annotations

import ctypes
import dataclasses
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.native import capi
from tests.native.levels import ISAS, lib
from x86quant.kernels.native import toolchain

__all__ = ["lib"]

OP_CASES = [
    ("copy", {}),
    ("lut", {"lut": np.random.default_rng(1).integers(0, 256, 256).astype(np.uint8)}),
    ("requant", {"a_mult": 0.37}),
    ("requant", {"a_mult": 1e30}),
    ("add", {"a_mult": 0.5, "b_mult": 0.25}),
    ("mul", {"a_mult": 0.01}),
    ("mul", {"a_mult": 0.01, "point": True}),
    ("shuffle", {"groups": 2}),
    ("shuffle", {"groups": 3}),
    ("max_pool", {"kernel": (1, 3, 3), "stride": (1, 2, 2), "padding": (0, 1, 1)}),
    ("max_pool", {"kernel": (2, 2, 3), "dilation": (1, 2, 2), "padding": (1, 1, 1)}),
    ("avg_pool", {"a_mult": 1.5, "kernel": (1, 3, 2), "stride": (1, 2, 1), "padding": (0, 1, 1)}),
    ("avg_pool", {"a_mult": 1, "kernel": (1, 3, 3), "padding": (0, 1, 1), "count_include_pad": 1}),
    ("adaptive_pool", {"a_mult": 0.9, "to": (1, 1, 1)}),
    ("adaptive_pool", {"a_mult": 1.0, "to": (1, 3, 5)}),
    ("nearest", {"to": (2, 14, 9), "scale": (1.0, 0.5, 1.0)}),
    ("bilinear", {"a_mult": 1.1, "to": (2, 14, 18), "scale": (1.0, 0.5, 0.5)}),
    (
        "bilinear",
        {"a_mult": 1.0, "to": (2, 4, 3), "scale": (1.0, 2.0, 4.0), "align_corners": 1},
    ),
]


OP_IDS = [f"{kind}{index}" for index, (kind, _) in enumerate(OP_CASES)]


def op_tensors(
    kind: str, fields: dict[str, object], channels: int, wide: bool
) -> dict[str, object]:
    """Inputs, an output and the fields of ``xq_op``; ``wide`` cuts them from wider tensors."""
    rng = np.random.default_rng(channels)
    fields = dict(fields)
    channels -= channels % int(fields.get("groups", 1))  # type: ignore[call-overload]
    n, size = 2, (2, 7, 9)
    to = fields.pop("to", size)
    if kind.endswith("pool") and "kernel" in fields:
        ones = (1, 1, 1)
        axes = (size, *(fields.get(f, ones) for f in ("kernel", "stride", "dilation")))
        pads = fields.get("padding", (0, 0, 0))
        to = tuple(
            (s + 2 * p - d * (k - 1) - 1) // t + 1
            for s, k, t, d, p in zip(*axes, pads, strict=True)  # type: ignore[call-overload]
        )

    def tensor(*shape: int) -> capi.Bytes:
        extra = 5 if wide else 0
        full = rng.integers(0, 256, (*shape, channels + extra)).astype(np.uint8)
        return full[..., extra // 2 : extra // 2 + channels]

    point = fields.pop("point", False)
    fields["a"], fields["out"] = tensor(n, *size), tensor(n, *to)  # type: ignore[misc]
    if kind in ("add", "mul"):
        fields["b"] = tensor(n, *((1, 1, 1) if point else size))
    return fields | {"a_zp": 17, "b_zp": 200, "out_zp": 30, "lo": 3, "hi": 250}


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("kind", "fields"), OP_CASES, ids=OP_IDS)
@pytest.mark.parametrize("channels", [6, 12, 24, 63, 192])
@pytest.mark.parametrize("wide", [False, True])
def test_ops_give_the_bytes_of_the_plain_loops(
    lib: capi.Library,
    isa: str,
    kind: str,
    fields: dict[str, object],
    channels: int,
    wide: bool,
) -> None:
    made = op_tensors(kind, fields, channels, wide)
    out = made.pop("out")
    assert isinstance(out, np.ndarray)
    want, got = (np.lib.stride_tricks.as_strided(o, out.shape, out.strides) for o in (out, out))
    lib.op(kind, "reference", out=want, **made)  # type: ignore[arg-type]
    want = want.copy()
    whole = out.base
    assert whole is not None
    around = whole.copy()  # with what the plain loops gave
    out[...] = 0
    lib.op(kind, isa, out=got, **made)  # type: ignore[arg-type]
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(whole, around)  # nothing beside it was written


@pytest.mark.parametrize(
    ("kind", "fields", "function"),
    [
        (
            "max_pool",
            {"kernel": (1, 3, 3), "stride": (1, 2, 2), "padding": (0, 1, 1)},
            lambda x: torch.nn.functional.max_pool3d(x, (1, 3, 3), (1, 2, 2), (0, 1, 1)),
        ),
        (
            "avg_pool",
            {"kernel": (1, 3, 3), "stride": (1, 2, 2), "padding": (0, 1, 1)},
            lambda x: torch.nn.functional.avg_pool3d(
                x, (1, 3, 3), (1, 2, 2), (0, 1, 1), count_include_pad=False
            ),
        ),
        (
            "avg_pool",
            {"kernel": (1, 2, 3), "padding": (0, 1, 1), "count_include_pad": 1},
            lambda x: torch.nn.functional.avg_pool3d(x, (1, 2, 3), 1, (0, 1, 1)),
        ),
        (
            "adaptive_pool",
            {"to": (1, 3, 5)},
            lambda x: torch.nn.functional.adaptive_avg_pool3d(x, (1, 3, 5)),
        ),
        (
            "nearest",
            {"to": (2, 14, 18), "scale": (1.0, 0.5, 0.5)},
            lambda x: torch.nn.functional.interpolate(x, (2, 14, 18)),
        ),
        (
            "bilinear",
            {"to": (2, 14, 18), "scale": (1.0, 0.5, 0.5)},
            lambda x: torch.stack(
                [
                    torch.nn.functional.interpolate(s, (14, 18), mode="bilinear")
                    for s in x.unbind(2)
                ],
                2,
            ),
        ),
    ],
)
def test_pools_and_upsampling_agree_with_torch(
    lib: capi.Library,
    kind: str,
    fields: dict[str, object],
    function: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    made = op_tensors(kind, {"a_mult": 1.0, **fields}, 21, False)
    out = made.pop("out")
    made |= {"a_zp": 0, "out_zp": 0, "lo": 0, "hi": 255}
    lib.op(kind, "reference", out=out, **made)  # type: ignore[arg-type]
    x = torch.from_numpy(made["a"].astype(np.float64)).permute(0, 4, 1, 2, 3)  # type: ignore[attr-defined]
    want = function(x).permute(0, 2, 3, 4, 1).numpy()
    assert np.abs(out - want).max() <= 0.5 + 1e-4


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("each", [4, 8])
def test_the_grouped_algorithm_permutes_quads(lib: capi.Library, isa: str, each: int) -> None:
    rng = np.random.default_rng(each)
    channels = 9 * each
    weight = rng.integers(-128, 128, (channels, each, 1, 3, 3)).astype(np.int8)
    mult = np.full(channels, 1e-3, np.float32)
    spec = capi.ConvSpec(weight, mult, groups=9, stride=(1, 2, 1), padding=(0, 1, 1), in_zp=77)
    x = rng.integers(0, 256, (2, 1, 9, 11, channels)).astype(np.uint8)
    want, got = np.zeros((2, 2, 1, 5, 11, channels), np.uint8)
    lib.conv(lib.pack(spec, "reference"), x, want)
    lib.conv(lib.pack(spec, isa, "grouped"), x, got)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("isa", ["reference", *ISAS])
@pytest.mark.parametrize("kind", ["adaptive_pool", "avg_pool"])
@pytest.mark.parametrize("code", [254, 255])
def test_averages_of_more_pixels_than_an_int32_can_sum(
    lib: capi.Library, isa: str, kind: str, code: int
) -> None:
    rows, columns = 3000, 3001
    assert 255 * rows * columns > 2**31
    x = np.full((1, 1, rows, columns, 1), code, np.uint8)
    out = np.zeros((1, 1, 1, 1, 1), np.uint8)
    fields = {"kernel": (1, rows, columns)} if kind == "avg_pool" else {}
    lib.op(kind, isa, x, out, a_mult=1.0, **fields)
    assert out.item() == code


@pytest.mark.parametrize("isa", ["reference", *ISAS])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("field", ["mult", "bias", "res_mult"])
def test_numbers_that_are_not_finite_are_refused(
    lib: capi.Library, isa: str, value: float, field: str
) -> None:
    weight = np.ones((8, 4, 1, 1, 1), np.int8)
    good = capi.ConvSpec(weight, np.ones(8, np.float32), np.ones(8, np.float32), residual=True)
    lib.pack(good, isa)
    values = np.full(8, value, np.float32)
    values[:7] = 1
    spec = dataclasses.replace(good, **{field: values if field != "res_mult" else value})
    with pytest.raises(capi.NativeError, match="not finite"):
        lib.pack(spec, isa)
    x = np.zeros((1, 1, 1, 1, 4), np.uint8)
    with pytest.raises(capi.NativeError, match="not finite"):
        lib.op("requant", isa, x, x.copy(), a_mult=value)


def enum(name: str) -> dict[str, int]:
    """An enum of native.h, names without what they begin with, in lower case."""
    header = (Path(toolchain.__file__).parent / "native.h").read_text()
    body = header.partition(f"typedef enum {name} {{")[2].partition("}")[0]
    return {
        found[1].lower(): int(found[2]) for found in re.finditer(r"XQ_[A-Z]+_(\w+) = (\d+)", body)
    }


def test_numbers_written_in_python_are_those_of_the_header() -> None:
    assert enum("xq_isa") == capi.ISAS
    assert enum("xq_algo") == capi.ALGOS
    assert enum("xq_op_kind") == {name: number for number, name in enumerate(capi.OPS)}


@pytest.mark.parametrize(
    ("struct", "view"),
    [
        ("xq_tensor", capi.Tensor),
        ("xq_conv", capi.Conv),
        ("xq_requant", capi.Requant),
        ("xq_conv_call", capi.ConvCall),
        ("xq_op", capi.Op),
    ],
)
def test_structs_written_in_python_are_those_of_the_header(
    struct: str, view: type[ctypes.Structure]
) -> None:
    header = (Path(toolchain.__file__).parent / "native.h").read_text()
    body = header.partition(f"typedef struct {struct} {{")[2].partition(f"}} {struct};")[0]
    body = re.sub(r"//.*", "", body)
    fields = [
        name
        for statement in body.split(";")
        for name in re.findall(r"(\w+)(?:\[\d\])?\s*(?:,|$)", statement.strip())
    ]
    assert fields == [field[0].rstrip("_") for field in view._fields_]


@pytest.mark.parametrize(
    ("compiler", "reason"),
    [
        ("there-is-no-such-compiler", "there is no C++ compiler"),
        ("c++ -std=c++20 -DXQ_TARGET=1 -Werror -Wfatal-errors", "cannot build it"),
        ("c++", None),
    ],
)
def test_the_compiler_is_tried_before_it_is_used(
    compiler: str, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if compiler.startswith("c++") and shutil.which("c++") is None:
        pytest.skip("no compiler is installed")
    monkeypatch.setenv("CXX", compiler)
    found = toolchain.why_not()
    if reason is None:
        assert found is None
    else:
        assert found is not None
        assert reason in found
        assert "\n" not in found


def test_bad_calls_are_refused(lib: capi.Library) -> None:
    weight = np.ones((8, 4, 1, 3, 3), np.int8)
    spec = capi.ConvSpec(weight, np.ones(8, np.float32))
    packed = lib.pack(spec, "reference")
    x, out = np.zeros((1, 1, 5, 5, 4), np.uint8), np.zeros((1, 1, 3, 3, 8), np.uint8)
    with pytest.raises(capi.NativeError, match="do not fit"):
        lib.conv(packed, x[..., :3], out)
    with pytest.raises(capi.NativeError, match="do not fit"):
        lib.conv(packed, x, out[:, :, :2])
    with pytest.raises(capi.NativeError, match="argument"):
        lib.conv(capi.aligned(packed.size), x, out)
    with pytest.raises(capi.NativeError, match="refuses"):
        lib.pack(spec, "avx2", "depthwise")
    with pytest.raises(capi.NativeError, match="do not fit"):
        lib.op("add", "reference", x, x, b=out)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("channels", [1, 6, 63])
@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4), (0, 4, 1, 2, 3), (4, 0, 1, 2, 3)])
def test_codes_are_looked_up_as_floats_wherever_these_lie(
    lib: capi.Library, isa: str, channels: int, order: tuple[int, ...]
) -> None:
    rng = np.random.default_rng(channels)
    codes = rng.integers(0, 256, (2, 2, 5, 7, channels)).astype(np.uint8)
    table = rng.normal(size=256).astype(np.float32)
    shape = [codes.shape[dim] for dim in order]
    out = np.zeros(shape, np.float32).transpose(np.argsort(order))
    lib.op("lut_real", isa, codes, out, reals=table)
    np.testing.assert_array_equal(out, table[codes])
