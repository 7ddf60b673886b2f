"""Calibration data that does not look like data."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

import x86quant
from x86quant.calling.call import Call
from x86quant.errors import InvalidInputError, X86QuantWarning
from x86quant.quantization.odd_data import unlike_training, what_are_labels, what_is_odd


def told(*calls: Call) -> str:
    return " / ".join(what_is_odd(calls))


@pytest.mark.parametrize(
    ("batches", "said"),
    [
        ([torch.zeros(2, 3)] * 2, "are zero"),
        ([torch.full((2, 3), 0.5), torch.ones(2, 3)], "one value throughout"),
        ([torch.arange(6.0).view(2, 3)] * 4, "all 4 calibration batches are the same"),
        ([torch.arange(6.0).view(2, 3).clone() for _ in range(4)], "are the same"),
    ],
)
def test_what_is_odd_is_told(batches: list[torch.Tensor], said: str) -> None:
    assert said in told(*(Call((x,)) for x in batches))


def test_masks_that_hide_everything() -> None:
    ids = torch.tensor([[1, 2], [3, 4]])
    shows = Call((), {"input_ids": ids, "attention_mask": torch.zeros(2, 2, dtype=torch.int64)})
    hides = Call((), {"x": ids, "key_padding_mask": torch.ones(2, 2, dtype=torch.bool)})
    assert "attention_mask hides everything" in told(shows)
    assert "key_padding_mask hides everything" in told(hides)


def test_nothing_is_told_of_data() -> None:
    ids = torch.tensor([[1, 2], [3, 4]])
    masks = {"attention_mask": torch.ones(2, 2), "key_padding_mask": torch.zeros(2, 2).bool()}
    assert not told(Call((torch.randn(2, 3),)), Call((torch.randn(2, 3),)))
    assert not told(Call((torch.randn(2, 3),)))  # the only batch
    assert not told(Call((ids,)), Call((ids,)))  # of numbers no ranges are chosen
    assert not told(Call((), {"x": torch.randn(2, 3), **masks}))
    assert not told(Call((torch.tensor(2.0), torch.randn(3))))  # a scalar beside data


def trained(norm: bool = True) -> nn.Module:
    """A network that was trained on pictures of mean 0 and width 1."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8) if norm else nn.Identity(), nn.ReLU()]
    net = nn.Sequential(*layers, nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8)).train()
    for _ in range(100):
        net(torch.randn(4, 3, 12, 12))
    return net.eval()


@pytest.mark.parametrize(
    ("scale", "shift", "said"),
    [
        (57.0, 0.0, "values that reach 1 are 5[0-9][0-9.]* times as large as in training"),
        (1 / 57, 0.0, "values that reach 1 are 0.01[0-9]+ times as large"),
        (57.0, 128.0, "from -[0-9.]+ to [0-9.]+, are not scaled as the training data were"),
        (1.0, 0.0, "^$"),
        (0.4, 0.5, "^$"),
    ],
)
def test_data_of_another_scale_than_in_training(scale: float, shift: float, said: str) -> None:
    calls = [Call((torch.randn(2, 3, 12, 12) * scale + shift,)) for _ in range(2)]
    assert re.search(said, " / ".join(unlike_training(trained(), calls)))


def test_values_far_from_those_in_training_are_told() -> None:
    net = nn.Sequential(nn.BatchNorm2d(3))
    net[0].running_mean.fill_(0.5)
    calls = [Call((torch.randn(2, 3, 12, 12) + 20,))]
    assert "far from where they were" in " / ".join(unlike_training(net.eval(), calls))


def test_a_single_picture_is_told_where_the_network_was_trained() -> None:
    one = [Call((torch.randn(1, 3, 12, 12),))]
    assert "a single sample" in " / ".join(unlike_training(trained(), one))
    assert not [*unlike_training(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)), one)]
    assert not [*unlike_training(trained(), one * 2)]


def test_quantize_tells_it() -> None:
    net = trained()
    pixels = [torch.randint(0, 256, (2, 3, 12, 12)).float() for _ in range(2)]
    with pytest.warns(X86QuantWarning, match="not scaled as the training data were"):
        x86quant.quantize(net, pixels, speed_check=False, progress=False)


class Tokens(nn.Module):
    def __init__(self, rows: int = 5000) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(rows, 8), nn.Embedding(2000, 8)
        self.head = nn.Linear(8, 10)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        places = torch.arange(ids.shape[-1]).expand_as(ids)
        return self.head(self.words(ids) + self.places(places))


def test_classes_in_place_of_tokens() -> None:
    torch.manual_seed(0)
    labels = [Call((torch.randint(0, 10, (32,)),)) for _ in range(4)]
    (said,) = what_are_labels(Tokens(), labels)
    assert "are 0 to 9, and 'words' has 5000 rows" in said
    assert not list(what_are_labels(Tokens(500), labels))  # a table of few rows
    tokens = [Call((torch.randint(0, 5000, (2, 32)),)) for _ in range(4)]
    assert not list(what_are_labels(Tokens(), tokens))
    assert not list(what_are_labels(Tokens(), labels[:1]))  # too few to tell


class TwoInputs(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, y)


def test_labels_that_do_not_fit_are_named() -> None:
    batches = [(torch.randn(4, 8), torch.randint(0, 3, (4,)))]
    with pytest.raises(InvalidInputError, match=r"element 1 of the batch, torch.int64.*labels"):
        x86quant.quantize(TwoInputs(), batches)
    with pytest.raises(InvalidInputError, match=r"element 0 of the batch.*labels"):
        x86quant.quantize(nn.Linear(8, 2), [torch.randint(0, 3, (4,))], mode="static")


def test_a_table_may_be_asked_for_a_size() -> None:
    class Positions(nn.Embedding):
        def forward(self, shape: Any) -> torch.Tensor:
            return super().forward(torch.arange(shape[1]))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.positions = nn.Embedding(2000, 4), Positions(2000, 4)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.words(ids) + self.positions(ids.shape)

    labels = [Call((torch.randint(0, 10, (8, 20)),)) for _ in range(4)]
    (said,) = what_are_labels(Model(), labels)
    assert "'words'" in said
