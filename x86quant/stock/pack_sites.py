"""Where a model keeps its packed weights, whatever stock workflow built it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

_CLASSES = "__torch__.torch.classes."
_KINDS = {
    f"{_CLASSES}quantized.LinearPackedParamsBase": "linear",
    f"{_CLASSES}quantized.Conv2dPackedParamsBase": "conv2d",
    f"{_CLASSES}quantized.Conv3dPackedParamsBase": "conv3d",
    f"{_CLASSES}rnn.CellParamsBase": "cell",
    f"{_CLASSES}quantized.EmbeddingPackedParamsBase": "embedding",
}
_PLAIN_MODULES = frozenset({"ConvAdd2d", "ConvAddReLU2d", "LinearLeakyReLU", "LinearTanh"})
_STATIC_MODULES = ("torch.ao.nn.quantized.modules.", "torch.ao.nn.intrinsic.quantized.modules.")
# Attributes that hold nothing but the pack of the module one level up.
_HOLDERS = ("_packed_params", "_packed_weight", "param")


@dataclass(frozen=True)
class PackSite:
    """One attribute of a model that holds a packed weight.

    Attributes:
        layer: the name a user knows the layer by.
        kind: "linear", "conv2d" (also conv1d), "conv3d", "embedding", or "cell" (an RNN layer's two
            linears).
        pack: the packed object.
        replace: puts another pack in its place.
        module: the module that holds it.
    """

    layer: str
    kind: str
    pack: Any
    replace: Callable[[Any], None]
    module: torch.nn.Module

    @property
    def class_name(self) -> str:
        """The class of the module, also of a scripted one."""
        return str(getattr(self.module, "original_name", type(self.module).__name__))

    @property
    def runs_plain(self) -> bool:
        """Whether its op runs in plain arithmetic, whatever kernel the weights are packed for.

        The stock library has these ops for oneDNN packs alone, and crashes or refuses elsewhere.
        """
        return self.class_name in _PLAIN_MODULES

    @property
    def takes_codes(self) -> bool:
        """Whether its module is known to pass on quantized tensors only."""
        return type(self.module).__module__.startswith(_STATIC_MODULES)


def pack_sites(model: torch.nn.Module) -> Iterator[PackSite]:
    """Every packed weight of ``model``, in module order."""
    for path, module in model.named_modules():
        for attribute, pack, replace in _packs_of(module):
            kind = _KINDS.get(pack._type().qualified_name())
            if kind is not None:
                yield PackSite(_layer_name(path, attribute), kind, pack, replace, module)


def _packs_of(
    module: torch.nn.Module,
) -> Iterator[tuple[str, Any, Callable[[Any], None]]]:
    if isinstance(module, torch.jit.ScriptModule):
        for name in _scripted_attributes(module):
            value = module._c.getattr(name)
            if isinstance(value, torch.ScriptObject):
                yield name, value, functools.partial(module._c.setattr, name)
        return
    for name, value in list(vars(module).items()):
        if isinstance(value, torch.ScriptObject):
            yield name, value, functools.partial(setattr, module, name)


def _scripted_attributes(module: torch.jit.ScriptModule) -> list[str]:
    """Names of the attributes that a scripted module's own methods read, plus the usual ones."""
    names = dict.fromkeys((*_HOLDERS, "_packed_weight_ih", "_packed_weight_hh"))
    for method in module._c._method_names():
        graph = module._c._get_method(method).graph
        for node in graph.findAllNodes("prim::GetAttr", True):
            names[node.s("name")] = None
    return [name for name in names if module._c.hasattr(name)]


def _layer_name(path: str, attribute: str) -> str:
    if attribute not in _HOLDERS:
        return f"{path}.{attribute}" if path else attribute
    # nnq.Linear keeps its pack in a sub-module of that name.
    return path.removesuffix("._packed_params") or attribute
