"""What the runtime knows of an op that has native steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from x86quant.lowering.graph_tools import attribute
from x86quant.runtime.draft import Draft
from x86quant.runtime.plan import Value


class KnownSizes:
    """The sizes and types of the values of a graph that are known so far."""

    def __init__(self, root: GraphModule) -> None:
        self.root = root
        self.values: dict[Node, Any] = {}
        self.dtypes: dict[Node, torch.dtype] = {}

    def size(self, node: Any) -> torch.Size:
        """The sizes of a tensor, a constant of the graph among them."""
        if node.op == "get_attr":
            tensor: torch.Tensor = attribute(self.root, str(node.target))
            return tensor.shape
        size = self.values[node]
        if not isinstance(size, torch.Size):
            raise ValueError(f"{node.name} is no tensor")
        return size


#: From the arguments of a node: the sizes of its result, or None where the op itself should say, or
#: complain.
SizeRule = Callable[[KnownSizes, Any], "Sequence[int] | None"]

#: The same for several results: tensors without data.
ResultsRule = Callable[[KnownSizes, Any], "tuple[torch.Tensor, ...] | None"]


@dataclasses.dataclass(frozen=True)
class NativeForm:
    """How a graph's op runs natively. Each is declared beside its lowering, in ``native_forms/``.

    Attributes:
        op: the name under ``torch.ops.x86quant``.
        sizes: the sizes of its result.
        lower: adds its steps to a draft and returns its result, or its results.
        takes: whether a node of this op has a native form.
        reads: the type of the tensors it computes from; None if they are of several types.
        gives: the type of its result.
        viewed: whether views of its result run natively, too.
        results: of an op with several results, instead of ``sizes``.
    """

    op: str
    sizes: SizeRule
    lower: Callable[[Draft, Node], Value | tuple[Value | None, ...]]
    takes: Callable[[Node], bool] = lambda node: True
    reads: torch.dtype | None = torch.uint8
    gives: torch.dtype = torch.uint8
    viewed: bool = True
    results: ResultsRule | None = None


def same_sizes(known: KnownSizes, kwargs: Any) -> Sequence[int]:
    """The rule of an op whose result has the sizes of ``x``."""
    return known.size(kwargs["x"])
