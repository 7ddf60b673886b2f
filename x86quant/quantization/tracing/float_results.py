"""What a float model returns, computed once for each call: many steps compare with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from x86quant.calling.call import Call
from x86quant.calling.running import run, tensors_in
from x86quant.calling.state import state_kept
from x86quant.quantization.kinds_of_values import EvenValues
from x86quant.quantization.tracing.choices_by_value import Places

#: Calls, their results, and the bytes of these.
_Results = dict[int, tuple[Call, Any, int]]
#: Results are kept up to so many bytes, and beyond that computed again.
_KEPT_BYTES = 256 << 20


class FloatResults:
    """The results of one float model, which are not to be changed.

    Attributes:
        model: whose results they are.
        places: where models are judged, if not by their results.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.places: Places | None = None
        #: By the identity of the call, which is kept, so that no other gets it.
        self._known: _Results = {}
        #: The same where it depends on what this very model keeps of earlier calls.
        self._own: _Results = {}
        #: The same at ``places``.
        self._judged: _Results = {}
        #: By the identities of calls, which are kept as well.
        self._even: dict[tuple[int, ...], tuple[tuple[Call, ...], EvenValues]] = {}

    def of_copy(self, model: nn.Module) -> FloatResults:
        """The results of ``model``, which returns the same: what is known so far is shared."""
        found = FloatResults(model)
        found._known = self._known
        return found

    def of(self, call: Call) -> Any:
        """What the model returns for ``call``."""
        for known in (self._own, self._known):
            if id(call) in known:
                return known[id(call)][1]
        with state_kept(self.model) as state:
            result = run(self.model, call)
            keeps_state = bool(state.changed())
        _keep(call, result, self._own if keeps_state else self._known)
        return result

    def judge_at(self, places: Places | None) -> None:
        """Judge models at ``places`` from now on; they are others once parts were refused."""
        self.places = places
        self._judged.clear()
        self._even.clear()

    def view(self, model: nn.Module) -> Callable[..., Any]:
        """What to call in place of ``model``, a form of this one, for what it is judged by."""
        return model if self.places is None else self.places.view(model)

    def judged(self, call: Call) -> Any:
        """What other models are compared with on ``call``."""
        if self.places is None:
            return self.of(call)
        if id(call) not in self._judged:
            with state_kept(self.model):
                result = run(self.view(self.model), call)
            _keep(call, result, self._judged)
            return result
        return self._judged[id(call)][1]

    def note(self, call: Call, result: Any) -> None:
        """What a run of the model, or of a copy of it, has returned."""
        _keep(call, result, self._known)

    def even(self, calls: Sequence[Call]) -> EvenValues:
        """How results become vectors in which each kind of values in those of ``calls`` counts."""
        key = tuple(map(id, calls))
        if key not in self._even:
            self._even[key] = (tuple(calls), EvenValues([self.judged(call) for call in calls]))
        return self._even[key][1]


def _keep(call: Call, result: Any, known: _Results) -> None:
    size = sum(x.numel() * x.element_size() for x in tensors_in(result))
    if sum(kept for *_, kept in known.values()) + size <= _KEPT_BYTES:
        known.setdefault(id(call), (call, result, size))
