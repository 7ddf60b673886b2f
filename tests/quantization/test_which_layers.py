"""Which layers are dynamic, and which models run as graphs, where it was left to us."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import x86quant
from x86quant.calling.call import Call
from x86quant.compiled.block_graphs import blocks_of
from x86quant.errors import X86QuantWarning
from x86quant.quantization.graphs import fused_blocks, given_graphs
from x86quant.quantization.scheme import decide


class Mixes(nn.Module):
    """An attention whose class does not say so, in front of it a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.qk, self.v, self.proj = nn.Linear(32, 64), nn.Linear(32, 32), nn.Linear(32, 32)
        self.heads = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k = self.qk(x).chunk(2, -1)
        heads = [y.unflatten(-1, (4, 8)).transpose(1, 2) for y in (q, k, self.v(x))]
        scores = (heads[0] @ heads[1].mT).permute(0, 2, 3, 1)
        mixed = self.heads(scores).permute(0, 3, 1, 2).softmax(-1) @ heads[2]
        return self.proj(mixed.transpose(1, 2).flatten(2))


class Net(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.patches, self.norm = nn.Conv2d(3, 32, 4, 4), nn.LayerNorm(32)
        self.add_module(name, Mixes())
        self._name = name
        self.head = nn.Linear(32, 8)
        self.eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        return self.head((x + self.get_submodule(self._name)(self.norm(x))).mean(1))


IMAGES = [torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(n)) for n in range(3)]


def test_an_attention_is_known_by_the_name_it_has() -> None:
    assert decide(Net("attn"), "auto").dynamic
    assert not decide(Net("mixing"), "auto").dynamic


def test_rows_of_few_features_stay_in_float() -> None:
    found = x86quant.quantize(Net("attn"), IMAGES, speed_check=False)
    assert type(found.get_submodule("attn.heads")) is nn.Linear
    summary: Any = found.quantization
    assert {"attn.qk", "attn.v", "attn.proj"} <= {*summary.int8_layers}
    assert any("few features" in note for note in summary.notes)


@pytest.mark.parametrize("enough", [True, False])
def test_much_work_is_worth_graphs_whatever_the_weights(
    enough: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = x86quant.to_dynamic(Net("attn"))
    # 16 places of 32, 32, 32 and 16 * 4 * 16 rows of 4 features, and one row of the head.
    work = 16 * 32 * (64 + 32 + 32) + 16 * 16 * 4 * 4 + 32 * 8
    monkeypatch.setattr(given_graphs, "_ENOUGH_WORK", work + (not enough))
    call = Call((IMAGES[0],))
    assert given_graphs.wants_graphs(model, "auto", call) is enough
    assert not given_graphs.wants_graphs(model, "auto")
    assert not any(layer._forward_pre_hooks for layer in model.modules())


def test_a_failure_of_ours_in_fusing_leaves_the_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("ours")

    monkeypatch.setattr(fused_blocks, "lower_rows", fails)
    monkeypatch.setattr(fused_blocks, "is_own", lambda _: True)
    with pytest.warns(X86QuantWarning, match=r"layer by layer: .* nobody foresaw"):
        found = x86quant.quantize(Net("attn"), IMAGES, fuse_blocks=True, speed_check=False)
    assert all(blocks_of(module) is None for module in found.modules())
    with torch.no_grad():
        exact = Net("attn")(IMAGES[0])
    assert float((found(IMAGES[0]) - exact).norm() / exact.norm()) < 0.05
