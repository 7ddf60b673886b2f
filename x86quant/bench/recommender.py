"""Two models without a package of their own: a recommender and a tagger of sequences."""

from __future__ import annotations

import itertools

import torch
from torch import nn

DENSE, TABLES, ROWS, WIDTH = 13, 26, 10_000, 64
FEATURES = 128


def _layers(*sizes: int) -> list[nn.Module]:
    return [part for a, b in itertools.pairwise(sizes) for part in (nn.Linear(a, b), nn.ReLU())]


class PlainDlrm(nn.Module):
    """As Naumov et al. describe it, in torch alone; one index of each table a sample."""

    pairs: torch.Tensor

    def __init__(self, tables: int = TABLES, rows: int = ROWS, width: int = WIDTH) -> None:
        super().__init__()
        self.bottom = nn.Sequential(*_layers(DENSE, 512, 256, width))
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, width, mode="sum") for _ in range(tables))
        self.register_buffer("pairs", torch.tril_indices(tables + 1, tables + 1, -1))
        wide = width + self.pairs.shape[1]
        self.top = nn.Sequential(*_layers(wide, 512, 512, 256), nn.Linear(256, 1))

    def columns(self, indices: torch.Tensor) -> list[torch.Tensor]:
        """The indices of each table."""
        return [indices[:, i : i + 1] for i in range(len(self.tables))]

    def forward(self, dense: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        """``indices``: samples × tables."""
        first = self.bottom(dense)
        columns = self.columns(indices)
        rows = [table(column) for table, column in zip(self.tables, columns, strict=True)]
        every = torch.stack([first, *rows], 1)
        products = torch.bmm(every, every.transpose(1, 2))
        joined = torch.cat([first, products[:, self.pairs[0], self.pairs[1]]], 1)
        logits: torch.Tensor = self.top(joined)
        return logits


class LstmTagger(nn.Module):
    """Two layers of LSTM, and a linear layer on every step."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(FEATURES, 256, num_layers=2, batch_first=True)
        self.head = nn.Linear(256, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x``: batch × steps × features."""
        logits: torch.Tensor = self.head(self.lstm(x)[0])
        return logits
