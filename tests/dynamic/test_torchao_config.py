"""``quantize_`` of torchao with our configuration."""

from __future__ import annotations

import copy
import importlib
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import x86quant
from x86quant.errors import InvalidInputError, UnsupportedError, X86QuantWarning

pytest.importorskip("torchao")


def network() -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
    return nn.Sequential(encoder, nn.Linear(64, 16)).eval()


def layers(model: nn.Module) -> list[type]:
    containers = (nn.Sequential, nn.MultiheadAttention)
    return [type(module) for module in model.modules() if not isinstance(module, containers)]


@torch.no_grad()
@pytest.mark.parametrize("options", [{}, {"weight_bits": 4}, {"weight_only": True}])
def test_layers_become_those_of_to_dynamic(options: dict[str, object], tmp_path: Path) -> None:
    from torchao.quantization import quantize_

    model, x = network(), torch.randn(2, 5, 64)
    # quantize_ picks linears, to_dynamic attentions as well.
    attentions = nn.MultiheadAttention
    expected = x86quant.to_dynamic(model, keep=lambda _, m: isinstance(m, attentions), **options)
    quantize_(model, x86quant.torchao.Int8Config(**options))
    assert layers(model) == layers(expected)
    assert torch.equal(model(x), expected(x))
    with pytest.warns(X86QuantWarning, match="layers of Sequential but not its code"):
        x86quant.save(model, tmp_path / "net.x86q")
    assert torch.equal(x86quant.load(tmp_path / "net.x86q", model=network())(x), model(x))
    assert torch.equal(copy.deepcopy(model)(x), model(x))
    assert torch.equal(pickle.loads(pickle.dumps(model))(x), model(x))


@torch.no_grad()
def test_the_filter_picks_layers() -> None:
    from torchao.quantization import FqnToConfig, quantize_

    config = x86quant.torchao.Int8Config()
    model = network()
    quantize_(model, config, lambda module, name: name == "1")
    int8 = [name for name, m in model.named_modules() if isinstance(m, x86quant.DynamicLinear)]
    assert int8 == ["1"]
    quantize_(model, FqnToConfig({"0.layers.0.linear1": config}), filter_fn=None)
    assert isinstance(model[0].layers[0].linear1, x86quant.DynamicLinear)
    assert type(model[0].layers[0].linear2) is nn.Linear
    picked = (nn.MultiheadAttention, nn.Embedding)
    model = nn.ModuleList([nn.MultiheadAttention(64, 4), nn.Embedding(10, 64)]).eval()
    quantize_(model, config, lambda module, name: isinstance(module, picked))
    assert isinstance(model[0], x86quant.DynamicMultiheadAttention)
    assert isinstance(model[1], x86quant.WeightOnlyEmbedding)


@torch.no_grad()
def test_a_layer_that_is_all_of_it_or_stands_twice() -> None:
    from torchao.quantization import quantize_

    alone = nn.Linear(64, 64).eval()
    twice = nn.Sequential(alone, nn.ReLU(), alone)
    quantize_(alone, x86quant.torchao.Int8Config())
    assert type(alone) is x86quant.DynamicLinear
    assert twice[0] is twice[2] is alone
    twice = nn.Sequential(shared := nn.Linear(64, 64).eval(), nn.ReLU(), shared)
    quantize_(twice, x86quant.torchao.Int8Config())
    assert [type(m) for m in twice] == [x86quant.DynamicLinear, nn.ReLU, x86quant.DynamicLinear]


@torch.no_grad()
def test_codes_of_torchao_are_taken_over() -> None:
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_
    from torchao.quantization.granularity import PerTensor

    model = nn.Sequential(nn.Linear(64, 32)).eval()
    quantize_(model, Int8DynamicActivationInt8WeightConfig(granularity=PerTensor()))
    codes = model[0].weight.qdata
    quantize_(model, x86quant.torchao.Int8Config())
    assert torch.equal(model[0].int8_weight, codes)


@torch.no_grad()
def test_what_has_no_form_stays_and_is_told() -> None:
    from torchao.quantization import quantize_

    model = nn.Sequential(nn.Conv2d(3, 4, 3)).eval()
    with pytest.warns(X86QuantWarning, match="a Conv2d stays in float"):
        quantize_(model, x86quant.torchao.Int8Config(), lambda m, _: isinstance(m, nn.Conv2d))
    assert type(model[0]) is nn.Conv2d
    with pytest.raises(InvalidInputError, match="weight_bits must be 8 or 4, got 3"):
        x86quant.torchao.Int8Config(weight_bits=3)


def test_the_package_alone_does_not_import_torchao() -> None:
    code = "import sys, x86quant; x86quant.to_dynamic; sys.exit('torchao' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("module", ["x86quant.torchao", "x86quant.pt2e"])
def test_other_versions_are_refused(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.import_module(module)
    monkeypatch.setattr("x86quant.tested_versions.version", lambda _: "0.180.1")
    with pytest.raises(UnsupportedError, match=r"tested with torchao 0.18, and 0.180.1 is inst"):
        importlib.reload(found)
