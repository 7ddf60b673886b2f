"""Attention between layers with static ranges runs in a kernel of ours."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import x86quant
from x86quant.lowering.graph_tools import is_op, op_name

HEADS, SIZE = 4, 8


class Attending(nn.Module):
    """Pixels attend to each other between convolutions, as in diffusion and detection."""

    bias: torch.Tensor
    seen: torch.Tensor

    def __init__(self, **given: Any) -> None:
        super().__init__()
        self.given = given
        self.down, self.up = nn.Conv2d(3, 3 * HEADS * SIZE, 1), nn.Conv2d(HEADS * SIZE, 3, 1)
        self.register_buffer("bias", torch.randn(HEADS, 64, 64))
        self.register_buffer("seen", torch.ones(64, 64, dtype=torch.bool).tril())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.down(x).flatten(2).unflatten(1, (3, HEADS, SIZE)).unbind(1)
        q, k, v = (part.transpose(2, 3) for part in parts)
        mask = {
            name: getattr(self, value) for name, value in self.given.items() if name == "attn_mask"
        }
        attended = F.scaled_dot_product_attention(q, k, v, **{**self.given, **mask})
        return self.up(attended.transpose(2, 3).reshape(-1, HEADS * SIZE, *x.shape[2:]))


def images(rows: int = 2) -> torch.Tensor:
    return torch.randn(rows, 3, 8, 8)


def quantized(model: nn.Module) -> tuple[Any, x86quant.CompiledModule]:
    """The int8 model, and its graph."""
    found: Any = x86quant.quantize(model.eval(), [images() for _ in range(3)], speed_check=False)
    return found, found if isinstance(found, x86quant.CompiledModule) else found.compiled


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"scale": 0.5},
        {"is_causal": True},
        {"attn_mask": "bias"},
        {"attn_mask": "seen", "scale": 0.2},
    ],
)
def test_it_is_an_op_of_ours(given: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = Attending(**given)
    found, compiled = quantized(model)
    ops = [op_name(node) for node in compiled.graph_module.graph.nodes if is_op(node)]
    assert "attention" in ops
    assert not [node for node in compiled.float_nodes if "attention" in node.op]
    for x in (images(), images(1), images(3)):
        exact = model(x)
        assert (found(x) - exact).square().mean() < 0.01 * exact.square().mean()


class Pooled(nn.Module):
    """Pools by attention, whose function is called with the tensors of linears, as CLIP does."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(3, HEADS * SIZE, 1)
        self.q, self.k, self.v, self.out = (nn.Linear(HEADS * SIZE, HEADS * SIZE) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.down(x).flatten(2).permute(2, 0, 1)
        return F.multi_head_attention_forward(
            y, y, y, y.shape[-1], HEADS, None, torch.cat([self.q.bias, self.k.bias, self.v.bias]),
            None, None, False, 0.0, self.out.weight, self.out.bias, training=False,
            need_weights=False, use_separate_proj_weight=True, q_proj_weight=self.q.weight,
            k_proj_weight=self.k.weight, v_proj_weight=self.v.weight,
        )[0][0]  # fmt: skip


def test_the_function_that_modules_call_is_gone_through() -> None:
    torch.manual_seed(0)
    model = Pooled().eval()
    found, compiled = quantized(model)
    assert set(found.quantization.traced_by.values()) == {"torch.fx"}
    ops = [op_name(node) for node in compiled.graph_module.graph.nodes if is_op(node)]
    assert "attention" in ops
    assert not found.quantization.float_layers
    for x in (images(), images(1), images(3)):
        exact = model(x)
        assert (found(x) - exact).square().mean() < 0.01 * exact.square().mean()


class OfNarrowValues(Attending):
    """Values that are narrower than keys, which our op does not know."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.down(x).flatten(2).unflatten(1, (3, HEADS, SIZE)).transpose(3, 4)
        attended = F.scaled_dot_product_attention(q[:, 0], q[:, 1], q[:, 2, ..., : SIZE // 2])
        attended = torch.cat([attended, attended], -1)
        return self.up(attended.transpose(2, 3).reshape(-1, HEADS * SIZE, *x.shape[2:]))


class OfRows(Attending):
    """Without heads."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.down(x).flatten(2).unflatten(1, (3, -1)).transpose(2, 3).unbind(1)
        attended = F.scaled_dot_product_attention(q, k, v)
        return self.up(attended.transpose(1, 2).reshape(-1, HEADS * SIZE, *x.shape[2:]))


def _by_softmax(m: Attending, q: Any, k: Any, v: Any) -> torch.Tensor:
    return torch.softmax(q @ k.transpose(-2, -1) * 0.3, -1) @ v


def _by_bias(m: Attending, q: Any, k: Any, v: Any) -> torch.Tensor:
    scores = torch.matmul(q, k.permute(0, 1, 3, 2)) / 2
    return torch.matmul((m.bias + scores).softmax(dim=-1), v)


def _by_narrow_keys(m: Any, q: Any, k: Any, v: Any) -> torch.Tensor:
    scores = q[..., :5] @ k[..., :5].transpose(2, 3)
    return m.soft(scores) @ v


def _of_wide_values(m: Attending, q: Any, k: Any, v: Any) -> torch.Tensor:
    return F.scaled_dot_product_attention(q[..., :5], k[..., :5], v, scale=0.4)


def _one_in_another(m: Attending, q: Any, k: Any, v: Any) -> torch.Tensor:
    return (q @ k.transpose(2, 3)).softmax(-1) @ ((k @ q.transpose(2, 3)).softmax(-1) @ v)


def _by_columns(m: Attending, q: Any, k: Any, v: Any) -> torch.Tensor:
    return (q @ k.transpose(2, 3)).softmax(2) @ v


def _scores_read_again(m: Attending, q: Any, k: Any, v: Any) -> torch.Tensor:
    scores = q @ k.transpose(2, 3)
    return scores.softmax(3) @ v + scores.mean(3, keepdim=True)


class Spelled(Attending):
    """Attention in the words of ``how``."""

    def __init__(self, how: Any) -> None:
        super().__init__()
        self.how, self.soft = how, nn.Softmax(-1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.down(x).flatten(2).unflatten(1, (3, HEADS, SIZE)).unbind(1)
        attended = self.how(self, *(part.transpose(2, 3) for part in parts))
        return self.up(attended.transpose(2, 3).reshape(-1, HEADS * SIZE, *x.shape[2:]))


@pytest.mark.parametrize(
    ("how", "is_ours"),
    [
        (_by_softmax, True),
        (_by_bias, True),
        (_by_narrow_keys, True),
        (_of_wide_values, True),
        (_one_in_another, True),
        (lambda m, q, k, v: (q @ k.transpose(2, 3) + m.seen).softmax(-1) @ v, False),  # added
        (_by_columns, False),
        (_scores_read_again, False),
    ],
)
def test_what_code_spells_out_is_that_op(how: Any, is_ours: bool) -> None:
    torch.manual_seed(0)
    model = Spelled(how)
    found, compiled = quantized(model)
    assert set(found.quantization.traced_by.values()) == {"torch.fx"}
    ops = [op_name(node) for node in compiled.graph_module.graph.nodes if is_op(node)]
    assert ("attention" in ops) == is_ours
    for x in (images(), images(1), images(3)):
        exact = model(x)
        assert (found(x) - exact).square().mean() < 0.01 * exact.square().mean()


@pytest.mark.parametrize("kind", [OfNarrowValues, OfRows])
def test_what_does_not_fit_stays_torchs_and_says_why(kind: type[Attending]) -> None:
    torch.manual_seed(0)
    model = kind()
    found, compiled = quantized(model)
    (node,) = [node for node in compiled.float_nodes if "attention" in node.op]
    assert "[batch, heads, tokens, size]" in node.reason
    x = images()
    assert (found(x) - model(x)).square().mean() < 0.01 * model(x).square().mean()
