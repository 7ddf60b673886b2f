"""Calibration data that does not look like data."""

from __future__ import annotations

import pytest
import torch

from x86quant.calling.call import Call
from x86quant.quantization.odd_data import what_is_odd


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
