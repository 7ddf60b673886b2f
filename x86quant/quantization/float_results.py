"""What a float model returns, computed once for each call: many steps compare with it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from x86quant.calling.call import Call
from x86quant.calling.running import flat_floats, run, tensors_in
from x86quant.calling.state import state_kept

#: Results are kept up to so many bytes, and beyond that computed again.
_KEPT_BYTES = 256 << 20


class FloatResults:
    """The results of one float model, which are not to be changed."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        #: By the identity of the call, which is kept, so that no other gets it.
        self._known: dict[int, tuple[Call, Any, int]] = {}
        #: What depends on what this very model keeps of earlier calls.
        self._own: dict[int, tuple[Call, Any]] = {}

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
        if keeps_state:
            self._own[id(call)] = (call, result)
        else:
            self.note(call, result)
        return result

    def note(self, call: Call, result: Any) -> None:
        """What a run of the model, or of a copy of it, has returned."""
        size = sum(x.numel() * x.element_size() for x in tensors_in(result))
        kept = sum(known for *_, known in self._known.values())
        if kept + size <= _KEPT_BYTES:
            self._known.setdefault(id(call), (call, result, size))

    def flat(self, call: Call) -> torch.Tensor:
        """All float tensors of the result, as one flat tensor."""
        return flat_floats(self.of(call))
