"""``Traced``: a graph that stands for a module, and the calls that it stands for."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch.fx import GraphModule

from x86quant.calling.call import Call
from x86quant.errors import UnsupportedError
from x86quant.forms.call_form import CallForm, Structure
from x86quant.forms.guard import Guard


@dataclasses.dataclass(frozen=True, slots=True)
class Traced:
    """A traced module.

    Attributes:
        graph_module: from tensors to a tuple of tensors; layers keep their paths.
        form: how the module is called.
        results: the structure of its result.
        guard: which tensors the graph holds for, beside those it is verified on.
        method: "torch.fx" or "torch.export".
        is_partial: whether the module was seen to be called with what the graph does not hold for,
            or stands in code that might do so.
    """

    graph_module: GraphModule
    form: CallForm
    results: Structure
    guard: Guard
    method: str
    is_partial: bool = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the module would return, by the graph."""
        # Not by a call of the graph module, which prints where a size that it does not take fails.
        return self.results.fill(self.graph_module.forward(*self.tensors(Call(args, kwargs))))

    def tensors(self, call: Call) -> list[Any]:
        """The inputs of the graph.

        Raises:
            UnsupportedError: the call has another form, or is outside of the guard.
        """
        tensors = self.form.tensors(call.args, call.kwargs)
        if tensors is None:
            raise UnsupportedError("a call with other arguments")
        reason = self.guard.refusal(tensors)
        if reason is not None:
            raise UnsupportedError(reason)
        return tensors

    def inputs(self, call: Call) -> Call | None:
        """A call of the graph; None if it does not hold for ``call``."""
        try:
            return Call(tuple(self.tensors(call)))
        except UnsupportedError:
            return None
