"""Which tensors share memory, how each lies in it, and whether two hold the same values."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.fx import Node
from torch.utils import _pytree as pytree

#: What identifies a tensor's view of its storage.
Geometry = tuple[Any, ...]

#: What a tracer calls a tensor that the traced code created; other attributes are state.
_FRESH = re.compile(r"_tensor_constant\d+")


def is_fresh(n: Node) -> bool:
    """Whether ``n``, an attribute, is a tensor that each call creates."""
    return _FRESH.fullmatch(str(n.target)) is not None


def state_of(module: nn.Module) -> list[torch.Tensor]:
    """The parameters and buffers of ``module``."""
    return [*module.parameters(), *module.buffers()]


def tensors_of(value: Any) -> list[torch.Tensor]:
    """The tensors anywhere in ``value``."""
    return [x for x in pytree.tree_leaves(value) if isinstance(x, torch.Tensor)]


def version_of(x: torch.Tensor) -> int:
    """How often ``x`` was written, as far as torch counts it."""
    return 0 if x.is_inference() else x._version


class SeenTensors:
    """Tensors as they are now; whether later ones are these, with nothing written to them since."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._tensors = tuple(tensors)  # kept, so that no others get their identity
        self._versions = tuple(map(version_of, self._tensors))
        #: Writes to tensors made in inference mode are not counted.
        self._counted = not any(x.is_inference() for x in self._tensors)

    def still_are(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Whether ``tensors`` are those that were seen, as they were."""
        now = tuple(tensors)
        these = len(now) == len(self._tensors) and all(map(operator.is_, now, self._tensors))
        return these and self.are_unwritten()

    def are_unwritten(self) -> bool:
        """Whether nothing was written to them since."""
        return self._counted and tuple(map(version_of, self._tensors)) == self._versions


def storage_of(x: torch.Tensor) -> int:
    """What tells the memory of ``x`` from other tensors'."""
    if x.layout is not torch.strided:
        return id(x)
    return int(x.untyped_storage()._cdata)


def layout_of(x: torch.Tensor) -> torch.memory_format:
    """The order of the dimensions of ``x`` in memory, as far as torch has a name for it."""
    if x.layout is torch.strided and not x.is_contiguous():
        named = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.dim())
        if named is not None and x.is_contiguous(memory_format=named):
            return named
        return torch.preserve_format
    return torch.contiguous_format


def geometry_of(x: torch.Tensor) -> Geometry:
    """How ``x`` looks at its memory."""
    if x.layout is not torch.strided:
        return (tuple(x.shape), x.layout, x.dtype, id(x))
    return (tuple(x.shape), x.stride(), x.storage_offset(), x.dtype, storage_of(x))


def clones(value: Any) -> Any:
    """``value`` with copies of its tensors."""
    return pytree.tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, value)


def same_values(a: Any, b: Any) -> bool:
    """Whether two results have the same structure and, NaN beside NaN, the same values."""
    one, spec = pytree.tree_flatten(a)
    other, other_spec = pytree.tree_flatten(b)
    return spec == other_spec and all(map(_same, one, other))


def _same(a: Any, b: Any) -> bool:
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return type(a) is type(b) and bool(a == b or a is b)
    if a.shape != b.shape or a.dtype != b.dtype or a.is_quantized != b.is_quantized:
        return False
    if a.is_quantized:
        return _same(a.int_repr(), b.int_repr()) and _same(a.dequantize(), b.dequantize())
    if a.is_floating_point() or a.is_complex():
        return bool(torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))) and bool(
            torch.equal(a.isnan(), b.isnan())
        )
    return bool(torch.equal(a, b))
