"""A transformer as torch.onnx writes it, with free batches and lengths."""

from __future__ import annotations

import io
import math
import warnings

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import x86quant
from tests.onnx_models.small_models import by_onnx_runtime
from x86quant import from_onnx


class Block(nn.Module):
    def __init__(self, size: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v = (nn.Linear(size, size) for _ in range(3))
        self.out, self.up, self.down = (nn.Linear(size, size) for _ in range(3))
        self.first, self.second = nn.LayerNorm(size), nn.LayerNorm(size)

    def forward(self, x):
        n, tokens, size = x.shape
        q, k, v = (
            one(x).view(n, tokens, self.heads, size // self.heads).transpose(1, 2)
            for one in (self.q, self.k, self.v)
        )
        shares = torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(size // self.heads), -1)
        x = self.first(x + self.out((shares @ v).transpose(1, 2).reshape(n, tokens, size)))
        return self.second(x + self.down(F.gelu(self.up(x))))


@pytest.mark.parametrize("opset", [13, 17])
def test_a_transformer(opset: int) -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Embedding(100, 64), Block(), Block()).eval()
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, about this way to export
        torch.onnx.export(
            network, (torch.zeros(2, 16, dtype=torch.int64),), file, input_names=["ids"],
            dynamic_axes={"ids": {0: "n", 1: "tokens"}}, opset_version=opset, dynamo=False,
        )  # fmt: skip
    proto = onnx.load_from_string(file.getvalue())
    module = from_onnx(proto)
    generator = np.random.default_rng(0)
    ids = generator.integers(0, 100, (3, 9))
    (right,) = by_onnx_runtime(proto, ids=ids)
    assert np.abs(module(torch.from_numpy(ids)).detach().numpy() - right).max() < 1e-5
    data = [{"ids": generator.integers(0, 100, (4, 16))} for _ in range(2)]
    int8 = x86quant.quantize(proto, data, speed_check=False, progress=False)
    found = int8(torch.from_numpy(ids)).detach().numpy()
    assert 10 * np.log10((right**2).sum() / ((found - right) ** 2).sum()) > 35
