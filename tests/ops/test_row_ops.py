"""Row codes, the fused ops on them, and attention: what they mean, by plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from tests.row_samples import CODES_OF_X, NORM, QKV, SAMPLES, WEIGHT, X, floats, int8s
from x86quant.errors import InvalidInputError
from x86quant.ops.rows import CODES, NORMED, TOTAL

OPS = torch.ops.x86quant


def call(name: str, **changes: Any) -> Any:
    return getattr(OPS, name)(**{**SAMPLES[name], **changes})


def reals(codes: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor) -> torch.Tensor:
    return (codes.float() - zero_point[..., None]) * scale[..., None]


def near_codes(actual: Any, expected: Any) -> bool:
    """Row codes of values that are equal within rounding: a step of 1/255 of a row."""
    away = (reals(*actual) - reals(*expected)).abs().amax(-1)
    return bool((away <= 1.01 * expected[1] + 1e-6).all())


@pytest.mark.parametrize("name", SAMPLES)
def test_opcheck(name: str) -> None:
    torch.library.opcheck(getattr(OPS, name).default, (), SAMPLES[name])


@pytest.mark.parametrize("rows", [(), (1,), (2, 3), (0,), (2, 0)])
@pytest.mark.parametrize("activation", [None, "gelu", "gelu_tanh", "silu", "relu"])
def test_a_product_of_row_codes_is_linear_dynamic(
    rows: tuple[int, ...], activation: str | None
) -> None:
    x = 10 * torch.randn(*rows, 16)
    codes = OPS.quantize_rows(x)
    assert [t.shape for t in codes] == [x.shape, x.shape[:-1], x.shape[:-1]]
    actual = OPS.linear_rows(*codes, **WEIGHT, activation=activation)
    expected = OPS.linear_dynamic(x, **WEIGHT, activation=activation)
    if activation in (None, "relu"):
        assert torch.equal(actual, expected)
    else:  # native kernels compute these without division
        torch.testing.assert_close(actual, expected, rtol=5e-6, atol=5e-6)


def test_rows_that_are_not_finite_give_nan_and_leave_others_alone() -> None:
    x = X.clone()
    x[0, 1, 3], x[2, 4, 0] = torch.nan, -torch.inf
    codes = OPS.quantize_rows(x)
    bad = torch.zeros(3, 5, dtype=torch.bool)
    bad[0, 1] = bad[2, 4] = True
    assert torch.equal(codes[1].isnan(), bad)
    out = OPS.linear_rows(*codes, **WEIGHT)
    assert torch.equal(out.isnan().all(-1), bad)
    assert torch.equal(out[~bad], call("linear_rows", activation=None)[~bad])
    fused = call("linear_rows_norm", **dict(zip(CODES_OF_X, codes, strict=True)))
    for result in (fused[0].isnan().all(-1), fused[1].isnan().all(-1), fused[3].isnan()):
        assert torch.equal(result, bad)


def test_quantized_products_are_products_quantized() -> None:
    expected = OPS.quantize_rows(call("linear_rows", activation="relu"))
    assert near_codes(call("linear_rows_rows"), expected)


def test_gated_products() -> None:
    gate = OPS.linear_rows(**CODES_OF_X, **{**WEIGHT, "bias": None}, activation="silu")
    sample = SAMPLES["gated_rows_rows"]
    up = OPS.linear_rows(
        **CODES_OF_X, weight=sample["up_weight"], weight_scale=sample["up_scale"],
        bias=sample["up_bias"],
    )  # fmt: skip
    assert near_codes(call("gated_rows_rows"), OPS.quantize_rows(gate * up))


@pytest.mark.parametrize("kind", ["layer", "rms"])
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("outputs", range(1, 8))
def test_norms(kind: str, weighted: bool, residual: bool, outputs: int) -> None:
    changes: dict[str, Any] = {"kind": kind, "outputs": outputs}
    if not weighted:
        changes |= {"norm_weight": None, "norm_bias": None}
    if not residual:
        changes["residual"] = None
    norm = {**NORM, **changes}
    product = OPS.linear_rows(**CODES_OF_X, **WEIGHT)
    for name, first in (("linear_rows_norm", product), ("norm_rows", SAMPLES["norm_rows"]["x"])):
        if name == "norm_rows" and not residual and outputs & TOTAL:
            with pytest.raises(InvalidInputError, match="the total is x itself"):
                call(name, **changes)
            continue
        total = first + SAMPLES[name]["residual"] if residual else first
        if kind == "layer":
            normed = F.layer_norm(total, (7,), norm["norm_weight"], norm["norm_bias"], 1e-5)
        else:
            normed = F.rms_norm(total, (7,), norm["norm_weight"], 1e-5)
            normed = normed + norm["norm_bias"] if weighted else normed
        actual = call(name, **changes)
        assert actual[0].shape == (total.shape if outputs & TOTAL else (0,))
        assert actual[1].shape == (total.shape if outputs & NORMED else (0,))
        if outputs & TOTAL:
            torch.testing.assert_close(actual[0], total)
        if outputs & NORMED:
            torch.testing.assert_close(actual[1], normed)
        if outputs & CODES:
            assert near_codes(actual[2:], OPS.quantize_rows(normed))
        else:
            assert [t.numel() for t in actual[2:]] == [0, 0, 0]
        assert [t.dtype for t in actual[2:]] == [torch.uint8, torch.float32, torch.int32]


#: How far a native kernel, which may multiply in bfloat16, may be from float32.
BOUND = 2**-7


def sdpa(q: Any, k: Any, v: Any, mask: Any, causal: bool, scale: float) -> torch.Tensor:
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=True
    )
    return out.transpose(1, 2)


def masks() -> dict[str, torch.Tensor | None]:
    padding = torch.ones(2, 1, 1, 7, dtype=torch.bool)
    padding[1, ..., 4:] = False
    none_seen = torch.rand(2, 1, 5, 7) > 0.3
    none_seen[0, 0, 2] = False
    per_head = floats(1, 4, 5, 7)
    minus_infinity = torch.zeros(2, 4, 5, 7).masked_fill(~none_seen, -torch.inf)
    least = torch.zeros(2, 1, 1, 7).masked_fill(~padding, torch.finfo(torch.float32).min)
    strided = floats(2, 7, 5, 4).permute(0, 3, 2, 1)
    expanded = padding.expand(2, 4, 5, 7)
    return {
        "none": None,
        "padding": padding,
        "none_seen": none_seen,
        "per_head": per_head,
        "minus_infinity": minus_infinity,
        "least": least,
        "least_everywhere": torch.full((1, 1, 1, 7), torch.finfo(torch.float32).min),
        "strided": strided,
        "expanded": expanded,
    }


@pytest.mark.parametrize("kind", masks())
@pytest.mark.parametrize("causal", [False, True])
def test_attention_is_torchs(kind: str, causal: bool) -> None:
    mask = masks()[kind]
    combined = mask
    if causal and mask is not None:  # torch takes one or the other
        seen = torch.ones(5, 7, dtype=torch.bool).tril()
        combined = mask & seen if mask.dtype == torch.bool else mask.masked_fill(~seen, -torch.inf)
    expected = sdpa(QKV["q"], QKV["k"], QKV["v"], combined, causal and mask is None, 0.3)
    actual = call("attention", mask=mask, causal=causal)
    bound = BOUND * QKV["v"].abs().max().item()
    torch.testing.assert_close(actual, expected, rtol=0, atol=bound)
    assert actual.is_contiguous()
    rows = call("attention_rows", mask=mask, causal=causal)
    away = (reals(*rows) - expected.flatten(2)).abs().amax(-1)
    assert bool((away <= rows[1] + bound).all())


def test_heads_may_be_slices_of_one_product() -> None:
    product = floats(2, 5, 3 * 4 * 8)
    q, k, v = (t.unflatten(-1, (4, 8)) for t in product.chunk(3, -1))
    expected = OPS.attention(q.contiguous(), k.contiguous(), v.contiguous(), None, False, 0.3)
    assert torch.equal(OPS.attention(q, k, v, None, False, 0.3), expected)
    swapped = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v))
    assert torch.equal(OPS.attention(*swapped, None, False, 0.3), expected)


def test_empty_sequences() -> None:
    assert call("attention", q=QKV["q"][:, :0]).shape == (2, 0, 4, 8)
    assert call("attention", q=QKV["q"][:0], k=QKV["k"][:0], v=QKV["v"][:0], mask=None).numel() == 0
    no_keys = call("attention", k=QKV["k"][:, :0], v=QKV["v"][:, :0], mask=None)
    assert torch.equal(no_keys, torch.zeros(2, 5, 4, 8))


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("quantize_rows", {"x": X.double()}, "x must be float32, got torch.float64"),
        ("quantize_rows", {"x": torch.tensor(1.0)}, "must have a dimension"),
        ("linear_rows", {"codes": X}, "codes must be uint8.*quantize_rows"),
        ("linear_rows", {"codes": CODES_OF_X["codes"][..., :15]}, "expected 16 input features"),
        ("linear_rows", {"scale": CODES_OF_X["scale"][0]}, r"scale must be .* of shape \(3, 5\)"),
        ("linear_rows", {"zero_point": CODES_OF_X["scale"]}, "zero_point must be torch.int32"),
        ("linear_rows", {"weight": floats(7, 16)}, "weight must be int8"),
        ("linear_rows", {"weight_scale": torch.ones(6)}, "weight_scale must be float32"),
        ("linear_rows", {"activation": "elu"}, "unknown activation 'elu'"),
        ("linear_rows_rows", {"bias": torch.ones(6)}, "bias must be float32"),
        ("gated_rows_rows", {"up_weight": int8s(7, 15)}, "expected 15 input features"),
        (
            "gated_rows_rows",
            {"up_weight": int8s(6, 16), "up_scale": torch.ones(6), "up_bias": None},
            "equally many output features, got 7 and 6",
        ),
        ("linear_rows_norm", {"residual": floats(5, 7)}, "residual has shape"),
        ("linear_rows_norm", {"residual": floats(3, 5, 7).double()}, "residual must be float32"),
        ("linear_rows_norm", {"norm_weight": floats(6)}, "norm_weight must be float32"),
        ("norm_rows", {"norm_bias": floats(7).half()}, "norm_bias must be float32"),
        ("norm_rows", {"eps": float("nan")}, "eps must be finite"),
        ("norm_rows", {"kind": "batch"}, "unknown kind of norm 'batch'; use one of layer, rms"),
        ("norm_rows", {"outputs": 0}, "outputs is a sum of 1"),
        ("norm_rows", {"outputs": 8}, "outputs is a sum of 1"),
        ("attention", {"q": QKV["q"].double()}, "q must be float32 of shape"),
        ("attention", {"q": QKV["q"][0]}, "q must be float32 of shape"),
        ("attention", {"k": QKV["k"][:, :6]}, "k and v must have one shape"),
        ("attention", {"q": QKV["q"][:1]}, "agree in batch and size"),
        ("attention", {"q": QKV["q"][..., :7]}, "agree in batch and size"),
        ("attention", {"q": QKV["q"][:, :, :3]}, "3 heads of q must be a multiple of the 2"),
        ("attention", {"scale": float("inf")}, "scale must be finite"),
        ("attention", {"mask": torch.ones(2, 1, 1, 7, dtype=torch.int64)}, "mask must be bool or"),
        ("attention", {"mask": torch.zeros(2, 7)}, "mask has shape"),
        ("attention", {"mask": torch.zeros(2, 1, 1, 6)}, "mask has shape"),
        ("attention_rows", {"mask": torch.zeros(2, 1, 5, 1)}, "mask has shape"),
    ],
)
def test_bad_input_is_refused_by_name(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message) as caught:
        call(name, **changes)
    assert "x86quant" in str(caught.value)
