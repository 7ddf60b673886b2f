"""Linears packed by GPTQModel, AutoAWQ and AutoRound themselves, where these are installed.

pip install --no-deps gptqmodel auto-round autoawq
pip install pypcre logbar device-smi tokenicer datasets defuser kernels
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from x86quant.huggingface.checkpoint_formats import FORMATS, format_of
from x86quant.huggingface.group_formats import from_awq, from_gptq
from x86quant.ops.groups import real_weight

pytestmark = pytest.mark.filterwarnings("ignore")  # of other packages

K, N = 128, 64


def drawn(group: int, bits: int, symmetric: bool) -> tuple[nn.Linear, torch.Tensor, torch.Tensor]:
    """A linear whose weights are codes times scales, the scales and zero points [N, groups]."""
    draw = torch.Generator().manual_seed(bits + group)
    top = 1 << bits
    scales = ((torch.rand(N, K // group, generator=draw) + 0.1) / top).half().float()
    zeros = torch.full_like(scales, top // 2)
    if not symmetric:
        zeros += torch.randint(-3, 4, zeros.shape, generator=draw)
    codes = torch.randint(0, top, (N, K), generator=draw).unflatten(1, (-1, group))
    linear = nn.Linear(K, N, bias=False).requires_grad_(False)
    linear.weight.data = ((codes - zeros[..., None]) * scales[..., None]).flatten(1)
    return linear, scales, zeros


def tensors_of(layer: nn.Module) -> dict[str, Any]:
    return {name: x for name, x in layer.state_dict().items() if name != "bias"}


def check(layer: nn.Module, found: Any, linear: nn.Linear) -> None:
    got = real_weight(found.weight, found.weight_scale)
    if found.order is not None:
        got = got[:, torch.argsort(found.order)]
    torch.testing.assert_close(got, linear.weight.data, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
def test_gptqmodel(bits: int, symmetric: bool, act_order: bool) -> None:
    modules = pytest.importorskip("gptqmodel.nn_modules.qlinear.torch")
    linear, scales, zeros = drawn(32, bits, symmetric)
    g_idx = torch.arange(K) // 32
    if act_order:
        order = torch.randperm(K, generator=torch.Generator().manual_seed(0))
        linear.weight.data, g_idx = linear.weight.data[:, order], g_idx[order]
    layer = modules.TorchLinear(
        bits=bits, group_size=32, sym=symmetric, desc_act=act_order, in_features=K, out_features=N
    )
    layer.pack_original(linear, scales, zeros, g_idx.to(torch.int32))
    # In memory its zero points are those of version 2.
    found = from_gptq(tensors_of(layer), K, first_zero=0)
    assert (found.order is not None) == act_order
    check(layer, found, linear)
    layer.eval().post_init()
    x = torch.randn(5, K)
    theirs = layer(x.half()).float()
    assert float(torch.cosine_similarity(theirs, linear(x)).min()) > 0.9999


@pytest.mark.parametrize("symmetric", [True, False])
def test_autoawq(symmetric: bool) -> None:
    gemm = pytest.importorskip("awq.modules.linear.gemm")
    linear, scales, zeros = drawn(32, 4, symmetric)
    layer = gemm.WQLinear_GEMM.from_linear(
        linear, 4, 32, scales=scales.t().contiguous(), zeros=zeros.t().contiguous()
    )
    check(layer, from_awq(tensors_of(layer), K), linear)


@pytest.mark.parametrize(
    ("packing", "module"),
    [("auto_round:auto_gptq", "qlinear_torch_zp"), ("auto_round", "qlinear_torch")],
)
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
def test_autoround(bits: int, symmetric: bool, packing: str, module: str) -> None:
    modules = pytest.importorskip(f"auto_round_extension.torch.{module}")
    linear, scales, zeros = drawn(32, bits, symmetric)
    layer = modules.QuantLinear(bits, 32, K, N, False)
    layer.device = "cpu"  # which it reads and does not set
    layer.pack(linear, scales, zeros, None)
    kind = format_of({"quant_method": "auto-round", "packing_format": packing, "bits": bits})
    check(layer, FORMATS[kind].read(tensors_of(layer), K), linear)
