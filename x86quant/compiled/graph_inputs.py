"""What a compiled model takes: its arguments by position or by name, each like its example.

Graphs that compute each row, along the last dimension, by itself take rows that stand in tensors of
any rank, as ``nn.Linear`` does.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.fx import Graph, GraphModule, Node

from x86quant.errors import ArgumentsError, InvalidInputError
from x86quant.lowering.graph_tools import constant, is_op
from x86quant.ops.float_type import taken_types


@dataclasses.dataclass(frozen=True)
class GraphInput:
    """One argument.

    Attributes:
        name: as in the signature of the model.
        dtype, rank: those of the example; None if it was no tensor, or is not known.
        optional: whether it may be left out; it is ``default`` then.
    """

    name: str
    dtype: torch.dtype | None
    rank: int | None
    optional: bool = False
    default: Any = None

    @classmethod
    def of(cls, node: Node) -> GraphInput:
        """The argument that a placeholder stands for."""
        shape = node.meta.get("shape")
        return cls(
            str(node.target),
            node.meta.get("input_dtype"),
            None if shape is None else len(shape),
            bool(node.args),
            node.args[0] if node.args else None,
        )

    def checked(self, value: Any, float_type: torch.dtype) -> Any:
        """``value`` as the graph takes it.

        Raises:
            InvalidInputError: it is nothing like the example.
        """
        if self.rank is None or (self.optional and value is self.default):
            return value
        if not isinstance(value, torch.Tensor):
            raise InvalidInputError(f"input {self.name!r} must be a tensor, got {type(value)}")
        if value.device.type != "cpu":
            raise InvalidInputError(
                f"input {self.name!r} is on {value.device}; x86quant runs on the CPU, use .cpu()"
            )
        if value.layout != torch.strided:
            raise InvalidInputError(
                f"input {self.name!r} must be dense, got {value.layout}; use .to_dense()"
            )
        if value.dim() != self.rank:
            raise InvalidInputError(
                f"input {self.name!r} must have rank {self.rank} as when compiled, "
                f"got shape {tuple(value.shape)}"
            )
        assert self.dtype is not None
        if value.dtype == self.dtype:
            return value
        if self.dtype.is_floating_point and value.dtype in taken_types(float_type):
            return value.to(self.dtype)
        if self.dtype is torch.int64 and value.dtype is torch.int32:  # ids, to torch alike
            return value.to(torch.int64)
        raise InvalidInputError(
            f"input {self.name!r} must be {self.dtype}, got {value.dtype}; "
            f"convert it with .to({self.dtype})"
        )


class GraphInputs:
    """The arguments of a compiled model."""

    def __init__(self, graph: Graph) -> None:
        self._all = tuple(GraphInput.of(node) for node in graph.nodes if node.op == "placeholder")
        self._required = sum(not given.optional for given in self._all)

    def signature(self) -> inspect.Signature:
        """The same for ``inspect``."""
        kind, empty = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.empty
        parameters = [
            inspect.Parameter(given.name, kind, default=given.default if given.optional else empty)
            for given in self._all
        ]
        try:
            return inspect.Signature(parameters)
        except ValueError:  # an argument without a default behind one that has one
            return inspect.Signature([p.replace(default=empty) for p in parameters])

    def bound(
        self, positional: Sequence[Any], named: Mapping[str, Any], float_type: torch.dtype
    ) -> tuple[Any, ...]:
        """All arguments in order, up to the last one given, each as the graph takes it.

        Raises:
            ArgumentsError: one is missing, unknown or given twice.
            InvalidInputError: one is nothing like its example.
        """
        values = self._in_order(positional, named) if named else tuple(positional)
        if not self._required <= len(values) <= len(self._all):
            raise ArgumentsError(
                f"the compiled model takes {len(self._all)} inputs ({self._names()}), "
                f"got {len(values)}"
            )
        return tuple(
            given.checked(value, float_type)
            for given, value in zip(self._all, values, strict=False)
        )

    def _in_order(self, positional: Sequence[Any], named: Mapping[str, Any]) -> tuple[Any, ...]:
        rest = dict(named)
        values = list(positional)
        for given in self._all[len(positional) :]:
            if not rest:
                break
            if given.name not in rest and not given.optional:
                raise ArgumentsError(
                    f"the compiled model takes {self._names()}; {given.name!r} is missing"
                )
            values.append(rest.pop(given.name, given.default))
        if rest:
            name = next(iter(rest))
            twice = any(given.name == name for given in self._all)
            why = "was given twice" if twice else "is none of them"
            raise ArgumentsError(f"the compiled model takes {self._names()}; {name!r} {why}")
        return tuple(values)

    def _names(self) -> str:
        return ", ".join(given.name for given in self._all)


# --- rows in tensors of any rank ---

_POINTWISE = ("quantize", "dequantize", "requantize", "lut", "add", "mul")
_ALONG_AN_AXIS = ("layer_norm", "affine")
_PRODUCTS = ("linear", "linear_real", "linear_dynamic", "linear_weight_only")
_FUNCTIONS: frozenset[Any] = frozenset(
    {F.relu, F.gelu, F.silu, torch.relu, torch.sigmoid, torch.tanh}
    | {torch.ops.aten.mul.Tensor, torch.ops.aten.clamp.default}
)
_LAYERS = (nn.ReLU, nn.GELU, nn.SiLU, nn.Sigmoid, nn.Tanh, nn.Identity, nn.Dropout)


def row_rank(graph_module: GraphModule) -> int | None:
    """The rank of the one input, if every row in it is computed by itself; else None."""
    inputs = [node for node in graph_module.graph.nodes if node.op == "placeholder"]
    rank = len(inputs[0].meta.get("shape", ())) if len(inputs) == 1 else 0
    if rank < 2 or inputs[0].args:
        return None
    rowwise = all(_is_rowwise(node, graph_module, rank) for node in graph_module.graph.nodes)
    return rank if rowwise else None


def _is_rowwise(node: Node, graph_module: GraphModule, rank: int) -> bool:
    if node.op == "output":
        results = node.args[0] if isinstance(node.args[0], tuple) else (node.args[0],)
        return all(isinstance(x, Node) and x.op.startswith("call") for x in results)
    if node.op == "call_module":
        return type(graph_module.get_submodule(str(node.target))) in _LAYERS
    if node.op in ("placeholder", "get_attr"):
        return True  # constants are looked at where they are used
    if is_op(node, *_ALONG_AN_AXIS):
        return node.kwargs["axis"] in (rank - 1, -1)
    if is_op(node, *_PRODUCTS):
        return True
    constants = (constant(graph_module, x) for x in node.all_input_nodes)
    return (is_op(node, *_POINTWISE) or node.target in _FUNCTIONS) and all(
        x is None or x.dim() <= 1 for x in constants
    )


def rows_of_another_rank(inputs: Sequence[Any], rank: int | None) -> torch.Tensor | None:
    """The one tensor of a call, if it holds rows that need only be put into ``rank`` dimensions.

    None if there is nothing to be put, or no ``rank``.
    """
    if rank is None or len(inputs) != 1:
        return None
    (x,) = inputs
    return x if isinstance(x, torch.Tensor) and x.dim() not in (0, rank) else None


def as_rank(x: torch.Tensor, rank: int) -> torch.Tensor:
    """The rows of ``x`` in a tensor of ``rank`` dimensions."""
    return x.reshape(*[1] * (rank - 2), x.shape[:-1].numel(), x.shape[-1])


def as_in(x: torch.Tensor, result: Any) -> Any:
    """``result``, rows for those of ``x``, as they stand in ``x``."""
    if isinstance(result, tuple):
        return tuple(as_in(x, one) for one in result)
    return result.reshape(*x.shape[:-1], result.shape[-1])
