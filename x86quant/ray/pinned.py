"""A loaded artifact with threads and cores of its own: what a worker of Ray runs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from x86quant.artifacts.reader import Input, from_bytes
from x86quant.compiled import CompiledModule, GuardedModule
from x86quant.ray.cores import CoreLease, lease

#: Makes a float model of the class that was quantized, for files that need it.
MakeModel = Callable[[], nn.Module]


class PinnedModel:
    """A model that runs on ``threads`` threads, on cores that no other such model uses.

    Attributes:
        inputs: what the artifact says of its inputs; empty where it says nothing.
        keeps_inputs: whether the model is known to write into none of its arguments, so that they
            may lie in memory that others read.
    """

    def __init__(
        self, artifact: bytes, *, threads: int = 1, pin: bool = True, model: MakeModel | None = None
    ) -> None:
        description, content = from_bytes(artifact)
        self._model = content.build(None if model is None else model())
        self._threads = threads
        self._lease: CoreLease | None = lease(threads) if pin else None
        self.inputs: tuple[Input, ...] = description.inputs
        # What a graph in a file may call writes into nothing but what the graph itself has made.
        self.keeps_inputs = isinstance(self._model, CompiledModule) or (
            isinstance(self._model, GuardedModule) and self._model.original is None
        )

    def __call__(self, args: Sequence[torch.Tensor], kwargs: Mapping[str, torch.Tensor]) -> Any:
        """Run the model, in whichever thread this is."""
        if self._lease is not None:
            self._lease.settle()
        if torch.get_num_threads() != self._threads:  # each thread has a number of its own
            torch.set_num_threads(self._threads)
        with torch.no_grad():
            return self._model(*args, **kwargs)

    def warm(self, rows: int) -> None:
        """Plan for batches of ``rows``, where the artifact says enough of its inputs."""
        # Zeros of this size may be nothing for the model; what real batches are is not known here.
        with contextlib.suppress(Exception):
            example = zeros(self.inputs, rows)
            if example:
                self(example, {})


def zeros(inputs: Sequence[Input], rows: int) -> tuple[torch.Tensor, ...]:
    """Zeros like ``inputs`` with ``rows`` for their first size; empty if not enough is known."""
    found = []
    for one in inputs:
        if one.dtype is None or not one.shape:
            return ()
        found.append(torch.zeros((rows, *one.shape[1:]), dtype=dtype_of(one.dtype)))
    return tuple(found)


def dtype_of(name: str) -> torch.dtype:
    """``torch.float32`` for "float32" or "torch.float32"."""
    found = getattr(torch, name.removeprefix("torch."))
    assert isinstance(found, torch.dtype)
    return found
