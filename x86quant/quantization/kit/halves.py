"""Calls that the accuracy kit's steps are fitted to, and others that they are judged by."""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Sequence

from x86quant.calling.call import Call
from x86quant.calling.differences import difference
from x86quant.capture.variants import elements, shared_rows
from x86quant.forms.call_form import take_apart
from x86quant.quantization.tracing.float_results import FloatResults

#: A single batch is taken apart into so many; up to so many are judged one by one.
_PIECES = 4
#: What chooses between two ways is judged by so many calls.
_JUDGES = 4
#: A piece of one of several batches has so many elements and rows at least: with fewer, what each
#: run takes besides counts for more than what is computed.
_LEAST_ELEMENTS, _LEAST_ROWS = 1 << 17, 2


@dataclasses.dataclass(frozen=True, slots=True)
class Halves:
    """Calls that steps are fitted to, and others to judge them by; the same if there is one.

    Attributes:
        seen: what steps are fitted to.
        unseen: what they are judged by.
        held_back: the last of these: ranges are judged by them when all others are known.
        pieces: into how many calls each batch was taken apart, at most.
    """

    seen: tuple[Call, ...]
    unseen: tuple[Call, ...]
    held_back: tuple[Call, ...] = ()
    pieces: int = 1

    @staticmethod
    def of(calls: tuple[Call, ...]) -> Halves:
        """Every other call is to judge by, and of those the last quarter of all is held back."""
        if len(calls) < 2:
            return Halves(calls, calls)
        unseen = calls[1::2]
        return Halves(calls[::2], unseen, unseen[-max(1, len(calls) // 4) :])

    @staticmethod
    def of_rows(exact: FloatResults, calls: tuple[Call, ...]) -> Halves:
        """The same of calls of fewer rows, if the model computes each row by itself.

        A single batch is taken apart, so that there is something to judge by. Of several, large
        ones are: steps are tried on a few rows of many batches, in a fraction of the time.
        """
        parts = _taken_apart(calls[0], alone=len(calls) == 1)
        if len(parts) < 2 or not _computes_rows(exact, calls[0], parts):
            return Halves.of(calls)
        if len(calls) == 1:
            return Halves.of(parts)
        whole = Halves.of(calls)
        apart = {id(call): _taken_apart(call) for call in calls}
        seen, held_back, judges = (
            _in_turns([apart[id(call)] for call in some])
            for some in (whole.seen, whole.held_back, whole.unseen[: -len(whole.held_back)])
        )
        return Halves(seen, (*judges, *held_back), held_back, max(map(len, apart.values())))

    @property
    def judges(self) -> tuple[Call, ...]:
        """A few of the calls not seen, or as many pieces of them as a batch has."""
        return self.unseen[: max(_JUDGES, self.pieces)]

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


def _taken_apart(call: Call, *, alone: bool = False) -> tuple[Call, ...]:
    """``call`` in pieces of some of its rows, or as it is."""
    rows = shared_rows(call)
    count = min(rows // _LEAST_ROWS, elements(call) // _LEAST_ELEMENTS)
    if alone:
        count = max(count, min(rows, _PIECES))
    if count < 2:
        return (call,)
    return tuple(
        call.mapped(operator.itemgetter(slice(first, None, count))) for first in range(count)
    )


def _computes_rows(exact: FloatResults, call: Call, parts: Sequence[Call]) -> bool:
    """Whether what the model makes of the first and the last of ``parts`` is part of the whole."""
    try:
        whole = take_apart(exact.of(call))[1]
        for first in (0, len(parts) - 1):
            some = [x[first :: len(parts)] for x in whole]
            if difference(some, take_apart(exact.of(parts[first]))[1]):
                return False
    except Exception:  # a model may raise anything at another number of rows
        return False
    return True


def _in_turns(calls: Sequence[Sequence[Call]]) -> tuple[Call, ...]:
    """The first piece of each call, then the second of each, ..."""
    turns = itertools.zip_longest(*calls)
    return tuple(piece for turn in turns for piece in turn if piece is not None)
