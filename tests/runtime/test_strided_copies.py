"""Copies between layouts, by blocks and by several threads: what torch's ``contiguous`` gives."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import x86quant


@pytest.mark.parametrize("size", [(1, 1), (3, 17), (16, 16), (33, 70), (64, 129)])
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_pixels_as_an_image_again(size: tuple[int, int], threads: int) -> None:
    """Of a product of rows, whose floats are transposed in blocks of 16 by 16."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 1), nn.ReLU(), nn.Conv2d(16, 37, 1)).eval()
    batches = [torch.randn(2, 3, *size) for _ in range(2)]
    int8 = x86quant.quantize(model, batches, progress=False, speed_check=False)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for rows in (1, 3):
            x = torch.randn(rows, 3, *size)
            found = int8(x)
            assert found.is_contiguous()
            torch.testing.assert_close(found, int8.graph_module(x))
    finally:
        torch.set_num_threads(before)
