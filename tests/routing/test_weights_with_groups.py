"""Rules know the bits of a linear's weight and the features that share a scale."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import x86quant
from x86quant.errors import InvalidInputError
from x86quant.kernels.native import NativeBlocksKernel
from x86quant.packing.linear_dynamic import row_routes
from x86quant.plain_ops import PLAIN
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


def blocks_from(rows: int) -> Any:
    return x86quant.override(
        "native_blocks", op="linear", weight_bits=4, rows=f">= {rows}", caller="graph"
    )


def test_whether_blocks_are_unpacked_is_a_rule() -> None:
    """Other times, the same bytes, and one pack for both kernels."""
    layer = layers()["groups of 32"]
    alone = layer.pack().bytes()
    inputs = [torch.randn(rows, 96) for rows in (1, 6, 7, 40)]
    want = [PLAIN["linear_dynamic"](x, *layer.operands, None) for x in inputs]
    with blocks_from(7):
        layer.pack_again()
        found = [(limit, choice.kernel) for limit, choice in layer.choices]
        assert found[:2] == [(6, "native"), (None, "native_blocks")]
        assert layer.pack().bytes() == alone
        for x, expected in zip(inputs, want, strict=True):
            assert torch.equal(layer(x), expected)
        routes = row_routes(layer.operands, None)
        assert routes is not None
        assert [routes.choice_for(rows).kernel for rows in (6, 7)] == ["native", "native_blocks"]
    layer.pack_again()
    with x86quant.override("native", op="linear", caller="graph"):
        assert kernels(layer) == {"native"}


def test_blocks_are_of_4_bits_and_short_groups() -> None:
    kernel, cpu = NativeBlocksKernel(), x86quant.cpu()
    spec = OpSpec("linear", 2048, 8, dynamic=True, caller="graph", bits=4, weight_group=512)
    assert not kernel.not_supported_reasons(spec, cpu)
    (long,) = kernel.not_supported_reasons(spec.replace(weight_group=1024), cpu)
    assert "512 features at most" in long
    (wide,) = kernel.not_supported_reasons(spec.replace(bits=8), cpu)
    assert "weights of 4 bits" in wide


def test_profiles_say_how_prompts_are_multiplied() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    data = [(torch.randn(16, 64),)] * 2
    options = {"mode": "dynamic", "speed_check": False, "progress": False, "fuse_blocks": True}
    with blocks_from(7):
        net = x86quant.quantize(model, data, weight_bits=4, **options)
        for rows, kernel in ((3, "native"), (16, "native_blocks")):
            text = str(x86quant.profile(net, (torch.randn(rows, 64),), runs=2))
            assert ("native_blocks" in text) == (kernel == "native_blocks"), text
