"""With ``pytorch-2.0`` in force, the kernel chosen is the one stock PyTorch chooses.

Weights are small enough to be safe from saturation, so that only preference is compared: a
layer whose stock kernel would overflow is, on purpose, not sent there.
"""

from __future__ import annotations

import csv
from collections.abc import Callable
from importlib import resources
from typing import Any

import pytest
import torch

import x86quant
from tests.stock_tensors import engine, weight
from x86quant.kernels import all_kernels

Q = torch.ops.quantized
_FILE = resources.files("x86quant.rules") / "layers.csv"
LAYERS = list(csv.DictReader(_FILE.read_text().splitlines()))
SAFE = 64  # 255 * (64 + 64) fits 16 bits
CONV = {"conv1d": Q.conv1d_prepack, "conv2d": Q.conv2d_prepack, "conv3d": Q.conv3d_prepack}


def per_tensor(*shape: int) -> torch.Tensor:
    return torch._make_per_tensor_quantized_tensor(weight(*shape, largest=SAFE).int_repr(), 0.01, 0)


def kernels_of(kind: str, prepack: Callable[[], Any]) -> tuple[set[str], str]:
    """The kernels the router picks under pytorch-2.0, and the one stock PyTorch picks."""
    with engine("x86"):
        stock = x86quant.explain_pack(kind, prepack())[0]
        with x86quant.enable(), x86quant.use_rules("pytorch-2.0"):
            routed = x86quant.explain_pack(kind, prepack())
    assert not stock.routed
    assert all(choice.rule.startswith("pytorch-2.0#") for choice in routed)
    return {choice.kernel for choice in routed}, stock.kernel


def layer_prepack(row: dict[str, str]) -> tuple[str, Callable[[], Any]]:
    def sizes(prefix: str) -> list[int]:
        return [int(row[prefix + axis]) for axis in "dhw" if row[prefix + axis]]

    out, inputs, groups = int(row["oc"]), int(row["ic"]), int(row["groups"] or 1)
    if row["op"] == "linear":
        return "linear", lambda: Q.linear_prepack(weight(out, inputs, largest=SAFE), None)
    w = weight(out, inputs // groups, *sizes("k"), largest=SAFE)
    kind = "conv3d" if row["op"] == "conv3d" else "conv2d"
    prepack = CONV[row["op"]]
    return kind, lambda: prepack(w, None, sizes("s"), sizes("p"), sizes("d"), groups)


# The errata, and what oneDNN's and FBGEMM's own bugs make illegal, come before preference.
def known_wrong(row: dict[str, str], stock: str) -> bool:
    kind, prepack = layer_prepack(row)
    with engine("x86"), x86quant.enable(), x86quant.use_rules("pytorch-2.0"):
        passed_over = dict(x86quant.explain_pack(kind, prepack())[0].passed_over)
    return stock in passed_over


def test_every_layer_of_the_public_list_agrees_with_stock(capsys):
    if not {"avx512_vnni"} <= x86quant.cpu().features:
        pytest.skip("stock PyTorch looks at the real CPU; needs one with AVX512-VNNI, uncapped")
    agreed, wrong = 0, []
    for row in LAYERS:
        routed, stock = kernels_of(*layer_prepack(row))
        if routed == {stock}:
            agreed += 1
        elif not known_wrong(row, stock):
            wrong.append((row["layer"], routed, stock))
    with capsys.disabled():
        print(f"\nparity with stock PyTorch: {agreed} of {len(LAYERS)} layers")
    assert not wrong
    assert agreed == len(LAYERS)


def conv2d(w: torch.Tensor, groups: int = 1) -> Callable[[], Any]:
    return lambda: Q.conv2d_prepack(w, None, [1, 1], [1, 1], [1, 1], groups)


def transposed(channels: int, output_padding: int) -> Callable[[], Any]:
    w = per_tensor(channels, channels, 3, 3)
    stride, extra = [2, 2], [output_padding] * 2
    return lambda: Q.conv_transpose2d_prepack(w, None, stride, [1, 1], extra, [1, 1], 1)


CORNERS = {
    "100 groups": conv2d(weight(100, 1, 3, 3, largest=SAFE), 100),
    "101 groups": conv2d(weight(101, 1, 3, 3, largest=SAFE), 101),
    "200 channels in 100 groups": conv2d(weight(200, 2, 3, 3, largest=SAFE), 100),
    "asymmetric weights": conv2d(weight(16, 16, 3, 3, largest=SAFE, zero_point=5)),
    "transposed": transposed(16, 0),
    "output padding": transposed(16, 1),
}


@pytest.mark.skipif(
    "avx512_vnni" not in x86quant.cpu().features,
    reason="stock PyTorch looks at the real CPU; needs one with AVX512-VNNI, uncapped",
)
@pytest.mark.parametrize("prepack", CORNERS.values(), ids=CORNERS)
def test_corner_conditions_agree_with_stock(prepack):
    routed, stock = kernels_of("conv2d", prepack)
    assert routed == {stock}


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("groups", [1, 100, 101, 128])
def test_without_vnni_fbgemm_always(groups, symmetric):
    # Stock PyTorch asks the CPU itself, which no variable can cap, so its rule is restated.
    here = x86quant.cpu()
    cpu = here.capped("avx2")
    spec = x86quant.OpSpec("conv2d", groups, groups, groups, (3, 3), (1, 1), (1, 1), (1, 1), (0, 0))
    with x86quant.use_rules("pytorch-2.0"):
        table = x86quant.current_rules()
    choice = x86quant.choose(spec, cpu=cpu, table=table, kernels=all_kernels())
    assert choice.kernel == "fbgemm"


def test_seed_rules_follow_avx512_vnni_and_not_avx_vnni():
    client = x86quant.cpu().capped("avx2")
    client = type(client)(
        **{
            **{f: getattr(client, f) for f in client.__dataclass_fields__},
            "features": client.features | {"avx_vnni"},
        }
    )
    spec = x86quant.OpSpec("conv2d", 64, 64, 1, (3, 3), (1, 1), (1, 1), (1, 1), (0, 0))
    with x86quant.use_rules("pytorch-2.0"):
        table = x86quant.current_rules()
    choice = x86quant.choose(spec, cpu=client, table=table, kernels=all_kernels())
    assert choice.kernel == "fbgemm"
