"""Models with linears of 4 bits: how they are quantized, run, saved and explained."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import x86quant
from x86quant.calling.call import Call
from x86quant.dynamic.group_weights import group_of, quantize_groups
from x86quant.errors import InvalidInputError
from x86quant.ops.groups import real_weight
from x86quant.quantization.error_feedback import rounded_with_feedback, with_error_feedback


def correlated(rows: int, features: int, seed: int = 0) -> torch.Tensor:
    """Rows whose features depend on each other, as those of a model do."""
    draw = torch.Generator().manual_seed(seed)
    mixed = torch.randn(8, features, generator=torch.Generator().manual_seed(9))
    x = torch.randn(rows, 8, generator=draw) @ mixed
    return x + 0.2 * torch.randn(rows, features, generator=draw)


class Block(nn.Module):
    """A gated block as transformers have it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.gate, self.up, self.down = nn.Linear(64, 96), nn.Linear(64, 96), nn.Linear(96, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


class Net(nn.Module):
    """Two of them and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = Block(), Block(), nn.LayerNorm(64)
        self.head = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.norm(self.second(self.first(x))))


def model() -> nn.Module:
    torch.manual_seed(0)
    return Net().eval()


def test_scales_change_weights_less_than_the_largest_weight_would_have_it() -> None:
    weight = torch.randn(40, 256, generator=torch.Generator().manual_seed(0))
    groups = weight.unflatten(1, (-1, 32))
    plain = groups.abs().amax(-1, keepdim=True) / 7
    worse = (torch.round(groups / plain) * plain - groups).square().mean()
    better = (real_weight(*quantize_groups(weight)) - weight).square().mean()
    assert float(better) < 0.9 * float(worse)


@pytest.mark.parametrize(("features", "group"), [(96, 32), (80, 16), (40, 8), (36, None)])
def test_groups_divide_the_features(features: int, group: int | None) -> None:
    assert group_of(features) == group
    linear = x86quant.DynamicLinear.from_float(nn.Linear(features, 5), bits=4)
    assert linear.bits == (8 if group is None else 4)
    x = torch.randn(3, features)
    close = torch.cosine_similarity(linear(x), nn.functional.linear(x, linear.weight, linear.bias))
    assert float(close.min()) > 0.999


def test_error_feedback_is_closer_on_rows_that_nobody_looked_at() -> None:
    weight = torch.randn(48, 128, generator=torch.Generator().manual_seed(1))
    seen, other = correlated(600, 128, 1), correlated(600, 128, 2)
    fed = real_weight(*rounded_with_feedback(weight, seen.t() @ seen, 4))
    plain = real_weight(*quantize_groups(weight))
    errors = [float((other @ (w - weight).t()).norm()) for w in (fed, plain)]
    assert errors[0] < 0.6 * errors[1]


def test_error_feedback_is_kept_where_it_helps() -> None:
    first = nn.Linear(64, 32)
    layers = nn.ModuleDict({"gains": first, "alike": copy.deepcopy(first)})
    whitened = torch.randn(64, 64)

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers

        def forward(self, x: torch.Tensor) -> Any:
            return self.layers["gains"](x), self.layers["alike"](whitened[:2])

    found = with_error_feedback(
        Two(), ["layers.gains", "layers.alike"], [Call((correlated(400, 64),), {})], 4
    )
    assert "layers.gains" in found
    assert all(codes.dtype == torch.uint8 for codes, _ in found.values())


def test_quantize_runs_fused_saves_and_explains(tmp_path: Path) -> None:
    real = model()
    batches = [correlated(32, 64, seed).reshape(4, 8, 64) for seed in range(4)]
    ours = x86quant.quantize(
        real, batches, mode="dynamic", weight_bits=4, fuse_blocks=True, speed_check=False,
        progress=False,
    )  # fmt: skip
    assert {m.bits for m in ours.modules() if isinstance(m, x86quant.DynamicLinear)} == {4}
    assert "4 bits" in str(ours.quantization)
    with torch.no_grad():
        want, found = real(batches[0]), ours(batches[0])
    assert float(torch.cosine_similarity(want.flatten(), found.flatten(), 0)) > 0.98
    explained = str(x86quant.explain(ours))
    assert "native" in explained
    x86quant.assert_int8(ours, batches[0])
    with warnings.catch_warnings():  # the code of a class in a test is not in the file
        warnings.simplefilter("ignore")
        x86quant.save(ours, tmp_path / "four.x86q")
    assert (tmp_path / "four.x86q").stat().st_size < 60_000  # and float32 would take 155 KB
    again = x86quant.load(tmp_path / "four.x86q", model=model())
    with torch.no_grad():
        assert torch.equal(again(batches[0]), found)


def test_layers_and_fused_graphs_give_the_same() -> None:
    layers = x86quant.to_dynamic(model(), weight_bits=4)
    x = correlated(20, 64).reshape(2, 10, 64)
    fused = x86quant.compile(layers, (x,))
    with torch.no_grad():
        close = torch.cosine_similarity(layers(x).flatten(), fused(x).flatten(), 0)
    assert float(close) > 0.9999
    assert "bits in groups" in str(x86quant.explain(layers))


def test_rows_do_not_see_each_other() -> None:
    linear = x86quant.DynamicLinear.from_float(nn.Linear(96, 70), bits=4)
    x = torch.randn(37, 96)
    alone = torch.cat([linear(row[None]) for row in x])
    assert torch.equal(linear(x), alone)


def test_gradients_copies_and_types() -> None:
    linear = x86quant.DynamicLinear.from_float(nn.Linear(64, 8), bits=4)
    x = torch.randn(3, 64)
    assert torch.equal(copy.deepcopy(linear)(x), linear(x))
    assert linear.half()(x.half()).dtype == torch.float16
    assert "bits=4, group=32" in repr(linear)


@pytest.mark.parametrize("bits", [3, True, "4", None])
def test_bits_that_there_are_not(bits: Any) -> None:
    with pytest.raises(InvalidInputError, match="weight_bits must be 8 or 4"):
        x86quant.to_dynamic(model(), weight_bits=bits)
    with pytest.raises(InvalidInputError, match="weight_bits must be 8 or 4"):
        x86quant.quantize(model(), weight_bits=bits, mode="dynamic")


def test_weights_that_are_no_numbers() -> None:
    real = nn.Linear(64, 4)
    real.weight.data[2, 3] = torch.nan
    with pytest.raises(InvalidInputError, match="NaN or infinity"):
        x86quant.DynamicLinear.from_float(real, bits=4)
    real.weight.data[2, 3] = 1e7
    with pytest.raises(InvalidInputError, match="too large for float16"):
        x86quant.DynamicLinear.from_float(real, bits=4)


@torch.no_grad()
def test_tables_of_four_bits() -> None:
    table = nn.Embedding(30, 64)
    ours = x86quant.to_dynamic(nn.Sequential(table), embeddings=True, weight_bits=4)[0]
    assert isinstance(ours, x86quant.WeightOnlyEmbedding)
    assert ours.int8_weight.dtype == torch.uint8
    ids = torch.tensor([[3, 29, 0], [7, 7, 1]])
    assert torch.equal(ours(ids), ours.weight.dequantize()[ids])
    assert float(torch.cosine_similarity(ours(ids), table(ids), -1).min()) > 0.98
    with pytest.raises(InvalidInputError, match="index 30"):
        ours(torch.tensor([30]))


def outlying() -> nn.Module:
    """A model whose head 4 bits harm most."""
    net = model()
    torch.manual_seed(3)
    # In each group one weight is so large that 4 bits have no codes for the others, which count.
    weight = 0.05 * torch.randn(10, 64)
    weight[:, ::32] = 2.0
    with torch.no_grad():
        net.head.weight.copy_(weight)
        net.norm.weight[::32] = 1e-3
        net.norm.bias[::32] = 0
    return net


def test_linears_that_four_bits_harm_most_have_eight() -> None:
    net = outlying()
    batches = [torch.randn(8, 5, 64) for _ in range(4)]
    found = x86quant.quantize(net, batches, weight_bits=4, smooth_quant=False, speed_check=False)
    assert found.head.bits == 8
    assert found.first.gate.bits == 4, "only those that harm"
    assert not found.quantization.float_layers
    assert "have weights of 8 bits, which 4 harm most: head" in str(found.quantization)


class Stem(nn.Module):
    """Convolutions with a sum, which become a static part."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.more = nn.Conv2d(3, 64, 4, 4), nn.Conv2d(64, 64, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).relu()
        return self.more(x) + x


class Seen(nn.Module):
    """Them before an attention, which makes linears dynamic, and two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.blocks = Stem(), Net()
        self.attention = nn.MultiheadAttention(64, 4, batch_first=True)

    def forward(self, x: torch.Tensor) -> Any:
        tokens = self.stem(x).flatten(2).transpose(1, 2)
        return self.blocks(tokens + self.attention(tokens, tokens, tokens)[0])


@pytest.mark.parametrize("bits", [4, "auto"])
def test_convolutions_before_linears_of_four_bits(bits: Any) -> None:
    torch.manual_seed(0)
    net = Seen().eval()
    batches = [torch.randn(2, 3, 16, 16) for _ in range(4)]
    with warnings.catch_warnings():
        warnings.simplefilter("error", x86quant.X86QuantWarning)
        found = x86quant.quantize(
            net, batches, weight_bits=bits, fuse_blocks=True, speed_check=False, progress=False
        )
    assert {"stem.first", "stem.add"} <= set(found.quantization.int8_layers)
    assert 4 in bits_of(found).values()
    x = torch.randn(3, 3, 16, 16)
    with torch.no_grad():
        wanted = net(x)
    assert float(torch.cosine_similarity(wanted.flatten(), found(x).flatten(), 0)) > 0.99


@pytest.mark.filterwarnings("ignore:the int8 model has")
def test_bits_are_of_linears_that_are_not_static() -> None:
    """Layers that static int8 harms come back to float as they do with 8 bits."""
    torch.manual_seed(0)
    convs = [nn.Conv2d(8, 8, 3, padding=1) for _ in range(8)]
    net = nn.Sequential(*convs, nn.Flatten(1)).eval()
    with torch.no_grad():  # one channel leaves few codes to the others
        convs[3].weight[0] *= 300
        convs[4].weight[:, 0] = 0
    batches = [torch.randn(2, 8, 12, 12) for _ in range(4)]
    eight, four = (
        x86quant.quantize(
            net, batches, weight_bits=bits, equalize=False, speed_check=False, progress=False
        )
        for bits in (8, 4)
    )
    assert eight.quantization.float_layers
    assert eight.quantization.float_layers == four.quantization.float_layers


def bits_of(found: nn.Module) -> dict[str, int]:
    linears = found.named_modules()
    return {name: m.bits for name, m in linears if isinstance(m, x86quant.DynamicLinear)}


def bytes_of(found: nn.Module) -> int:
    linears = [m for m in found.modules() if isinstance(m, x86quant.DynamicLinear)]
    return sum(x.nbytes for m in linears for x in (m.int8_weight, m.weight_scale))


def by_layer(net: nn.Module, **options: Any) -> Any:
    batches = [torch.randn(8, 5, 64, generator=torch.Generator().manual_seed(n)) for n in range(4)]
    return x86quant.quantize(
        net, batches, mode="dynamic", weight_bits="auto", smooth_quant=False, speed_check=False,
        progress=False, **options,
    )  # fmt: skip


@pytest.mark.filterwarnings("ignore")  # that much is lost where the head has 4
def test_bits_by_layer_within_a_budget() -> None:
    net = outlying()
    least, head = 21_096, 320  # with 4 bits in all of them, and what 8 in the head take more
    for more in (0, head - 1, head, 10_000, 1_000_000):
        found = by_layer(net, weight_budget=least + more)
        assert bytes_of(found) <= least + more
        assert found.head.bits == (8 if more >= head else 4)
        assert (bytes_of(found) == least) == (more < head)
    assert set(bits_of(found).values()) == {8}
    with pytest.raises(InvalidInputError, match="weight_budget: with 4 bits in each"):
        by_layer(net, weight_budget=least - 1)


def test_bits_by_layer_for_results_and_for_a_metric() -> None:
    net = outlying()
    found = by_layer(net)
    assert found.head.bits == 8
    assert set(bits_of(found).values()) == {4, 8}
    assert "linears have weights of 8 bits, the others 4" in str(found.quantization)

    def all_wide(candidate: nn.Module) -> float:  # which only the float model and 8 bits please
        return float(4 not in bits_of(candidate).values())

    found = by_layer(net, metric=all_wide, max_drop=0.5)
    assert set(bits_of(found).values()) == {8}
    assert not found.quantization.float_layers
    assert set(bits_of(by_layer(net, metric=lambda _: 1.0)).values()) == {4}


def test_bits_by_layer_that_cannot_be_chosen() -> None:
    with pytest.raises(InvalidInputError, match="needs weight_bits"):
        x86quant.quantize(model(), mode="dynamic", weight_bits=4, weight_budget=1)
    with pytest.raises(InvalidInputError, match="chooses by calibration data"):
        x86quant.quantize(model(), mode="dynamic", weight_bits="auto")
    with pytest.raises(InvalidInputError, match="a metric or a weight_budget"):
        by_layer(model(), weight_budget=10**6, metric=lambda _: 1.0)
    with pytest.raises(InvalidInputError, match="a number of bytes"):
        by_layer(model(), weight_budget="1 MB")
