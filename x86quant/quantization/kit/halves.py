"""Calls that the accuracy kit's steps are fitted to, and others that they are judged by."""

from __future__ import annotations

import dataclasses
import operator

from torch import nn

from x86quant.calling.call import Call
from x86quant.calling.differences import difference
from x86quant.calling.running import run
from x86quant.calling.state import state_kept
from x86quant.capture.variants import shared_rows
from x86quant.forms.call_form import take_apart

#: A single batch is taken apart into so many; up to so many are judged one by one.
_PIECES = 4


@dataclasses.dataclass(frozen=True, slots=True)
class Halves:
    """Calls that steps are fitted to, and others to judge them by; the same if there is one.

    Attributes:
        seen: what steps are fitted to.
        unseen: what they are judged by.
        held_back: the last of these: ranges are judged by them when all others are known.
    """

    seen: tuple[Call, ...]
    unseen: tuple[Call, ...]
    held_back: tuple[Call, ...] = ()

    @staticmethod
    def of(calls: tuple[Call, ...]) -> Halves:
        """Every other call is to judge by, and of those the last quarter of all is held back."""
        if len(calls) < 2:
            return Halves(calls, calls)
        unseen = calls[1::2]
        return Halves(calls[::2], unseen, unseen[-max(1, len(calls) // 4) :])

    @staticmethod
    def of_rows(model: nn.Module, calls: tuple[Call, ...]) -> Halves:
        """The same; a single batch is taken apart, if ``model`` computes each row by itself."""
        rows = shared_rows(calls[0]) if len(calls) == 1 else 0
        if rows < 2:
            return Halves.of(calls)
        count = min(rows, _PIECES)
        parts = [slice(n, None, count) for n in range(count)]
        pieces = tuple(calls[0].mapped(operator.itemgetter(part)) for part in parts)
        with state_kept(model):
            try:
                whole = take_apart(run(model, calls[0]))[1]
                for part, piece in zip(parts, pieces, strict=True):
                    if difference([x[part] for x in whole], take_apart(run(model, piece))[1]):
                        return Halves.of(calls)
            except Exception:  # a model may raise anything at another number of rows
                return Halves.of(calls)
        return Halves.of(pieces)

    def folds(self) -> tuple[Halves, ...]:
        """Themselves, or of a few calls each in turn to judge by what the others make."""
        calls = self.calls
        if self.seen is self.unseen or len(calls) > _PIECES:
            return (self,)
        return tuple(Halves((*calls[:n], *calls[n + 1 :]), (calls[n],)) for n in range(len(calls)))

    @property
    def calls(self) -> tuple[Call, ...]:
        """All of them, those held back at the end."""
        if self.seen is self.unseen:
            return self.seen
        return (*self.seen, *self.unseen)
