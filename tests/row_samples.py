"""Operands of the row ops and of attention, small but of odd sizes."""

from __future__ import annotations

from typing import Any

import torch

from x86quant.ops.rows import CODES, NORMED, TOTAL

_G = torch.Generator().manual_seed(0)


def floats(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=_G)


def int8s(*shape: int) -> torch.Tensor:
    return torch.randint(-127, 128, shape, dtype=torch.int8, generator=_G)


X = floats(3, 5, 16)
CODES_OF_X = dict(
    zip(("codes", "scale", "zero_point"), torch.ops.x86quant.quantize_rows(X), strict=True)
)
WEIGHT = {
    "weight": int8s(7, 16),
    "weight_scale": torch.rand(7, generator=_G) / 100,
    "bias": floats(7),
}
NORM = {
    "norm_weight": floats(7),
    "norm_bias": floats(7),
    "eps": 1e-5,
    "kind": "layer",
    "outputs": TOTAL | NORMED | CODES,
}
QKV = {
    "q": floats(2, 5, 4, 8),
    "k": floats(2, 7, 2, 8),
    "v": floats(2, 7, 2, 8),
    "mask": floats(2, 1, 1, 7),
    "causal": False,
    "scale": 0.3,
}
#: Tokens of three sentences that may be seen.
MASK = torch.tensor([[1, 1, 0, 0], [0, 1, 0, 1], [1, 1, 1, 1]]).bool()
TOLD = dict(
    zip(("places", "starts"), torch.ops.x86quant.present_tokens(MASK, True)[:2], strict=True)
)
SAMPLES: dict[str, dict[str, Any]] = {
    "quantize_rows": {"x": X},
    "linear_real": {
        "x": torch.randint(0, 256, (3, 5, 16), dtype=torch.uint8, generator=_G),
        "x_scale": 0.03,
        "x_zp": 119,
        **WEIGHT,
        "activation": "tanh",
    },
    "reorder_codes": {
        "codes": CODES_OF_X["codes"],
        "order": torch.randperm(16, generator=_G).to(torch.int32),
    },
    "linear_rows": {**CODES_OF_X, **WEIGHT, "activation": "gelu"},
    "linear_rows_rows": {**CODES_OF_X, **WEIGHT, "activation": "relu"},
    "gated_rows_rows": {
        **CODES_OF_X,
        "gate_weight": WEIGHT["weight"],
        "gate_scale": WEIGHT["weight_scale"],
        "gate_bias": None,
        "up_weight": int8s(7, 16),
        "up_scale": WEIGHT["weight_scale"],
        "up_bias": floats(7),
        "activation": "silu",
    },
    "linear_rows_norm": {**CODES_OF_X, **WEIGHT, "residual": floats(3, 5, 7), **NORM},
    "norm_rows": {"x": floats(3, 5, 7), "residual": floats(3, 5, 7), **NORM},
    "attention": QKV,
    "attention_rows": QKV,
    "cached_attention": {
        "q": floats(2, 1, 4, 8),
        "k": floats(2, 1, 2, 8),
        "v": floats(2, 1, 2, 8),
        "cache": floats(6, 2, 2, 5, 8),
        "layer": 1,
        "length": torch.tensor([3]),
        "hidden": torch.tensor([0, 2]),
        "scale": 0.3,
    },
    "int8_cached_attention": {
        "q": floats(2, 1, 4, 8),
        "k": floats(2, 1, 2, 8),
        "v": floats(2, 1, 2, 8),
        "cache": int8s(6, 2, 2, 5, 8),
        "scales": torch.rand(6, 2, 2, 5, generator=_G) / 50,
        "layer": 1,
        "length": torch.tensor([3]),
        "hidden": torch.tensor([0, 2]),
        "scale": 0.3,
    },
    "newest_sees": {
        "hidden": torch.tensor([0, 2]),
        "new": floats(2, 3, 4),
        "held": floats(2, 5, 4),
    },
    "present_tokens": {"mask": MASK, "first": True},
    "gather_tokens": {"x": floats(3, 4, 7), **TOLD},
    "take_tokens": {"x": floats(2, 4, 7), "places": torch.tensor([3, 0, -2])},
    "scatter_tokens": {"x": floats(3, 4, 7), **TOLD},
    "present_attention_rows": {
        "q": floats(3, 4, 4, 8),
        "k": floats(3, 4, 2, 8),
        "v": floats(3, 4, 2, 8),
        "starts": TOLD["starts"],
        "seen": torch.ops.x86quant.present_tokens(MASK, True)[2],
        "causal": False,
        "scale": 0.3,
    },
    "rotate": {"x": floats(2, 5, 3, 8), "cos": floats(1, 5, 8), "sin": floats(2, 5, 8)},
}
