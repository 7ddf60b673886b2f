"""The tensors of a file: put in when a model is written, taken out when it is read.

A sparse tensor is stored as the dense ones that it is made of.
"""

from __future__ import annotations

from typing import Any

import torch

from x86quant.artifacts.file import container
from x86quant.artifacts.file.values import check_keys, typed
from x86quant.errors import ArtifactError, first_line

#: The layouts of sparse tensors, by their names in a file: what their parts are called in torch.
_SPARSE: dict[str, tuple[torch.layout, tuple[str, ...]]] = {
    "coo": (torch.sparse_coo, ("_indices", "_values")),
    "csr": (torch.sparse_csr, ("crow_indices", "col_indices", "values")),
    "csc": (torch.sparse_csc, ("ccol_indices", "row_indices", "values")),
    "bsr": (torch.sparse_bsr, ("crow_indices", "col_indices", "values")),
    "bsc": (torch.sparse_bsc, ("ccol_indices", "row_indices", "values")),
}
_NAMES = {layout: name for name, (layout, _) in _SPARSE.items()}
_SPARSE_KEYS = {"layout", "size", "parts", "coalesced"}


class TensorWriter:
    """The tensors of a file to be. One that is used in several places is stored once.

    Attributes:
        stored: by name.
        orders: for a tensor that is dense in another order of dimensions: that order.
        sparse: for each sparse tensor, what makes it of tensors that are stored.
    """

    def __init__(self, *, copies: bool = True) -> None:
        """Without ``copies`` nothing can be stored: it is only tried."""
        self._copies = copies
        self.stored: dict[str, torch.Tensor] = {}
        self.orders: dict[str, list[int]] = {}
        self.sparse: dict[str, dict[str, Any]] = {}
        self._names: dict[tuple[Any, ...], str] = {}
        self._alive: list[torch.Tensor] = []  # an address identifies a tensor only while it lives

    def add(self, hint: str, tensor: torch.Tensor) -> str:
        """The name under which ``tensor`` is stored."""
        if tensor.layout in _NAMES:
            return self._add_sparse(hint, tensor.detach())
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

    def _add_sparse(self, hint: str, tensor: torch.Tensor) -> str:
        layout = _NAMES[tensor.layout]
        _, parts = _SPARSE[layout]
        form = {
            "layout": layout,
            "size": list(tensor.shape),
            "parts": [self.add(f"{hint}.{part}", getattr(tensor, part)()) for part in parts],
            "coalesced": layout == "coo" and tensor.is_coalesced(),
        }
        for name, known in self.sparse.items():
            if known == form:
                return name
        name = self._free(hint)
        self.sparse[name] = form
        return name

    def _free(self, hint: str) -> str:
        name, count = hint, 1
        while name in self.stored or name in self.sparse:
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

    def __init__(self, tensors: dict[str, torch.Tensor], orders: object, sparse: object) -> None:
        self._tensors = _restored(tensors, orders)
        self._sparse: dict[str, Any] = typed(dict, sparse, "sparse")
        self._made: dict[str, torch.Tensor] = {}
        self._unused = {*tensors, *self._sparse}

    def take(self, name: object) -> torch.Tensor:
        """The tensor called ``name``."""
        if isinstance(name, str) and name in self._sparse:
            if name not in self._made:
                self._made[name] = self._make_sparse(name)
            return self._made[name]
        return self._dense(name)

    def _make_sparse(self, name: str) -> torch.Tensor:
        """The sparse tensor called ``name`` of its parts, which torch checks against each other."""
        what = f"the sparse tensor {name[:80]!r}"
        form = self._sparse[name]
        check_keys(what, form, _SPARSE_KEYS)
        layout, names = _SPARSE.get(typed(str, form["layout"], what), (None, ()))
        size, parts = typed(list, form["size"], what), typed(list, form["parts"], what)
        is_coalesced = typed(bool, form["coalesced"], what)
        if layout is None or len(parts) != len(names) or any(type(n) is not int for n in size):
            raise ArtifactError(f"{what} has a form that is not known")
        self._unused.discard(name)
        found = [self._dense(part) for part in parts]
        try:
            if layout == torch.sparse_coo:
                return torch.sparse_coo_tensor(
                    found[0], found[1], size, is_coalesced=is_coalesced, check_invariants=True
                )
            return torch.sparse_compressed_tensor(
                found[0], found[1], found[2], size, layout=layout, check_invariants=True
            )
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            raise ArtifactError(f"{what} is none: {first_line(error)}") from error

    def _dense(self, name: object) -> torch.Tensor:
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
