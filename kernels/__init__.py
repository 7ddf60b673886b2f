"""Every kernel x86quant can route to: one folder a provider, collected here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from .base import Kernel
from .fbgemm import FbgemmDynamicKernel, FbgemmGraphKernel, FbgemmKernel, FbgemmLookup
from .native import NativeBlocksKernel, NativeGraphKernel, NativeKernel, NativeLookup
from .onednn import OnednnDynamicKernel, OnednnGraphKernel, OnednnKernel
from .qnnpack import QnnpackKernel
from .reference import ReferenceKernel

if TYPE_CHECKING:
    from x86quant.spec import OpSpec

__all__ = [
    "FORMER_KERNELS",
    "Kernel",
    "all_kernels",
    "dynamic_kernels",
    "graph_kernels",
    "kernel_names",
    "kernels_for",
    "lookup_kernels",
]


#: Kernels that there were once, whose times a file of measurements may still hold.
FORMER_KERNELS = frozenset({"brgemm"})


def all_kernels() -> Mapping[str, Kernel]:
    """Every kernel of the stock operators, in the order of fallback: the last runs everything."""
    return _KERNELS


def graph_kernels() -> Mapping[str, Kernel]:
    """Every kernel of compiled models, in the order of fallback: the first runs everything."""
    return _GRAPH_KERNELS


def dynamic_kernels() -> Mapping[str, Kernel]:
    """Every kernel of linears on float tensors, in the order of fallback."""
    return _DYNAMIC_KERNELS


def lookup_kernels() -> Mapping[str, Kernel]:
    """Every kernel of embedding tables, in the order of fallback: the first runs everything."""
    return _LOOKUP_KERNELS


def kernels_for(caller: str, spec: OpSpec) -> Mapping[str, Kernel]:
    """Every kernel among which the one for ``spec`` is chosen, where ``caller`` calls it."""
    if spec.op == "embedding_bag":
        return _LOOKUP_KERNELS
    if caller == "stock":
        return _KERNELS
    return _DYNAMIC_KERNELS if spec.dynamic else _GRAPH_KERNELS


def kernel_names() -> frozenset[str]:
    """What a rule table may name."""
    return frozenset({*_KERNELS, *_GRAPH_KERNELS, *_DYNAMIC_KERNELS})


def _register(kernels: Iterable[Kernel]) -> Mapping[str, Kernel]:
    """``kernels`` by name, read-only; a name taken twice is a mistake in this package."""
    registry: dict[str, Kernel] = {}
    for kernel in kernels:
        if kernel.name in registry:
            raise ValueError(
                f"two kernels are named {kernel.name!r}: {type(registry[kernel.name]).__name__} "
                f"and {type(kernel).__name__}; rename one"
            )
        registry[kernel.name] = kernel
    return MappingProxyType(registry)


_KERNELS = _register(
    (FbgemmKernel(), OnednnKernel(), NativeKernel(), QnnpackKernel(), ReferenceKernel())
)

_GRAPH_KERNELS = _register((NativeGraphKernel(), FbgemmGraphKernel(), OnednnGraphKernel()))

_LOOKUP_KERNELS = _register((NativeLookup(), FbgemmLookup()))

_DYNAMIC_KERNELS = _register(
    (
        NativeGraphKernel(),
        NativeBlocksKernel(),
        FbgemmDynamicKernel(),
        OnednnDynamicKernel(),
        ReferenceKernel(),
    )
)
