"""How close int8 comes to float: by channels, by decisions, and what follows from it."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import x86quant
from x86quant.errors import X86QuantWarning
from x86quant.quantization.harm import sqnr_between
from x86quant.quantization.judging import (
    ChannelGroup,
    half_agreement,
    in_words,
    top_agreement,
    worst_group,
)


def worst(exact: list[torch.Tensor], actual: list[torch.Tensor]) -> ChannelGroup | None:
    return worst_group(exact, actual, sqnr_between(exact, actual))


def boxes_and_scores() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(3, 6, 10, 10) * torch.tensor([300.0] * 4 + [0.5] * 2).reshape(1, 6, 1, 1)


@pytest.mark.parametrize("last", [False, True])
def test_small_channels_beside_large_ones_are_judged_by_themselves(last: bool) -> None:
    exact = boxes_and_scores()
    noisy = exact + 0.5 * torch.randn_like(exact)
    if last:
        exact, noisy = (x.flatten(2).transpose(1, 2) for x in (exact, noisy))
    found = worst([exact], [noisy])
    assert found is not None
    assert found.channels == ("columns 4-5" if last else "channels 4-5")
    assert abs(found.sqnr_db) < 1
    assert worst([exact], [exact * 1.001]) is None  # alike everywhere


def test_what_is_unlikely_is_no_channel_of_its_own() -> None:
    exact = torch.softmax(torch.randn(50, 10) * 5, 1)
    exact[:, 3] *= 1e-3
    assert worst([exact], [exact + 1e-3]) is None


def test_the_largest_of_each_row() -> None:
    exact = torch.eye(20).repeat(2, 1)
    other = exact.clone()
    other[0] = other[1]
    assert top_agreement([exact], [other]) == (39 / 40, 40)
    assert top_agreement([exact[:10]], [other[:10]]) is None  # too few to tell
    assert top_agreement([2 * exact[None]], [2 * other[None]]) is None  # classes lie anywhere


@pytest.mark.parametrize("logarithms", [False, True])
def test_the_largest_of_each_step_of_a_recogniser(logarithms: bool) -> None:
    exact = torch.softmax(torch.randn(4, 10, 6), 2)
    other = exact.clone()
    other[0, 0] = other[0, 0].roll(1)
    if logarithms:
        exact, other = exact.log(), other.log()
    assert top_agreement([exact], [other]) == (39 / 40, 40)
    assert top_agreement([exact.transpose(1, 2)], [other.transpose(1, 2)]) == (39 / 40, 40)
    assert half_agreement([exact], [other]) is None  # these compete with each other


def test_probabilities_that_stand_for_themselves() -> None:
    exact = torch.full((1, 1, 10, 10), 0.1)
    exact[..., :2] = 0.9
    other = exact.clone()
    other[0, 0, 0, 0] = 0.4
    assert half_agreement([exact], [other]) == (19 / 20, 20)
    assert half_agreement([exact * 0.2], [other * 0.2]) is None  # none is above
    assert half_agreement([exact * 4], [other * 4]) is None  # they are none


class Close(nn.Module):
    """Classes behind an input whose range nobody needs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.layer.weight.data[:, 0] = 0.0
        self.register_buffer("large", torch.tensor([8.0] + [1.0] * 15))
        self.head = nn.Linear(16, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.layer(x * self.large)))


def test_close_decisions_are_told_though_the_values_are_close() -> None:
    torch.manual_seed(0)
    batches = list(torch.randn(8, 32, 16))
    with pytest.warns(
        X86QuantWarning, match=r"the largest value is another one in \d+ of \d+ rows"
    ):
        int8: Any = x86quant.quantize(Close(), batches, speed_check=False)
    assert 20 < min(int8.quantization.sqnr_db) < 30
    share, rows = int8.quantization.agreement
    assert rows * (1 - share) >= 2


def test_words_for_each_figure() -> None:
    assert len({in_words(db) for db in (50, 35, 25, 15, 5, -10)}) == 5


class Spoilt(nn.Module):
    """Two layers of eight multiply by weights and ranges of which int8 keeps little."""

    def __init__(self, spoilt: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(8))
        self.head = nn.Linear(32, 10)
        for number, layer in enumerate(self.layers):
            large = torch.ones(32)
            nn.init.orthogonal_(layer.weight, 1.2)
            if number < spoilt:
                large[0] = 24.0  # shares its range with all the others, and nobody reads it
                layer.weight.data[:, 0] = 0.0
            self.register_buffer(f"large{number}", large)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            x = torch.tanh(layer(x * getattr(self, f"large{number}")))
        return self.head(x)


def made(spoilt: int, **options: Any) -> tuple[nn.Module, Any, torch.Tensor]:
    torch.manual_seed(0)
    model = Spoilt(spoilt).eval()
    batches = [torch.randn(64, 32) for _ in range(4)]
    int8 = x86quant.quantize(model, batches, mode="static", progress=False, **options)
    return model, int8, batches[0]


@torch.no_grad()
def sqnr(model: nn.Module, int8: Any, x: torch.Tensor) -> float:
    exact, found = model(x), int8(x)
    return float(10 * torch.log10(exact.square().sum() / (exact - found).square().sum()))


def test_a_few_layers_go_back_to_float_for_results_a_user_would_take() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", X86QuantWarning)
        model, int8, x = made(1)
    assert list(int8.quantization.float_layers)
    assert len(int8.quantization.float_layers) <= 4
    assert sqnr(model, int8, x) >= 19


def test_where_too_many_would_have_to_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("x86quant.quantization.deciding.layers_in_float.USABLE_DB", -100.0)
    with pytest.warns(X86QuantWarning, match=r"values differ|another model.*float_layers"):
        _, int8, _ = made(8)
    summary = int8.quantization
    assert len(summary.int8_layers) > len(summary.float_layers)
    assert in_words(min(summary.sqnr_db)) in str(summary)


def test_the_summary_counts_decisions() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 10)).eval()
    batches = [torch.randn(64, 16) for _ in range(4)]
    int8: Any = x86quant.quantize(model, batches, progress=False, speed_check=False)
    summary = int8.quantization
    share, count = summary.agreement
    assert share > 0.9
    assert count >= 64
    assert f"{share:.1%} of {count} rows" in str(summary)
    assert summary.to_dict()["agreement"] == [share, count]
    assert copy.deepcopy(summary) == summary
