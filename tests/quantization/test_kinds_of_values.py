"""Values of very different size in one result: each kind is judged, and decides, by itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import x86quant
from x86quant.quantization.harm import sqnr_between
from x86quant.quantization.kinds_of_values import EvenValues, kinds_within


def channels_of(x: torch.Tensor) -> list[tuple[int, ...]]:
    kinds = kinds_within([x])
    return [tuple(sorted(c for values in kind for c in values.channels)) for kind in kinds]


def test_probabilities_are_one_kind_beside_what_is_larger() -> None:
    torch.manual_seed(0)
    scores = torch.rand(2, 80, 500) * torch.logspace(-4, 0, 80)[:, None]
    boxes = 300 * torch.rand(2, 4, 500)
    assert channels_of(torch.cat([boxes, scores], 1)) == [tuple(range(4, 84)), (0, 1, 2, 3)]
    assert channels_of(torch.cat([boxes, scores], 1).transpose(1, 2)) == [
        tuple(range(4, 84)),
        (0, 1, 2, 3),
    ]
    assert channels_of(scores) == []


def test_features_that_are_below_one_here_and_there_are_no_probabilities() -> None:
    torch.manual_seed(0)
    features = torch.relu(torch.randn(2, 200, 4)) * 10 ** (4 * torch.rand(200, 1) - 1)
    assert 10 < int((features.amax((0, 2)) <= 1).sum()) < 190
    assert channels_of(features) == []
    anchors = torch.cat([300 * torch.rand(2, 4, 50), torch.rand(2, 81, 50)], 1)
    assert len(channels_of(torch.cat([anchors] * 3, 1))) == 2  # one behind another
    point = torch.cat([300 * torch.rand(2, 2, 50), torch.rand(2, 1, 50)], 1)
    assert len(channels_of(torch.cat([point] * 17, 1))) == 2  # a score beside each of many points


def test_channels_whose_sizes_go_over_into_each_other_are_one_kind() -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 16)
    assert channels_of(x * torch.logspace(0, 3, 16)) == []
    assert channels_of(x * torch.tensor([1.0] * 8 + [100.0] * 8)) == [
        tuple(range(8)),
        tuple(range(8, 16)),
    ]
    assert channels_of(torch.randn(64, 1000) * torch.randn(1000)) == []  # small by chance


@pytest.mark.parametrize("apart", [False, True])
def test_every_kind_counts_alike(apart: bool) -> None:
    torch.manual_seed(0)
    boxes, scores = 300 * torch.randn(3, 4, 50), torch.rand(3, 1, 50)
    exact: Any = (boxes, scores) if apart else torch.cat([boxes, scores], 1)
    even = EvenValues([exact])
    plain, flat = EvenValues([]), even.flat(exact)
    assert torch.equal(
        plain.flat(exact), torch.cat([x.flatten() for x in exact]) if apart else (exact.flatten())
    )
    for noise, told in (((3.0, 0.0), 43.0), ((0.0, 0.1), 18.2)):
        other = (
            boxes + noise[0] * torch.randn_like(boxes),
            scores + noise[1] * torch.randn_like(scores),
        )
        found = even.flat(other if apart else torch.cat(other, 1))
        assert abs(sqnr_between([flat], [found]) - told) < 1.0, noise


def test_values_without_bounds_and_of_other_sizes_are_taken_as_they_come() -> None:
    exact = torch.tensor([[1.0, -torch.inf], [2.0, 3.0]])
    assert torch.equal(EvenValues([exact]).flat(exact), exact.flatten())
    pair = [torch.ones(2, 3), torch.ones(2, 3, 4)]
    assert EvenValues(pair).flat(torch.ones(5)).tolist() == [1.0] * 5
    even = EvenValues([(1000 * torch.ones(4), torch.ones(4))])
    assert even.flat(torch.ones(2)).shape == (2,)
    assert EvenValues([(torch.zeros(0, 3), torch.ones(2))]).flat(torch.ones(3)).shape == (3,)


class Found(nn.Module):
    """Boxes of hundreds of pixels, and scores by weights that no step of one of them fits."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU())
        self.more = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.ReLU())
        self.boxes, self.score = nn.Conv2d(16, 4, 1), nn.Conv2d(16, 1, 1)
        for values in self.more[0].parameters():
            values.data[0] = 0.0
        self.score.weight.data *= 12
        self.score.weight.data[:, 0] = 2000.0  # of a channel that is always zero

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.more(self.body(x))
        return torch.cat([300 * self.boxes(y), self.score(y).sigmoid()], 1)


def test_scores_beside_boxes_hold_the_bound() -> None:
    torch.manual_seed(0)
    calls = list(torch.randn(6, 2, 3, 16, 16))
    int8: Any = x86quant.quantize(
        Found().eval(), calls, speed_check=False, progress=False, equalize=False
    )
    assert list(int8.quantization.float_layers) == ["score"]
    assert min(int8.quantization.sqnr_db) >= 30
