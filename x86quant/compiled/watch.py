"""Telling whether the tensors of a graph are those that were packed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule


class Watch:
    """Remembers the tensors of a graph: which they are, where their data lie, how often written.

    It keeps the tensors alive, so that none of their addresses can come back as another's. What
    torch does not track is not seen: writes through ``.data`` of a tensor, or through NumPy.
    """

    def __init__(self, graph_module: GraphModule) -> None:
        self._dictionaries: list[dict[str, Any]] = []
        for owner in owners(graph_module):
            self._dictionaries += (owner._buffers, owner._parameters, owner._modules)
        self._values = [value for d in self._dictionaries for value in d.values()]
        self._states = [_state(value) for value in self._values]

    def holds(self) -> bool:
        """Whether nothing was replaced, moved or written to since."""
        i = 0
        values, states = self._values, self._states
        for dictionary in self._dictionaries:
            for value in dictionary.values():
                if i == len(values) or value is not values[i] or _state(value) != states[i]:
                    return False
                i += 1
        return i == len(values)


def owners(graph_module: GraphModule) -> Iterator[nn.Module]:
    """The modules that hold constants of the graph."""
    paths = {
        str(node.target).rpartition(".")[0]
        for node in graph_module.graph.nodes
        if node.op == "get_attr"
    }
    return (graph_module.get_submodule(path) for path in sorted({"", *paths}))


def track(graph_module: GraphModule) -> None:
    """Replace tensors made in inference mode: writes to those leave no trace."""
    with torch.inference_mode(False):
        for owner in owners(graph_module):
            for name, buffer in owner._buffers.items():
                if buffer is not None and buffer.is_inference():
                    owner._buffers[name] = buffer.clone()


def _state(value: Any) -> tuple[int, int] | None:
    return (value.data_ptr(), value._version) if isinstance(value, torch.Tensor) else None
