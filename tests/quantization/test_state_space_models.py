"""Models whose convolutions only mix tokens are quantized as transformers are."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import x86quant
from x86quant.quantization.scheme import decide

transformers = pytest.importorskip("transformers")


def mamba() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.MambaConfig(
        vocab_size=99, hidden_size=64, num_hidden_layers=2, state_size=8, pad_token_id=0
    )
    model: nn.Module = transformers.MambaForCausalLM(config).eval()
    return model


def ids(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"input_ids": torch.randint(3, 99, (4, 16), generator=generator)}


def test_mamba_quantizes_each_token_as_it_comes() -> None:
    model = mamba()
    scheme = decide(model, "auto")
    assert (scheme.static, scheme.dynamic) == (False, True)
    int8 = x86quant.quantize(model, [ids(0), ids(1)], progress=False)
    with torch.no_grad():
        exact, found = model(**ids(2)).logits, int8(**ids(2)).logits
    assert 20 * torch.log10(exact.norm() / (exact - found).norm()) > 20


@pytest.mark.parametrize("kind", [nn.Conv1d, nn.Conv2d])
def test_networks_of_convolutions_stay_static(kind: type[nn.Module]) -> None:
    norm = nn.BatchNorm1d if kind is nn.Conv1d else nn.BatchNorm2d
    model = nn.Sequential(kind(8, 8, 3, groups=8), norm(8), nn.ReLU(), kind(8, 8, 1))
    scheme = decide(model, "auto")
    assert (scheme.static, scheme.dynamic) == (True, False)
