"""Channels that are scaled for codes of 4 bits: where that is exact, and kept where it helps."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import x86quant
from x86quant.calling.call import Call
from x86quant.quantization.channel_scales import apply, places_in, scale_channels
from x86quant.quantization.kit.smoothing import find_consumers
from x86quant.quantization.layer_statistics import statistics

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore")  # of other packages

IDS = torch.randint(3, 64, (4, 24), generator=torch.Generator().manual_seed(0))


def uneven(model: nn.Module) -> Any:
    """``model`` with norms whose channels are of very different sizes, as trained ones are."""
    draw = torch.Generator().manual_seed(1)
    for module in model.modules():
        if "Norm" in type(module).__name__:
            module.weight.data = torch.exp(1.5 * torch.randn(len(module.weight), generator=draw))
    return model.eval().requires_grad_(False)


def llama() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=64, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=2, intermediate_size=96, max_position_embeddings=64,
    )  # fmt: skip
    return uneven(transformers.LlamaForCausalLM(config))


def names_of(model: nn.Module) -> list[str]:
    return [name for name, m in model.named_modules() if isinstance(m, nn.Linear)]


def call() -> Call:
    return Call((), {"input_ids": IDS})


def test_places_of_a_decoder() -> None:
    found = {(x.producer, x.linears): x for x in places_in(llama(), call())}
    at = "model.layers.0"
    expected = [
        (f"{at}.input_layernorm", tuple(f"{at}.self_attn.{x}_proj" for x in "qkv")),
        (f"{at}.post_attention_layernorm", (f"{at}.mlp.gate_proj", f"{at}.mlp.up_proj")),
        (f"{at}.self_attn.v_proj", (f"{at}.self_attn.o_proj",)),
        (f"{at}.mlp.up_proj", (f"{at}.mlp.down_proj",)),
    ]
    assert set(expected) <= found.keys()
    assert len(found) == 8  # the last norm's tokens are chosen from before the head
    shared = found[expected[2]]
    assert (shared.repeat, shared.head) == (4, 8)


class Words(nn.Module):
    """A head that is its table."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(64, 64), nn.LayerNorm(64)
        self.head = nn.Linear(64, 64, bias=False)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, input_ids: torch.Tensor) -> Any:
        return self.head(self.norm(self.table(input_ids)))


@pytest.mark.parametrize("tied", [False, True])
def test_a_table_that_is_the_head_keeps_its_channels(tied: bool) -> None:
    model = Words(tied)
    assert bool(places_in(model, call())) != tied
    # Of SmoothQuant, too, whose scales would change the table.
    assert bool(find_consumers(model, call())) != tied


class Nonlinear(nn.Module):
    """A block with no place whose channels could be scaled but those behind its norm."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.norm, self.first, self.last = nn.LayerNorm(64), nn.Linear(64, 64), nn.Linear(64, 64)
        self.activation = activation

    def forward(self, x: torch.Tensor) -> Any:
        y = self.activation(self.first(self.norm(x)))
        return x + self.last(y)


class OffByOne(nn.Module):
    """A norm as Gemma has it, whose weight counts from 1."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(64))

    def forward(self, x: torch.Tensor) -> Any:
        return nn.functional.rms_norm(x, (64,)) * (1 + self.weight)


OffByOne.__name__ = "GemmaRMSNorm"


def test_places_that_are_not_exact_are_left_alone() -> None:
    x = Call((torch.randn(3, 64),))
    assert [p.producer for p in places_in(Nonlinear(nn.GELU()), x)] == ["norm"]
    assert {p.producer for p in places_in(Nonlinear(nn.ReLU()), x)} == {"norm", "first"}
    gemma = nn.Sequential(OffByOne(), nn.Linear(64, 64))
    assert not places_in(gemma, x)
    read_elsewhere = Nonlinear(nn.GELU())
    read_elsewhere.forward = lambda x: (y := read_elsewhere.norm(x)) + read_elsewhere.first(y)  # type: ignore[method-assign]
    assert not places_in(read_elsewhere, x)


@torch.no_grad()
def test_the_function_stays_and_its_codes_come_closer() -> None:
    model = llama()
    given = copy.deepcopy(model)
    sample = [Call((), {"input_ids": IDS.roll(i, 1)}) for i in range(4)]
    done = scale_channels(model, names_of(model), sample, 4)
    assert done
    assert all(x.error < 0.98 for x in done)
    assert "alpha" in str(done[0])
    other = torch.randint(3, 64, (4, 24), generator=torch.Generator().manual_seed(5))
    exact = given(other).logits
    torch.testing.assert_close(model(other).logits, exact, rtol=1e-4, atol=1e-4)
    for one in done:
        apply(given, one)
    for name, x in given.named_parameters():
        torch.testing.assert_close(x, model.get_parameter(name))


@torch.no_grad()
def test_quantize_says_how_many_gained_and_comes_closer() -> None:
    model = llama()
    data = [{"input_ids": IDS.roll(i, 1)} for i in range(4)]
    found = x86quant.quantize(
        model, data, mode="dynamic", weight_bits=4, speed_check=False, progress=False
    )
    count = len({name for x in found.quantization.scaled for name in x.place.linears})
    assert count
    assert f"{count} of them have input channels that are scaled" in str(found.quantization)
    assert found.quantization.to_dict()["scaled"]
    told = statistics(model, found, data)
    assert min(x.sqnr_db for x in told) > 8


@torch.no_grad()
def test_channels_of_one_size_stay() -> None:
    torch.manual_seed(0)
    layer = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64)).eval()
    sample = [Call((torch.randn(400, 64),))]
    before = copy.deepcopy(layer.state_dict())
    assert scale_channels(layer, ["1"], sample, 4) == ()
    assert all(torch.equal(x, before[name]) for name, x in layer.state_dict().items())
