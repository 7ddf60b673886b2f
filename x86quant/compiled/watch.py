"""Telling whether the tensors of a graph are those that were packed."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from x86quant.packing.linear_dynamic import track_writes

_version = operator.attrgetter("_version")
_address = torch.Tensor.data_ptr


class Watch:
    """Remembers the tensors of a module: which they are, where they lie, how often written to.

    Of a graph these are its constants. It keeps the tensors and their memory alive, so that none of
    their addresses can come back as another's. What torch does not track is not seen: writes
    through ``.data`` of a tensor, or through NumPy. It is asked at every call, and therefore
    written for the interpreter's speed.
    """

    def __init__(self, module: nn.Module) -> None:
        self._dictionaries: list[dict[str, Any]] = []
        owners = _owners(module) if isinstance(module, GraphModule) else module.modules()
        for owner in owners:
            self._dictionaries += (owner._buffers, owner._parameters, owner._modules)
        self._dictionaries = [d for d in self._dictionaries if d]
        self._values = [value for d in self._dictionaries for value in d.values()]
        self._tensors = [x for x in self._values if isinstance(x, torch.Tensor)]
        self._memory = [x.untyped_storage() for x in self._tensors]
        # Those of inference mode have no version.
        self._counting = [x for x in self._tensors if not x.is_inference()]
        self._versions = list(map(_version, self._counting))
        self._addresses = list(map(_address, self._tensors))

    def holds(self) -> bool:
        """Whether nothing was replaced, moved or written to since."""
        now: list[Any] = []
        for dictionary in self._dictionaries:
            now += dictionary.values()
        return (
            len(now) == len(self._values)
            and all(map(operator.is_, now, self._values))
            and list(map(_version, self._counting)) == self._versions
            and list(map(_address, self._tensors)) == self._addresses
        )


def track_all_writes(graph_module: GraphModule) -> None:
    """Replace constants of the graph that were made in inference mode."""
    for owner in _owners(graph_module):
        track_writes(owner._buffers)


def _owners(graph_module: GraphModule) -> Iterator[nn.Module]:
    """The modules that hold constants of the graph."""
    paths = {
        str(node.target).rpartition(".")[0]
        for node in graph_module.graph.nodes
        if node.op == "get_attr"
    }
    return (graph_module.get_submodule(path) for path in sorted({"", *paths}))
