"""The ops: registration, exact numerics against integer arithmetic, and clear refusals."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from tests import row_samples
from x86quant.errors import InvalidInputError
from x86quant.ops import SCHEMAS
from x86quant.ops.embedding import TableFormat

OPS = torch.ops.x86quant


def codes(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)


def weights(*shape: int, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-128, 128, shape, dtype=torch.int8, generator=generator)


X = codes(2, 4, 7, 6)
TABLE = codes(256, seed=5)
IN = {"x_scale": 0.05, "x_zp": 3}
OUT = {"out_scale": 0.1, "out_zp": 100}
PAIR = {"a_scale": 0.05, "a_zp": 3, "b_scale": 0.02, "b_zp": 200}
CONV = {
    "weight": weights(6, 2, 3, 3),
    "weight_scales": torch.linspace(0.001, 0.01, 6),
    "bias": torch.linspace(-1, 1, 6),
    "stride": [2, 1],
    "padding": [1, 2],
    "dilation": [1, 2],
    "groups": 2,
    "transposed": False,
    "output_padding": [0, 0],
}

FLOAT_LINEAR = {
    "weight": weights(7, 16),
    "weight_scale": torch.rand(7) / 100,
    "bias": torch.randn(7),
    "activation": "gelu",
}
FLOAT_CONV: dict[str, Any] = {
    "x": torch.randn(2, 4, 7, 6),
    "weight": torch.randn(6, 4, 3, 2),
    "bias": torch.randn(6),
    "stride": [2, 1],
    "padding": [1, 0],
    "dilation": [1, 2],
    "groups": 1,
    "functions": ["add", "least", "most", "times_x", "mul", "x", "sigmoid", "tanh", "times_x"],
    "numbers": [3.0, 0.0, 6.0, 0.0, 1 / 6, 0.0, 0.0, 0.0, 0.0],
}
TABLES = {
    "rows": [torch.ops.quantized.embedding_bag_4bit_prepack(torch.randn(9, 8)),
             torch.ops.quantized.embedding_bag_byte_prepack(torch.randn(5, 6))],
    "indices": [torch.tensor([1, 8, 0]), torch.tensor([2, 2, 4])],
    "offsets": [torch.tensor([0, 1]), torch.tensor([0, 2])],
    "weights": [],
    "formats": [*TableFormat(8, 4, True).numbers, *TableFormat(6, mode="max").numbers],
    "names": ["a", ""],
}  # fmt: skip
RECURRENT: dict[str, Any] = {
    "x": codes(4, 2, 6),
    "weights": [weights(20, 6), weights(20, 5, seed=2)] * 2,
    "scales": [torch.linspace(0.001, 0.01, 20)] * 4,
    "biases": [torch.linspace(-1, 1, 20)] * 4,
    "kind": "lstm",
    "batch_first": False,
    **IN,
    "out_scale": 1 / 128,
    "out_zp": 128,
}
SAMPLES: dict[str, dict[str, Any]] = {
    "recurrent": RECURRENT,
    "recurrent_last": {**RECURRENT, "c": torch.linspace(-1, 1, 20).reshape(2, 2, 5)},
    "embedding_bags": TABLES,
    "embedding_rows": {
        "rows": TABLES["rows"][0],
        "ids": torch.tensor([[1, 8], [0, 3]]),
        "form": TableFormat(8, 4, True).numbers,
        "name": "a",
    },
    "interact": {"dense": torch.randn(2, 4), "vectors": torch.randn(2, 3, 4), "places": [5, 7, 0]},
    "interact_bags": {
        "dense": torch.randn(2, 8),
        **{name: values[:1] for name, values in TABLES.items() if name != "formats"},
        "formats": TABLES["formats"][:7],
        "include_last_offset": False,
        "places": None,
        **OUT,
    },
    "quantize": {"x": torch.randn(2, 3, 4, 5), **OUT},
    "dequantize": {"x": X, **IN},
    "dequantize_weight": {
        "weight": weights(6, 3),
        "weight_scales": torch.rand(6),
        "axis": 0,
    },
    "requantize": {"x": X, **IN, **OUT},
    "lut": {"x": X, "table": TABLE},
    "lut_real": {"x": X, "table": torch.linspace(-1, 9, 256)},
    "conv": {
        "x": X,
        **CONV,
        **IN,
        **OUT,
        "residual": codes(2, 6, 4, 6),
        "lut": TABLE,
        "slopes": torch.linspace(-0.5, 1.5, 6),
    },
    "linear_dynamic": {"x": torch.randn(3, 5, 16), **FLOAT_LINEAR},
    "linear_weight_only": {"x": torch.randn(3, 5, 16), **FLOAT_LINEAR},
    "linear": {
        "x": codes(3, 5, 16),
        "weight": weights(8, 16),
        "weight_scales": torch.rand(8) * 0.01,
        "bias": None,
        **IN,
        **OUT,
    },
    "conv_real": {
        "x": X,
        "weight": weights(6, 3, 2, 4),
        "weight_scale": torch.rand(6) * 0.01 + 1e-3,
        "bias": torch.randn(6),
        "stride": [2, 1],
        "padding": [1, 0],
        "dilation": [1, 2],
        **IN,
        "activation": "relu",
    },
    "float_conv": FLOAT_CONV,
    "float_conv_codes": {**FLOAT_CONV, **OUT},
    "add": {"a": X, "b": codes(2, 4, 7, 6, seed=2), **PAIR, **OUT},
    "mul": {"a": X, "b": codes(2, 4, 1, 1, seed=2), **PAIR, **OUT, "lo": 100, "lut": TABLE},
    "affine": {"x": X, "scale": torch.rand(4), "shift": torch.rand(4), "axis": 1, **IN, **OUT},
    "max_pool": {
        "x": X,
        "kernel_size": [3, 3],
        "stride": [2, 2],
        "padding": [1, 1],
        "dilation": [1, 1],
        "ceil_mode": True,
    },
    "pad": {"x": X, "x_zp": 7, "before": [1, 0], "after": [2, 3], "mode": "reflect"},
    "avg_pool": {
        "x": X,
        "kernel_size": [3, 3],
        "stride": [2, 2],
        "padding": [1, 1],
        "ceil_mode": False,
        "count_include_pad": True,
        **IN,
        **OUT,
    },
    "adaptive_avg_pool": {"x": X, "output_size": [1, 1], **IN, **OUT},
    "adaptive_max_pool": {"x": X, "output_size": [1, -1]},
    "cat": {"xs": [X, X], "dim": 1, "x_scales": [0.05, 0.1], "x_zps": [3, 100], **OUT},
    "join": {"xs": [torch.rand(2, 3), torch.rand(1, 3)], "dim": 0},
    "upsample": {
        "x": X,
        "size": None,
        "scale_factor": [2.0, 2.0],
        "mode": "bilinear",
        "align_corners": False,
        **IN,
        **OUT,
    },
    "group_norm": {
        "x": X,
        "groups": 2,
        "weight": torch.rand(4),
        "bias": torch.rand(4),
        "eps": 1e-5,
        **IN,
        **OUT,
        "lo": 20,
        "lut": TABLE,
    },
    "layer_norm": {
        "x": X,
        "axis": 1,
        "weight": torch.rand(4),
        "bias": torch.rand(4),
        "eps": 1e-5,
        **IN,
        **OUT,
    },
}


def call(name: str, **changes: Any) -> torch.Tensor:
    result: torch.Tensor = getattr(OPS, name)(**{**SAMPLES[name], **changes})
    return result


def rounded(steps: np.ndarray, zero_point: int, lo: int = 0, hi: int = 255) -> np.ndarray:
    return np.clip(np.rint(steps) + zero_point, lo, hi).astype(np.uint8)


def within_a_step(actual: torch.Tensor, expected: np.ndarray) -> bool:
    return bool(np.abs(actual.numpy().astype(int) - expected.astype(int)).max() <= 1)


def test_every_op_has_a_sample() -> None:
    assert SAMPLES.keys() | row_samples.SAMPLES.keys() == SCHEMAS.keys()


@pytest.mark.parametrize("name", SAMPLES)
def test_opcheck(name: str) -> None:
    torch.library.opcheck(getattr(OPS, name).default, (), SAMPLES[name])


@pytest.mark.parametrize("name", sorted(SAMPLES.keys() - {"dequantize_weight", "quantize"}))
def test_reads_any_strides_and_returns_channels_last(name: str) -> None:
    expected = call(name)
    strided = {
        key: value.transpose(-1, -2).contiguous().transpose(-1, -2)
        if isinstance(value, torch.Tensor) and value.dim() == 4 and value.dtype == torch.uint8
        else value
        for key, value in SAMPLES[name].items()
    }
    torch.testing.assert_close(getattr(OPS, name)(**strided), expected, rtol=0, atol=0)
    if isinstance(expected, torch.Tensor) and expected.dim() == 4:
        assert expected.is_contiguous(memory_format=torch.channels_last)


def test_quantize_rounds_half_to_even_and_saturates() -> None:
    x = torch.tensor([0.5, 1.5, 2.5, -0.5, 1e30, -1e30, float("inf"), float("nan")])
    actual = OPS.quantize(x, 1.0, 10)
    assert actual.tolist() == [10, 12, 12, 10, 255, 0, 255, 0]


def test_dequantize_undoes_quantize() -> None:
    every = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(OPS.quantize(OPS.dequantize(every, 0.3, 77), 0.3, 77), every)


def accumulate(x: np.ndarray, w: np.ndarray, c: dict[str, Any]) -> np.ndarray:
    """The integer sums of a grouped 2d convolution, by four plain loops."""
    (sh, sw), (ph, pw), (dh, dw) = c["stride"], c["padding"], c["dilation"]
    padded = np.pad(x, ((0, 0), (0, 0), (ph, ph), (pw, pw)))
    out_channels, per_group, kh, kw = w.shape
    oh = (padded.shape[2] - dh * (kh - 1) - 1) // sh + 1
    ow = (padded.shape[3] - dw * (kw - 1) - 1) // sw + 1
    acc = np.zeros((x.shape[0], out_channels, oh, ow), dtype=np.int64)
    for o in range(out_channels):
        first = o // (out_channels // c["groups"]) * per_group
        for i in range(kh):
            for j in range(kw):
                window = padded[
                    :,
                    first : first + per_group,
                    i * dh : i * dh + (oh - 1) * sh + 1 : sh,
                    j * dw : j * dw + (ow - 1) * sw + 1 : sw,
                ]
                acc[:, o] += (window * w[o, :, i, j].reshape(1, -1, 1, 1)).sum(1)
    return acc


def test_conv_equals_integer_arithmetic_with_its_whole_epilogue() -> None:
    acc = accumulate(
        X.numpy().astype(np.int64) - IN["x_zp"], CONV["weight"].numpy().astype(np.int64), CONV
    )
    per_channel = (1, -1, 1, 1)
    factor = CONV["weight_scales"].double().numpy() * IN["x_scale"] / OUT["out_scale"]
    steps = acc * factor.reshape(per_channel)
    steps += (CONV["bias"].double().numpy() / OUT["out_scale"]).reshape(per_channel)
    residual = codes(2, 6, 4, 6, seed=9)
    steps += (residual.numpy().astype(int) - 7) * (0.03 / OUT["out_scale"])
    slopes = np.linspace(-0.5, 1.5, 6).reshape(per_channel)
    expected = rounded(np.where(steps < 0, steps * slopes, steps), OUT["out_zp"], lo=100, hi=180)
    settings = {"residual": residual, "residual_scale": 0.03, "residual_zp": 7}
    plain = call("conv", **settings, lo=100, hi=180, lut=None)
    assert within_a_step(plain, expected)
    assert plain.unique().numel() > 20
    assert torch.equal(call("conv", **settings, lo=100, hi=180), OPS.lut(plain, TABLE)), (
        "the table acts on the clamped code"
    )


def test_sums_beyond_float32_are_exact() -> None:
    """K = 4096 at the extremes: one unit in 130 million still moves the result."""
    x = torch.full((1, 4096), 255, dtype=torch.uint8)
    x[0, 0] = 1
    w = torch.full((2, 4096), 127, dtype=torch.int8)
    w[1, 0] = 126
    common = {"weight_scales": torch.ones(2), "x_scale": 1.0, "x_zp": 0, "out_scale": 1.0}
    total = 255 * 127 * 4095 + 127
    bias = torch.full((2,), -total, dtype=torch.int32)
    out = OPS.linear(x, w, bias=bias, **common, out_zp=255)
    assert out.tolist() == [[255, 254]]


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("transposed", [False, True])
def test_conv_of_every_rank_matches_the_float_convolution(dims: int, transposed: bool) -> None:
    x, w = codes(2, 4, *[5] * dims), weights(*((4, 3) if transposed else (6, 2)), *[3] * dims)
    function = getattr(F, f"conv{'_transpose' if transposed else ''}{dims}d")
    sizes = {"stride": [2] * dims, "padding": [1] * dims, "dilation": [1] * dims}
    more = {"output_padding": [1] * dims} if transposed else {}
    real = function(x.double() - 3, w.double(), groups=2, **sizes, **more)
    steps = real.numpy() * (0.05 * 0.01 / 0.1)
    actual = OPS.conv(
        x,
        weight=w,
        weight_scales=torch.full((6,), 0.01),
        bias=None,
        **sizes,
        groups=2,
        transposed=transposed,
        output_padding=[int(transposed)] * dims,
        **IN,
        **OUT,
    )
    assert within_a_step(actual, rounded(steps, OUT["out_zp"]))


@pytest.mark.parametrize("name", ["add", "mul"])
def test_binary_ops_match_the_reals(name: str) -> None:
    a = OPS.dequantize(SAMPLES[name]["a"], 0.05, 3).double()
    b = OPS.dequantize(SAMPLES[name]["b"], 0.02, 200).double()
    real = a + b if name == "add" else a * b
    assert within_a_step(call(name, lo=0, lut=None), rounded(real.numpy() / 0.1, 100))


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_convolutions_that_are_not_rounded_match_the_reals(dims: int) -> None:
    function = getattr(F, f"conv{dims}d")
    x, weight = codes(2, 5, *[7, 6, 5][:dims]), weights(3, 5, *[2, 3, 2][:dims])
    window = {"stride": [2, 1, 1][:dims], "padding": [1, 2, 0][:dims], "dilation": [1, 2, 1][:dims]}
    scale, bias = torch.tensor([0.01, 0.02, 0.5]), torch.randn(3)
    sums = function(x.double() - 9, weight.double(), None, *window.values()).movedim(1, -1)
    exact = (sums * (scale * 0.25).double() + bias.double()).float().movedim(-1, 1)
    found = OPS.conv_real(
        x, weight.movedim(1, -1), scale, bias, *window.values(), 0.25, 9, activation=None
    )
    assert torch.equal(found, exact)


def test_functions_of_a_float_convolution_are_those_of_torch() -> None:
    x, weight, bias = (FLOAT_CONV[name] for name in ("x", "weight", "bias"))
    how: Any = ((2, 1), (1, 0), (1, 2))
    plain: torch.Tensor = F.conv2d(x, weight, bias, *how)
    y = F.hardswish(plain)
    wanted = torch.tanh(torch.sigmoid(y)) * y
    torch.testing.assert_close(call("float_conv"), wanted)
    assert within_a_step(call("float_conv_codes"), rounded(wanted.numpy() / 0.1, 100))


def test_max_pool_padding_never_wins_even_at_code_zero() -> None:
    zeros = torch.zeros(1, 1, 2, 2, dtype=torch.uint8)
    assert call("max_pool", x=zeros).unique().tolist() == [0]


def test_avg_pool_padding_is_real_zero() -> None:
    x = torch.full((1, 1, 2, 2), 53, dtype=torch.uint8)  # real 50 * 0.05
    pooled = call("avg_pool", x=x, stride=[3, 3], out_scale=0.05, out_zp=3)
    assert pooled.item() == 3 + round(50 * 4 / 9)


def test_cat_requantizes_only_what_differs() -> None:
    same = call("cat", x_scales=[0.1, 0.1], x_zps=[100, 100])
    assert torch.equal(same, torch.cat([X, X], 1))
    mixed = call("cat")
    assert torch.equal(mixed[:, :4], call("requantize"))


@pytest.mark.parametrize(
    "name",
    ["conv", "add", "mul", "affine", "avg_pool", "adaptive_avg_pool", "group_norm", "layer_norm"],
)
def test_an_empty_batch_gives_an_empty_result(name: str) -> None:
    empty = {
        key: value[:0]
        for key, value in SAMPLES[name].items()
        if isinstance(value, torch.Tensor) and value.dim() == 4 and key != "weight"
    }
    assert call(name, **empty).shape[0] == 0


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("quantize", {"x": torch.randn(2, dtype=torch.float64)}, "must be float32.*float64"),
        ("quantize", {"out_scale": float("nan")}, "scale must be positive and finite"),
        ("quantize", {"out_scale": 0.0}, "scale must be positive and finite"),
        ("quantize", {"out_zp": 256}, "zero point must be in 0..255"),
        ("dequantize", {"x": torch.randn(2)}, "must be uint8 codes"),
        ("conv", {"x": X[0]}, "rank 4.*batch dimension"),
        ("conv", {"x": X[:, :3]}, "expected 4 input channels"),
        ("conv", {"weight": CONV["weight"].float()}, "weight must be int8"),
        ("conv", {"residual": codes(2, 6, 1, 1)}, "residual has shape"),
        ("conv", {"slopes": torch.ones(5)}, "slopes must be 6 float32 values"),
        ("conv", {"slopes": torch.ones(6, dtype=torch.float64)}, "slopes must be.*float64"),
        ("linear", {"slopes": torch.ones(1)}, "slopes must be 8"),
        ("conv", {"lo": 9, "hi": 8}, "lo <= hi"),
        ("linear", {"x": codes(3, 15)}, "expected 16 input features"),
        ("lut", {"table": TABLE[:255]}, "256 uint8 codes"),
        ("cat", {"x_zps": [3]}, "as many scales and zero points"),
        ("max_pool", {"x": X[0]}, "rank 4"),
        ("conv_real", {"x": X[0]}, "expected 4 dimensions"),
        ("conv_real", {"x": X[:, :3]}, "4 channels among them"),
        ("conv_real", {"x_zp": 256}, "zero point must be in 0..255"),
        ("conv_real", {"weight": weights(6, 4)}, "one to three dimensions"),
        ("conv_real", {"activation": "cos"}, "activation"),
        ("float_conv", {"x": FLOAT_CONV["x"][0]}, "expected 4 dimensions"),
        ("float_conv", {"x": FLOAT_CONV["x"].double()}, "float32 tensors.*float64"),
        ("float_conv", {"functions": ["cos"], "numbers": [0.0]}, "functions.*got 'cos'"),
        ("float_conv", {"functions": ["x"]}, "functions.*9 numbers"),
        ("float_conv", {"numbers": [math.inf] * 9}, "numbers must be finite"),
        ("pad", {"x_zp": 256}, "x_zp is a code"),
        ("pad", {"mode": "circular"}, "no mode 'circular'"),
        ("pad", {"after": [2]}, "are not of x"),
        ("pad", {"before": [7, 0]}, "wider than"),
    ],
)
def test_bad_input_is_refused_by_name(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message) as caught:
        call(name, **changes)
    assert "x86quant" in str(caught.value)


def test_the_document_states_every_schema() -> None:
    text = (Path(__file__).parents[2] / "docs" / "graph.md").read_text()
    tails = dict(re.findall(r"^([A-Z_]+) {2,}(.+?)(?: {3,}.*)?$", text, flags=re.MULTILINE))
    stated = {}
    rows = r"^\| (`.+?`) \| `\((.+?)\)(?: -> (.+?))?`"
    for names, *parts in re.findall(rows, text, flags=re.MULTILINE):
        for short, full in tails.items():
            parts = [re.sub(rf"\b{short}\b", full, part) for part in parts]
        arguments, returns = parts
        for name in re.findall(r"`(\w+)`", names):
            stated[name] = f"{name}({arguments}) -> {returns or 'Tensor'}"
    assert stated == SCHEMAS
