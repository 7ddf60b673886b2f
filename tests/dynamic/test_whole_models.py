"""Whole models of linears on float tensors: attention, encoders, what compiles."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import x86quant
from tests.dynamic.int8_linears import close
from x86quant.dynamic import (
    DynamicLinear,
    DynamicMultiheadAttention,
    Int8Linear,
    WeightOnlyEmbedding,
    to_dynamic,
)
from x86quant.errors import InvalidInputError

# ------------------------------------------------------------------------- attention

ATTENTION_CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"attn_mask": nn.Transformer.generate_square_subsequent_mask(7), "is_causal": True},
    "boolean mask": {"attn_mask": torch.ones(7, 7).triu(1).bool()},
    "a mask a head": {"attn_mask": torch.randn(12, 7, 7)},
    "padding": {"key_padding_mask": torch.arange(21).view(3, 7) % 7 > 4},
    "no weights": {"need_weights": False, "key_padding_mask": torch.arange(21).view(3, 7) % 7 > 4},
    "a weight a head": {"average_attn_weights": False},
}


@pytest.mark.parametrize("call", ATTENTION_CALLS)
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("cross", [True, False])
def test_attention_is_close_to_the_float_one(call: str, batch_first: bool, cross: bool) -> None:
    torch.manual_seed(0)
    real = nn.MultiheadAttention(32, 4, batch_first=batch_first).eval()
    ours = DynamicMultiheadAttention.from_float(real)
    x, y = torch.randn(3, 7, 32), torch.randn(3, 7, 32)
    if not batch_first:
        x, y = x.transpose(0, 1), y.transpose(0, 1)
    inputs = (x, y, y) if cross else (x, x, x)
    with torch.no_grad():
        want, want_weights = real(*inputs, **ATTENTION_CALLS[call])
        got, weights = ours(*inputs, **ATTENTION_CALLS[call])
    assert got.shape == want.shape
    assert (got - want).abs().max() < 0.02
    if want_weights is None:
        assert weights is None
    else:
        assert torch.allclose(weights, want_weights, atol=0.01)


def test_cross_attention_packs_once_and_sees_a_new_state() -> None:
    real = [nn.MultiheadAttention(32, 4).eval() for _ in "ab"]
    ours = [DynamicMultiheadAttention.from_float(attention) for attention in real]
    x, y = torch.randn(7, 2, 32), torch.randn(5, 2, 32)
    first = ours[0](x, y, y)[0]
    packs = [part.pack() for part in ours[0]._parts()]
    ours[0](x, y, y)
    assert [part.pack() for part in ours[0]._parts()] == packs
    for twin in (copy.deepcopy(ours[0]), pickle.loads(pickle.dumps(ours[0]))):
        assert torch.equal(twin(x, y, y)[0], first)
        assert twin._parts()[0].int8_weight.data_ptr() == twin.in_proj.int8_weight.data_ptr()
    ours[0].load_state_dict(ours[1].state_dict())
    assert torch.equal(ours[0](x, y, y)[0], ours[1](x, y, y)[0])


def test_unbatched_attention() -> None:
    real = nn.MultiheadAttention(32, 4).eval()
    x = torch.randn(7, 32)
    with torch.no_grad():
        want, got = real(x, x, x), DynamicMultiheadAttention.from_float(real)(x, x, x)
    assert (got[0] - want[0]).abs().max() < 0.02
    assert got[1].shape == want[1].shape


@pytest.mark.parametrize(
    ("settings", "why"),
    [({"kdim": 16}, "key or value size"), ({"add_bias_kv": True}, "appends to keys")],
)
def test_attention_that_cannot_be_quantized_stays(settings: dict[str, Any], why: str) -> None:
    real = nn.MultiheadAttention(32, 4, **settings).eval()
    with pytest.raises(InvalidInputError, match=why):
        DynamicMultiheadAttention.from_float(real)
    assert type(to_dynamic(nn.Sequential(real))[0]) is nn.MultiheadAttention


# ------------------------------------------------------------------------- whole models


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_transformer_encoders_leave_their_float_fast_path(
    norm_first: bool, activation: str
) -> None:
    torch.manual_seed(0)
    block = nn.TransformerEncoderLayer(
        64, 4, 128, batch_first=True, norm_first=norm_first, activation=activation
    )
    real = nn.TransformerEncoder(block, 2, enable_nested_tensor=not norm_first).eval()
    ours = to_dynamic(real)
    kinds = {type(module) for module in ours.modules()}
    assert not kinds & {nn.Linear, nn.MultiheadAttention}
    x = torch.randn(3, 7, 64)
    padding = torch.zeros(3, 7, dtype=torch.bool)
    causal = nn.Transformer.generate_square_subsequent_mask(7)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nested tensors are a prototype, says torch
        close(ours, real, x)
        close(ours, real, x, src_key_padding_mask=padding)
        close(ours, real, x, mask=causal, is_causal=True)
        close(pickle.loads(pickle.dumps(ours)), real, x)


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
def test_a_whole_transformer() -> None:
    torch.manual_seed(0)
    real = nn.Transformer(64, 4, 1, 1, 128).eval()
    close(to_dynamic(real), real, torch.randn(5, 2, 64), torch.randn(6, 2, 64))


def test_the_model_itself_is_not_changed_unless_asked() -> None:
    real = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    ours = to_dynamic(real)
    assert type(real[0]) is nn.Linear
    assert type(ours[0]) is DynamicLinear
    assert to_dynamic(real, inplace=True) is real
    assert type(real[0]) is DynamicLinear
    assert type(to_dynamic(nn.Linear(3, 3))) is DynamicLinear


def test_what_stays_in_float() -> None:
    class Special(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + 1

    hooked = nn.Linear(4, 4)
    hooked.register_forward_hook(lambda *_: None)
    normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
    model = nn.Sequential(Special(4, 4), hooked, normed, nn.Linear(4, 4), nn.Linear(4, 4))
    ours = to_dynamic(model, keep=lambda name, module: name == "3")
    assert [isinstance(module, Int8Linear) for module in ours] == [False] * 4 + [True]


class SpelledOut(nn.Linear):
    """As some models have it, Falcon for one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x @ self.weight.T
        return y if self.bias is None else y + self.bias


