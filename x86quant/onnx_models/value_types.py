"""The types and sizes of values, as far as they follow from the file."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from x86quant.onnx_models.element_types import torch_dtype
from x86quant.onnx_models.node_view import NodeView
from x86quant.onnx_models.size_values import Extents

if TYPE_CHECKING:
    from onnx import TypeProto, ValueInfoProto


@dataclasses.dataclass(frozen=True)
class ValueType:
    """The type of elements, and sizes, None where free; None if not even their number is known."""

    elements: int
    sizes: list[int | None] | None

    @property
    def bytes(self) -> int:
        """How many at least, if that is known; else 0."""
        if self.sizes is None or any(size is None for size in self.sizes):
            return 0
        itemsize = torch_dtype(self.elements, "a constant").itemsize
        return itemsize * math.prod(size or 0 for size in self.sizes)

    def proto(self) -> TypeProto:
        """As ONNX has it."""
        from onnx import helper

        return helper.make_tensor_type_proto(self.elements, self.sizes)


class TypesOfValues:
    """By name of a value, its type."""

    def __init__(self, opsets: Mapping[str, int], ir_version: int) -> None:
        self._types: dict[str, TypeProto] = {}
        self._opsets, self._ir_version = opsets, ir_version

    def of(self, name: str) -> ValueType | None:
        """The type of a tensor; None for what is not known or no tensor."""
        proto = self._types.get(name)
        if proto is None or not proto.HasField("tensor_type") or not proto.tensor_type.elem_type:
            return None
        one = proto.tensor_type
        if not one.HasField("shape"):
            return ValueType(one.elem_type, None)
        sizes = [
            d.dim_value if d.HasField("dim_value") and d.dim_value >= 0 else None
            for d in one.shape.dim
        ]
        return ValueType(one.elem_type, sizes)

    def proto(self, name: str) -> TypeProto | None:
        """The type as ONNX has it."""
        return self._types.get(name)

    def set(self, name: str, known: ValueType) -> None:
        """Say the type of ``name``."""
        self._types[name] = known.proto()

    def declare(self, value: ValueInfoProto) -> None:
        """As an input or result of a graph is declared."""
        if value.HasField("type"):
            self._types[value.name] = value.type

    def infer(self, seen: NodeView, values: Mapping[str, Any]) -> None:
        """Find the types of a node's results."""
        import onnx
        from onnx import helper, numpy_helper, shape_inference

        if seen.schema is None or any(n and n not in self._types for n in seen.inputs):
            return
        data = {
            name: numpy_helper.from_array(value.numpy(), name)
            for name, value in values.items()
            if isinstance(value, torch.Tensor) and value.numel() <= 64 and value.dtype in _PLAIN
        }
        versions = [helper.make_opsetid(d, v) for d, v in self._opsets.items()]
        try:
            found = shape_inference.infer_node_outputs(
                seen.schema, seen.proto, {n: self._types[n] for n in seen.inputs if n}, data, None,
                versions, self._ir_version,
            )  # fmt: skip
        except (onnx.shape_inference.InferenceError, RuntimeError, ValueError, TypeError, KeyError):
            found = {}  # what is not known is asked at run time
        for name, proto in found.items():
            self._types[name] = proto
        shape = values.get(seen.inputs[1]) if len(seen.inputs) > 1 else None
        if seen.op_type == "Reshape" and isinstance(shape, Extents) and seen.inputs[0]:
            sizes = [n if isinstance(n, int) and n > 0 else None for n in shape.items]
            first = self.of(seen.inputs[0])
            if first is not None:
                self.set(seen.outputs[0], ValueType(first.elements, list(sizes)))


_PLAIN = (torch.int64, torch.int32, torch.float32, torch.bool)
