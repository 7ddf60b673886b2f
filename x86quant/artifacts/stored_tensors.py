"""The tensors of a file: put in when a model is written, taken out when it is read."""

from __future__ import annotations

from typing import Any

import torch

from x86quant.artifacts import container
from x86quant.errors import ArtifactError


class TensorWriter:
    """The tensors of a file to be. One that is used in several places is stored once.

    Attributes:
        stored: by name.
        orders: for a tensor that is dense in another order of dimensions: that order.
    """

    def __init__(self, *, copies: bool = True) -> None:
        """Without ``copies`` nothing can be stored: it is only tried."""
        self._copies = copies
        self.stored: dict[str, torch.Tensor] = {}
        self.orders: dict[str, list[int]] = {}
        self._names: dict[tuple[Any, ...], str] = {}
        self._alive: list[torch.Tensor] = []  # an address identifies a tensor only while it lives

    def add(self, hint: str, tensor: torch.Tensor) -> str:
        """The name under which ``tensor`` is stored."""
        if tensor.layout != torch.strided or tensor.dtype not in container.STORABLE:
            raise ArtifactError(
                f"the tensor {hint} is {tensor.layout} {tensor.dtype}, which has no form in an "
                "artifact; use plain tensors (a stock-converted model: x86quant.compile it first)"
            )
        if tensor.device.type != "cpu":
            raise ArtifactError(f"the tensor {hint} is on {tensor.device}; call model.cpu() first")
        plain = tensor.detach()
        key = (plain.data_ptr(), plain.dtype, plain.shape, plain.stride())
        if plain.numel() and key in self._names:
            return self._names[key]
        name = self._free(hint)
        self._names[key] = name
        self._alive.append(plain)
        if not self._copies:
            self.stored[name] = plain
            return name
        order = _memory_order(plain)
        self.stored[name] = plain.permute(order).clone(memory_format=torch.contiguous_format)
        if order != sorted(order):
            self.orders[name] = order
        return name

    def _free(self, hint: str) -> str:
        name, count = hint, 1
        while name in self.stored:
            count += 1
            name = f"{hint}_{count}"
        return name


def _memory_order(tensor: torch.Tensor) -> list[int]:
    """Its dimensions from the outermost in memory to the innermost, if it is dense at all."""
    strides = tensor.stride()
    dims = list(range(tensor.dim()))
    order = sorted(dims, key=lambda d: -strides[d])
    return order if not tensor.is_contiguous() and tensor.permute(order).is_contiguous() else dims


class TensorReader:
    """The tensors of a file, in the memory order they had; it knows which were asked for."""

    def __init__(self, tensors: dict[str, torch.Tensor], orders: object) -> None:
        self._tensors = _restored(tensors, orders)
        self._unused = set(tensors)

    def take(self, name: object) -> torch.Tensor:
        """The tensor called ``name``."""
        if not isinstance(name, str) or name not in self._tensors:
            raise ArtifactError(f"the tensor {str(name)[:80]!r} is not in the file")
        self._unused.discard(name)
        return self._tensors[name]

    def check_all_used(self) -> None:
        """Raise ArtifactError if the file has tensors that belong to nothing."""
        if self._unused:
            raise ArtifactError(f"the tensor {min(self._unused)[:80]!r} belongs to nothing")


def _restored(tensors: dict[str, torch.Tensor], orders: object) -> dict[str, torch.Tensor]:
    restored = dict(tensors)
    if type(orders) is not dict:
        raise ArtifactError(f"orders must be a dict, not {type(orders).__name__}")
    for name, order in orders.items():
        if name not in tensors or not isinstance(order, list):
            raise ArtifactError(f"the memory order of {name[:80]!r} is of no tensor")
        dims = tensors[name].dim()
        if any(type(d) is not int for d in order) or sorted(order) != list(range(dims)):
            raise ArtifactError(f"the memory order of {name!r} is no order of {dims} dimensions")
        inverse = [order.index(d) for d in range(dims)]
        restored[name] = tensors[name].permute(inverse)
    return restored
