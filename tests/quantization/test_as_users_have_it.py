"""``quantize`` as users call it: nothing switched off, whatever this machine finds faster.

Other tests switch off what depends on time, and let errors through that nobody foresaw. Here they
are as in use; what is compared are answers, never times.
"""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import x86quant
from tests.models import Residual, TwoLinears, bert, rows, sqnr
from x86quant.errors import TRACEBACK_VARIABLE, UnsupportedError, X86QuantWarning
from x86quant.lowering.passes import Report
from x86quant.quantization import speed


@pytest.fixture(autouse=True)
def nothing_switched_off(monkeypatch: pytest.MonkeyPatch, as_in_use: None) -> None:
    monkeypatch.setattr(speed, "can_tell", REAL)


#: Before any test replaces it.
REAL = speed.can_tell


class Words(nn.Module):
    """Embeddings, attention and a head: dynamic int8."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 64)
        layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(64, 8)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.embed(ids)))


class Clicks(nn.Module):
    """Sums of embeddings beside a small network."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(100, 16, mode="sum")
        self.dense = nn.Sequential(nn.Linear(13, 32), nn.ReLU(), nn.Linear(32, 16))
        self.top = nn.Linear(32, 1)

    def forward(self, dense: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(self.top(torch.cat([self.dense(dense), self.bag(ids)], 1)))


class Tagger(nn.Module):
    """An LSTM in both directions and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(32, 64, 2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(128, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x)[0])


Made = tuple[nn.Module, list[Any]]


def _images() -> Made:
    return Residual().eval(), [torch.randn(4, 8, 24, 24) for _ in range(3)]


def _words() -> Made:
    return Words().eval(), [torch.randint(0, 40, (4, 12)) for _ in range(3)]


def _bert() -> Made:
    model, call = bert()
    return model, [call, copy.copy(call)]


def _sequences() -> Made:
    return Tagger().eval(), [torch.randn(4, 9, 32) for _ in range(3)]


def _clicks() -> Made:
    return Clicks().eval(), [(torch.randn(8, 13), torch.randint(0, 100, (8, 5))) for _ in range(3)]


def _rows() -> Made:
    return TwoLinears().eval(), [rows(seed=seed) for seed in range(3)]


KINDS = [_images, _words, _bert, _sequences, _clicks, _rows]


def answers(model: Any, batch: Any) -> list[torch.Tensor]:
    with torch.no_grad():
        if isinstance(batch, dict):
            found = model(**batch)
        else:
            found = model(*batch) if isinstance(batch, tuple) else model(batch)
    leaves = pytree.tree_leaves(tuple(found.values()) if isinstance(found, dict) else found)
    return [x for x in leaves if isinstance(x, torch.Tensor)]


@pytest.mark.parametrize("make", KINDS, ids=lambda make: make.__name__[1:])
def test_answers_are_close_and_survive_a_file(make: Callable[[], Made], tmp_path: Path) -> None:
    assert TRACEBACK_VARIABLE not in os.environ
    assert speed.can_tell()
    torch.manual_seed(0)
    model, batches = make()
    expected = answers(model, batches[0])
    with warnings.catch_warnings():
        warnings.simplefilter("error", X86QuantWarning)  # of what failed, and runs in float
        int8 = x86quant.quantize(model, batches)
    found = answers(int8, batches[0])
    assert [x.shape for x in found] == [x.shape for x in expected]
    assert min(map(sqnr, expected, found)) > 15
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", X86QuantWarning)  # a class that is needed
        x86quant.save(int8, tmp_path / "model.x86q")
    loaded = x86quant.load(tmp_path / "model.x86q", model=model)
    assert min(map(sqnr, expected, answers(loaded, batches[0]))) > 15


def test_what_nobody_foresaw_is_said_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mistake of ours costs int8, and never shows as an error of Python."""

    def broken(*_: Any) -> Report:
        raise KeyError("a mistake of ours")

    monkeypatch.setattr("x86quant.lowering.passes.run_pass", broken)
    model, batches = _images()
    with pytest.raises(UnsupportedError, match=r"no part of Residual .*a mistake of ours"):
        x86quant.quantize(model, batches, progress=False)
