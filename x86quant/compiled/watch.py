"""Telling whether the tensors of a graph are those that were packed."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import nn
from torch.fx import GraphModule

from x86quant import extension
from x86quant.packing.linear_dynamic import track_writes


def watch(module: nn.Module) -> Callable[[], bool]:
    """Tells from now on whether no tensor or module in ``module`` was replaced or written to since.

    Of a graph these are its constants. Tensors that were moved or reshaped count as well. What
    torch does not track is not seen: writes through ``.data`` of a tensor, or through NumPy.

    Raises:
        ExtensionError: the compiled part is missing.
    """
    owners = _owners(module) if isinstance(module, GraphModule) else module.modules()
    dictionaries = [d for o in owners for d in (o._buffers, o._parameters, o._modules) if d]
    holds: Callable[[], bool] = extension.fast().Watch(tuple(dictionaries)).holds
    return holds


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
