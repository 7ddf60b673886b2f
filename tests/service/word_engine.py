"""An engine whose tokens are words, and whose results can be read."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from x86quant.service import EngineFacts, TokenRow

MOST = 12
_FAILS, _NAN = 666, 777
_IDS = {"boom": _FAILS, "nan": _NAN}


class WordEngine:
    """The embedding of a text: its words, the sum of their lengths, and how often it was asked."""

    def __init__(self, task: Any = "embed", *, pads: bool = False, width: int = 3) -> None:
        self.facts = EngineFacts(
            "words", task, MOST, 1000, width, pads, prompts={"query": "q: "}, dtype="none"
        )
        self.batches: list[list[int]] = []
        self.free = threading.Event()  # batches wait for it
        self.free.set()
        self.began = threading.Event()

    def tokenize(self, texts: Sequence[Any]) -> list[TokenRow]:
        return [_row(text) for text in texts]

    def shortened(self, text: Any, *, keep_end: bool = False) -> TokenRow:
        ids = _row(text).ids
        return TokenRow(ids[-MOST:] if keep_end else ids[:MOST])

    def run(self, rows: Sequence[TokenRow]) -> np.ndarray:
        self.batches.append([len(row) for row in rows])
        self.began.set()
        assert self.free.wait(30)
        if any(_FAILS in row.ids for row in rows):
            raise RuntimeError("boom was in it")
        found = np.array([[len(row), sum(row.ids), 1] for row in rows], dtype=np.float32)
        found[[_NAN in row.ids for row in rows]] = np.nan
        return found if self.facts.task == "embed" else found[:, 1:2] - 4


def _row(text: Any) -> TokenRow:
    words = text.split() if isinstance(text, str) else [*text[0].split(), *text[1].split()]
    return TokenRow([_IDS.get(word, len(word)) for word in words])
