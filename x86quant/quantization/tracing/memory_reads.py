"""Where a model's results depend on how tensors lie in memory.

Parts in int8 return the float module's values, but may lay them out in memory in another order.
Torch sees values through strides, with three exceptions: ``as_strided`` and ``resize_``
would pick other values; what is a copy in one layout (``contiguous``, ``reshape``) is the tensor
itself in the other, so that a write in place to either changes both; and an ``out=`` of another
shape is resized to lie as the inputs do, over memory that other tensors may share.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from x86quant.calling.call import Call
from x86quant.calling.running import OpWatch, run
from x86quant.calling.state import state_kept
from x86quant.errors import first_line

aten = torch.ops.aten

_READS = frozenset(
    [
        aten.as_strided.default,
        aten.as_strided_.default,
        aten.as_strided_copy.default,
        aten.as_strided_scatter.default,
        aten.resize_.default,
    ]
)
_COPIES = frozenset([aten.clone.default, aten._to_copy.default])


class _MemoryMode(OpWatch):
    """Notes what is seen of memory outside of parts: what ``as_strided`` reads, whether what is
    written in place is a copy or was copied, and how an ``out=`` that is resized lies then.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[tuple[Any, ...]] = []
        self.inside = 0
        # Each with a tensor, so that no other takes its place in memory.
        self._copies: dict[int, torch.Tensor] = {}
        self._copied: dict[int, torch.Tensor] = {}

    def op(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run ``func``, and note what is seen."""
        if not self.inside and func in _READS:
            x = args[0]
            self.seen.append((func, tuple(x.shape), x.stride(), x.storage_offset()))
        elif not self.inside and func._schema.is_mutable:
            tensors = [x for x in pytree.tree_leaves((args, kwargs)) if _is_dense(x)]
            known = [(_storage(x) in self._copies, _storage(x) in self._copied) for x in tensors]
            self.seen.append((func, *known))
        out = kwargs.get("out")
        lay: tuple[Any, ...] = (out.shape, out.stride()) if isinstance(out, torch.Tensor) else ()
        result = func(*args, **kwargs)
        if not self.inside and isinstance(out, torch.Tensor) and out.shape != lay[0]:
            self.seen.append((func, *lay, out.stride()))
        if not self.inside and func in _COPIES and _is_dense(result):
            self._copies[_storage(result)] = result
            if _is_dense(args[0]):  # torch.func makes tensors of numbers by it
                self._copied[_storage(args[0])] = args[0]
        return result

    def enter(self, *_: Any) -> None:
        """A part runs."""
        self.inside += 1

    def leave(self, *_: Any) -> None:
        """It has run."""
        self.inside -= 1


def _is_dense(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.layout is torch.strided


def _storage(x: torch.Tensor) -> int:
    return int(x.untyped_storage()._cdata)


def sees_other_memory(
    reference: nn.Module, model: nn.Module, parts: Collection[str], call: Call
) -> str | None:
    """Why ``model``, whose ``parts`` are in int8, does not see memory as ``reference``; or None."""
    try:
        if _seen(model, parts, call) == _seen(reference, parts, call):
            return None
    except RuntimeError as error:  # watched, torch takes some ops apart, down to views of memory
        return f"its results may lie otherwise in memory in int8: {first_line(error)}"
    return (
        "as_strided or a write in place depends on how its results lie in memory, which is "
        "otherwise in int8"
    )


def _seen(model: nn.Module, parts: Collection[str], call: Call) -> list[tuple[Any, ...]]:
    mode = _MemoryMode()
    with contextlib.ExitStack() as stack:
        for path in parts:
            part = model.get_submodule(path)
            stack.callback(part.register_forward_pre_hook(mode.enter).remove)
            # After one that raises, too: its caller may go on.
            stack.callback(part.register_forward_hook(mode.leave, always_call=True).remove)
        stack.enter_context(state_kept(model))
        stack.enter_context(mode)
        run(model, call)
    return mode.seen