@pytest.mark.parametrize("bias", [True, False])
def test_a_linear_that_is_spelled_out_is_one(bias: bool) -> None:
    real = nn.Sequential(SpelledOut(24, 16, bias=bias), nn.ReLU())
    ours = to_dynamic(real)
    assert isinstance(ours[0], Int8Linear)
    close(ours, real, torch.randn(5, 24))


@pytest.mark.parametrize(
    "own",
    [
        lambda self, x: F.linear(x, self.weight, self.bias) + x,
        lambda self, x: F.linear(x, self.weight, self.bias) * 1.0001,
        lambda self, x: F.linear(x.clamp(-9, 9), self.weight, self.bias),
        lambda self, x: F.linear(x, self.weight) + self.bias + self.bias,
        lambda self, x: F.linear(x, self.weight, self.bias) if x.max() < 99 else x,
        lambda self, x: F.linear(x, self.weight.mT, self.bias),
        lambda self, x, scale=None: F.linear(x, self.weight, self.bias),
    ],
)
def test_another_computation_stays_in_float(own: Any) -> None:
    kind = type("Own", (nn.Linear,), {"forward": own})
    ours = to_dynamic(nn.Sequential(kind(8, 8), nn.Linear(8, 8)))
    assert [isinstance(module, Int8Linear) for module in ours] == [False, True]


def test_a_shared_linear_stays_shared_and_unfused() -> None:
    linear = nn.Linear(4, 4)
    ours = to_dynamic(nn.Sequential(linear, nn.ReLU(), linear))
    assert ours[0] is ours[2]
    assert ours[0].activation is None


def test_embeddings_on_request() -> None:
    real = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 4))
    assert type(to_dynamic(real)[0]) is nn.Embedding
    ours = to_dynamic(real, embeddings=True)
    assert type(ours[0]) is WeightOnlyEmbedding
    close(ours, real, torch.randint(0, 50, (3, 7)))


# ------------------------------------------------------------------------- compiled models


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("per_channel", [True, False])
def test_stock_dynamic_models_lower(per_channel: bool) -> None:
    torch.manual_seed(0)
    real = nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 8), nn.GELU()).eval()
    ao = torch.ao.quantization
    qconfig = ao.per_channel_dynamic_qconfig if per_channel else ao.default_dynamic_qconfig
    stock = ao.quantize_dynamic(real, {nn.Linear: qconfig})
    x = torch.randn(6, 16)
    compiled = x86quant.compile(stock, (x,))
    calls = [n for n in compiled.graph_module.graph.nodes if n.op == "call_function"]
    assert [n.target for n in calls] == [torch.ops.x86quant.linear_dynamic.default] * 2
    assert [n.kwargs["activation"] for n in calls] == ["relu", "gelu"]
    close(compiled, real, x)


def test_our_modules_compile() -> None:
    model = to_dynamic(nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 8)))
    x = torch.randn(6, 16)
    compiled = x86quant.compile(model, (x,))
    assert torch.equal(compiled(x), model(x))
    assert not compiled.float_nodes
