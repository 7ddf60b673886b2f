"""Tensors that are still what they were."""

from __future__ import annotations

import pytest
import torch

from x86quant.lowering.tensor_memory import SeenTensors


def test_tensors_are_what_they_were_until_one_is_written_to() -> None:
    tensors = [torch.zeros(3), torch.ones(2)]
    seen = SeenTensors(tensors)
    assert seen.are_unwritten()
    assert seen.still_are(tensors)
    tensors[1].view(2)[0] = 5.0  # as a view tells, too
    assert not seen.are_unwritten()
    assert not seen.still_are(tensors)


@pytest.mark.parametrize("others", [0, 1, 3], ids="{} tensors".format)
def test_others_are_not_those_seen(others: int) -> None:
    tensors = [torch.zeros(3), torch.ones(2)]
    seen = SeenTensors(tensors)
    assert not seen.still_are([*tensors, *tensors][:others])
    assert not seen.still_are([x.clone() for x in tensors])
    assert not seen.still_are(tensors[::-1])


def test_of_tensors_made_in_inference_mode_nothing_is_known() -> None:
    with torch.inference_mode():
        tensors = [torch.zeros(3)]
    assert not SeenTensors(tensors).are_unwritten()
