"""What a compiled model takes: its arguments by position or by name, each like its example."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from x86quant.errors import InvalidInputError
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
            InvalidInputError: one is missing, unknown, given twice, or nothing like its example.
        """
        values = self._in_order(positional, named) if named else tuple(positional)
        if not self._required <= len(values) <= len(self._all):
            raise InvalidInputError(
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
                raise InvalidInputError(
                    f"the compiled model takes {self._names()}; {given.name!r} is missing"
                )
            values.append(rest.pop(given.name, given.default))
        if rest:
            name = next(iter(rest))
            twice = any(given.name == name for given in self._all)
            why = "was given twice" if twice else "is none of them"
            raise InvalidInputError(f"the compiled model takes {self._names()}; {name!r} {why}")
        return tuple(values)

    def _names(self) -> str:
        return ", ".join(given.name for given in self._all)
