"""Weights that torchao has quantized: their codes are taken over, or a sentence says why not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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


def float_net(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(128, 96), nn.GELU(), nn.Linear(96, 64)).eval().to(dtype)


def noise(exact: torch.Tensor, found: torch.Tensor) -> float:
    off = (exact - found).float().square().mean() / exact.float().square().mean()
    return float(10 * torch.log10(off.clamp(min=1e-20)))


def static(**options: Any) -> Any:
    from torchao.quantization import Int8StaticActivationInt8WeightConfig
    from torchao.quantization.granularity import PerRow, PerTensor

    options = {"act_quant_scale": torch.tensor([[0.03]]), **options}
    granularity = [PerTensor(), PerRow()]
    return Int8StaticActivationInt8WeightConfig(granularity=granularity, **options)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["symmetric", "asymmetric", "reduce_range"])
def test_static_layers_keep_their_range(kind: str, tmp_path: Path) -> None:
    from torchao.quantization import MappingType, quantize_

    options: dict[str, dict[str, Any]] = {
        "symmetric": {},
        "asymmetric": {
            "act_quant_zero_point": torch.tensor([[5]], dtype=torch.int8),
            "act_mapping_type": MappingType.ASYMMETRIC,
        },
        "reduce_range": {"reduce_range": True},
    }
    theirs = float_net()
    quantize_(theirs, static(**options[kind]))
    ours = x86quant.to_dynamic(theirs)
    x = 2 * torch.randn(8, 128)  # beyond the range
    assert noise(theirs[0](x), ours[0](x)) < -120
    # A value between two codes of the second layer may fall to either.
    assert noise(theirs(x), ours(x)) < -60
    for shape in ((2, 4, 128), (1, 8, 128)):
        assert torch.equal(ours(x.reshape(shape)), ours(x).reshape(*shape[:-1], 64))
    assert torch.equal(ours(x[0]), ours(x)[0])
    x86quant.save(ours, tmp_path / "net.x86q", example_inputs=(x,))
    assert torch.equal(x86quant.load(tmp_path / "net.x86q")(x), ours(x))
    x86quant.assert_int8(ours, (x,))


def test_static_ranges_of_single_rows_are_refused() -> None:
    from torchao.quantization import Int8StaticActivationInt8WeightConfig, quantize_

    model = float_net()
    scale = torch.full((8, 1), 0.03)
    quantize_(model, Int8StaticActivationInt8WeightConfig(act_quant_scale=scale))
    with pytest.raises(x86quant.UnsupportedError, match="8 scales that were chosen beforehand"):
        x86quant.to_dynamic(model)


@torch.no_grad()
@pytest.mark.parametrize("is_static", [False, True])
def test_factors_of_features_stay_in_front(is_static: bool) -> None:
    from torchao.prototype.smoothquant import SmoothQuantConfig
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, MappingType, quantize_

    asymmetric = MappingType.ASYMMETRIC
    base = static() if is_static else Int8DynamicActivationInt8WeightConfig(asymmetric)
    theirs, x = float_net()[:1], torch.randn(8, 128)
    x[:, 3] *= 30
    exact = theirs(x)
    quantize_(theirs, SmoothQuantConfig(base_config=base, step="prepare"))
    theirs(x)
    observed = type(theirs[0])
    convert = SmoothQuantConfig(base_config=base, step="convert")
    quantize_(theirs, convert, lambda module, _: isinstance(module, observed))
    assert theirs[0].weight.act_pre_scale is not None
    ours = x86quant.to_dynamic(theirs)
    assert noise(theirs(x), ours(x)) < -100
    assert ours(x[0]).shape == (96,)
    assert noise(exact, ours(x)) < -30
    with pytest.raises(x86quant.UnsupportedError, match="changes inputs as well"):
        x86quant.DynamicLinear.from_float(theirs[0])


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_codes_packed_for_a_cpu_are_read(dtype: torch.dtype) -> None:
    from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig
    from torchao.quantization import quantize_

    theirs, x = float_net(dtype), torch.randn(8, 128, dtype=dtype)
    quantize_(theirs, PrototypeInt4WeightOnlyConfig(group_size=32))
    ours = x86quant.to_dynamic(theirs, weight_only=True)
    assert ours[0].bits == 4
    assert ours(x).dtype == dtype
    assert noise(theirs(x), ours(x)) < (-110 if dtype == torch.float32 else -40)


@torch.no_grad()
def test_layers_take_the_type_of_the_model() -> None:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    theirs, x = float_net(torch.bfloat16), torch.randn(8, 128, dtype=torch.bfloat16)
    quantize_(theirs, Int8WeightOnlyConfig())
    ours = x86quant.to_dynamic(theirs)
    assert ours(x).dtype == torch.bfloat16
    assert noise(theirs(x), ours(x)) < -35


@torch.no_grad()
def test_codes_of_minus_128_are_right() -> None:
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, MappingType, quantize_

    theirs, x = float_net()[:1], torch.randn(8, 128)
    quantize_(theirs, Int8DynamicActivationInt8WeightConfig(MappingType.ASYMMETRIC))
    theirs[0].weight.qdata.fill_(-128)
    assert noise(theirs(x), x86quant.to_dynamic(theirs)(x)) < -110


def test_what_is_not_known_is_refused_by_name() -> None:
    from torchao.quantization import Float8WeightOnlyConfig, quantize_

    theirs = float_net()
    quantize_(theirs, Float8WeightOnlyConfig())
    with pytest.raises(x86quant.UnsupportedError, match="torchao's Float8Tensor"):
        x86quant.to_dynamic(theirs)
    later = by_torchao()
    weight = later[0].weight
    weight.optional_tensor_data_names = [*weight.optional_tensor_data_names, "rotation"]
    weight.rotation = torch.eye(64)
    with pytest.raises(x86quant.UnsupportedError, match="more than codes and scales: rotation"):
        x86quant.to_dynamic(later, inplace=True)
