"""Running a float model to see what goes on inside of it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from x86quant.quantization.batches import Call


@contextlib.contextmanager
def no_fast_path() -> Iterator[None]:
    """A block in which torch's transformer layers call their layers, not one op past them all."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def feed(
    model: nn.Module, calls: Iterable[Call], callbacks: Mapping[str, Callable[[Call], Any]]
) -> None:
    """Run ``model`` on ``calls`` and show each part named, by path, the inputs it gets."""
    if set(callbacks) == {""}:  # the inputs are the model's own: no need to run it
        with torch.no_grad():
            for call in calls:
                callbacks[""](call)
        return
    with contextlib.ExitStack() as stack:
        stack.enter_context(no_fast_path())
        stack.enter_context(torch.no_grad())
        for path, callback in callbacks.items():

            def show(
                _: nn.Module,
                args: tuple[Any, ...],
                kwargs: dict[str, Any],
                callback: Callable[[Call], Any] = callback,
            ) -> None:
                callback(Call(args, kwargs))

            module = model.get_submodule(path)
            handle = module.register_forward_pre_hook(show, with_kwargs=True)
            stack.callback(handle.remove)
        for call in calls:
            call(model)


def outputs(model: nn.Module, calls: Sequence[Call]) -> Iterator[torch.Tensor]:
    """All float tensors that ``model`` returns for each call, as one flat tensor."""
    with torch.no_grad():
        for call in calls:
            leaves = pytree.tree_leaves(call(model))
            tensors = [x for x in leaves if isinstance(x, torch.Tensor) and x.is_floating_point()]
            yield torch.cat([x.flatten() for x in tensors])
