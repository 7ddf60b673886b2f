"""Rules know the bits of a linear's weight and the features that share a scale."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import x86quant
from x86quant.errors import InvalidInputError
from x86quant.spec import OpSpec
from x86quant.tables.features import FEATURES


def layers() -> dict[str, x86quant.DynamicLinear]:
    torch.manual_seed(0)
    linear = nn.Linear(96, 32)
    return {
        "8 bits": x86quant.DynamicLinear.from_float(linear),
        "groups of 32": x86quant.DynamicLinear.from_float(linear, bits=4),
        "groups of 16": x86quant.DynamicLinear.from_float(nn.Linear(80, 32), bits=4),
    }


def kernels(layer: x86quant.DynamicLinear) -> set[str]:
    layer.pack_again()
    return {choice.kernel for _, choice in layer.choices}


@pytest.mark.parametrize(
    ("condition", "meant"),
    [
        ({"weight_bits": 4}, {"groups of 32", "groups of 16"}),
        ({"weight_bits": 8}, {"8 bits"}),
        ({"weight_group": 16}, {"groups of 16"}),
        ({"weight_group": ">= 1"}, {"groups of 32", "groups of 16"}),
    ],
)
def test_rules_choose_by_them(condition: dict[str, object], meant: set[str]) -> None:
    with x86quant.override("reference", op="linear", **condition):
        found = {name: kernels(layer) for name, layer in layers().items()}
    assert {name for name, used in found.items() if used == {"reference"}} == meant


def test_explain_says_them() -> None:
    text = str(x86quant.explain(nn.ModuleDict(layers())))
    for group in (32, 16):
        assert f"4 bits in groups of {group}" in text


def test_a_table_has_neither_and_they_are_at_least_one() -> None:
    bag = OpSpec("embedding_bag", 100, 32, bits=4)
    linear = OpSpec("linear", 64, 32, bits=4, weight_group=32)
    cpu = x86quant.cpu()
    values = [
        [FEATURES[f"weight_{x}"].get(y, cpu) for x in ("bits", "group")] for y in (bag, linear)
    ]
    assert values == [[None, None], [4, 32]]
    with pytest.raises(InvalidInputError, match="weight_bits"):
        x86quant.override("native", op="linear", weight_bits=0)
