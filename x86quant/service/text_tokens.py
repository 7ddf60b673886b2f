"""Texts to rows of tokens by a tokenizer of transformers, and rows to arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from x86quant.service.engine import Text, TokenRow

_IDS, _MASK, _KINDS = "input_ids", "attention_mask", "token_type_ids"


class TextTokens:
    """A tokenizer, used by one thread at a time.

    Attributes:
        pad: the id that stands behind short rows.
    """

    def __init__(self, tokenizer: Any, max_tokens: int) -> None:
        self._tokenizer, self._max_tokens = tokenizer, max_tokens
        self.pad: int = tokenizer.pad_token_id or 0
        self._rust: Any = None
        if getattr(tokenizer, "backend_tokenizer", None) is not None:
            # Its own copy: calls of the tokenizer itself set how much is cut off and padded.
            self._rust = type(tokenizer.backend_tokenizer).from_str(
                tokenizer.backend_tokenizer.to_str()
            )
            self._rust.no_truncation()
            self._rust.no_padding()

    def of(self, texts: Sequence[Text]) -> list[TokenRow]:
        """The tokens of each text, however many."""
        if self._rust is not None:  # several times as fast
            return [TokenRow(e.ids, e.type_ids) for e in self._rust.encode_batch_fast(list(texts))]
        return [self._row(text, truncation=False, verbose=False) for text in texts]

    def shortened(self, text: Text, keep_end: bool) -> TokenRow:
        """The tokens of ``text``, without those beyond the most there may be."""
        side = self._tokenizer.truncation_side
        self._tokenizer.truncation_side = "left" if keep_end else "right"
        try:
            return self._row(text, truncation="longest_first", max_length=self._max_tokens)
        finally:
            self._tokenizer.truncation_side = side

    def _row(self, text: Text, **options: Any) -> TokenRow:
        given = (text,) if isinstance(text, str) else text
        found = self._tokenizer(*given, **options)
        return TokenRow(found[_IDS], found.get(_KINDS, ()))


def padded(
    rows: Sequence[TokenRow], pad: int, shape: tuple[int, int] | None = None
) -> dict[str, np.ndarray]:
    """int64 arrays: ids with ``pad`` behind short rows, the mask of tokens, their kinds.

    ``shape`` is [rows, longest] unless given. Rows beyond those given have one token each.
    """
    shape = shape or (len(rows), max(map(len, rows)))
    found = {
        name: np.full(shape, pad if name == _IDS else 0, dtype=np.int64)
        for name in (_IDS, _MASK, _KINDS)
    }
    for place, row in enumerate(rows):
        found[_IDS][place, : len(row)] = row.ids
        found[_MASK][place, : len(row)] = 1
        if row.kinds:
            found[_KINDS][place, : len(row)] = row.kinds
    found[_MASK][len(rows) :, 0] = 1
    return found


#: Sizes of batches: each shape has a plan of its own, which takes milliseconds to make, and few
#: shapes are planned once and for all. Where padding is not computed more of it costs little.
LENGTHS = (16, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512)
_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)


def roomy_shape(rows: Sequence[TokenRow], most: int) -> tuple[int, int]:
    """The smallest shape among few that holds ``rows``; beyond ``most`` tokens a model may end."""
    longest = max(map(len, rows))
    return _at_least(len(rows), _COUNTS), max(longest, min(most, _at_least(longest, LENGTHS)))


def _at_least(size: int, known: Sequence[int]) -> int:
    """The smallest of ``known`` that is not less; beyond these a multiple of the last."""
    last = known[-1]
    return next((one for one in known if one >= size), -(-size // last) * last)
