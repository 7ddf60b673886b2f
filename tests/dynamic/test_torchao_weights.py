"""Weights that torchao has quantized: their codes are taken over, or a sentence says why not."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import x86quant

pytest.importorskip("torchao")


def by_torchao() -> nn.Module:
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 32)).eval()
    quantize_(model, Int8DynamicActivationInt8WeightConfig(version=2))
    return model


@torch.no_grad()
def test_to_dynamic_takes_codes_and_scales() -> None:
    model, x = by_torchao(), torch.randn(8, 64)
    ours = x86quant.to_dynamic(model)
    assert torch.equal(ours[0].int8_weight, model[0].weight.qdata)
    assert torch.equal(ours[0].weight_scale, model[0].weight.scale.flatten())
    exact = model(x)
    noise = (exact - ours(x)).square().mean() / exact.square().mean()
    assert float(noise) < 1e-3


def test_quantize_says_what_to_do() -> None:
    with pytest.raises(x86quant.InvalidInputError, match=r"0.weight is torchao's .*to_dynamic"):
        x86quant.quantize(by_torchao(), [torch.randn(8, 64)])


def test_codes_of_another_kind_are_refused() -> None:
    model = by_torchao()
    model[0].weight.scale = torch.ones(64, 3)  # whose groups do not divide 64 features
    with pytest.raises(x86quant.UnsupportedError, match="torchao's Int8Tensor"):
        x86quant.to_dynamic(model)


@torch.no_grad()
@pytest.mark.parametrize("asymmetric", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
def test_groups_of_torchao_are_taken_over(bits: int, asymmetric: bool) -> None:
    quantization = pytest.importorskip("torchao.quantization")
    granularity = pytest.importorskip("torchao.quantization.granularity")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 48)).eval()
    mapping = "ASYMMETRIC" if asymmetric else "SYMMETRIC"
    quantization.quantize_(
        model,
        quantization.IntxWeightOnlyConfig(
            weight_dtype=torch.int4 if bits == 4 else torch.int8,
            granularity=granularity.PerGroup(32),
            mapping_type=getattr(quantization.MappingType, mapping),
        ),
    )
    ours = x86quant.to_dynamic(model)[0]
    assert ours.bits == bits
    assert ours.weight_scale.shape == ((48, 2, 2) if asymmetric else (48, 2))
    assert torch.allclose(ours.weight + 0, model[0].weight.dequantize(), rtol=1e-6, atol=1e-6)
    x = torch.randn(8, 64)
    assert float(torch.cosine_similarity(ours(x), model(x)).min()) > 0.999
