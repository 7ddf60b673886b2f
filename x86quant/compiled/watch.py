"""Telling whether what graphs were made of is as it was: tensors, and a module's code and state."""

from __future__ import annotations

import contextlib
import operator
import types
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from x86quant import extension
from x86quant.compiled.baked import TORCHS_OWN
from x86quant.ops.float_type import is_type_hook
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


def tensor_checksum(named: Iterable[tuple[str, torch.Tensor]], before: int = 0) -> int:
    """A checksum of tensors and their names, behind ``before``."""
    found = before
    for name, tensor in named:
        codes = tensor.detach().reshape(-1).contiguous().view(torch.uint8)
        found = zlib.crc32(codes.numpy().tobytes(), zlib.crc32(name.encode(), found))
    return found


class InPlaceOfForward:
    """What stands at a module's forward and does as its code does: that is no change of it."""


_training = operator.attrgetter("training")


class ModuleWatch:
    """Tells whether a module's code would still do what a graph of it does."""

    def __init__(self, module: nn.Module) -> None:
        self._tensors_hold = watch(module)
        self._modules = list(module.modules())
        inner = self._modules[1:]  # hooks of the module itself are around its forward
        self._hooks = [d for m in inner for d in (m._forward_pre_hooks, m._forward_hooks)]
        self._config = vars(module).get("config")
        self._settings = _settings(self._config)
        self._variables = [vars(m) for m in inner]
        self._plain = _getters((vars(m), _plain_values(m)) for m in self._modules)
        self._values = [get(d) for d, get in self._plain]
        self._objects = _objects_in(self._modules)
        self._private = _getters((vars(m), _private_values(m)) for m in self._modules)
        self._caches = self._caches_now()
        dictionaries = [
            *map(vars, self._modules),
            *map(vars, self._objects),
            *self._hooks,
            getattr(self._config, "__dict__", {}),
        ]
        self._dictionaries = tuple(d for d in dictionaries if isinstance(d, dict))
        self._counted = len(self._dictionaries) == len(dictionaries)
        self._unchanged_since = extension.fast().unchanged_since
        # One value, since any number of threads may look: changes counted, and what was seen after.
        self._seen = (bytearray(8 * len(self._dictionaries)), False, False)

    def wants_layers(self) -> bool:
        """Whether some of it is in training mode, or somebody looks at the calls of layers."""
        return self._look()[0]

    def holds(self) -> bool:
        """Whether nothing was replaced or written to."""
        return self._tensors_hold() and self._look()[1]

    def _look(self) -> tuple[bool, bool]:
        """Whether layers are wanted and attributes hold: looked at where one was set since."""
        known, wants_layers, hold = self._seen
        counts = bytearray(known)
        if self._unchanged_since(self._dictionaries, counts) and self._counted:
            return wants_layers, hold
        hooked = any(map(len, self._hooks)) and not self._only_known_hooks()
        wants_layers = hooked or any(map(_training, self._modules))
        hold = (
            _settings(self._config) == self._settings
            and not any(map(_is_replaced, self._variables))
            and self._attributes_hold()
        )
        self._seen = (counts, wants_layers, hold)
        return wants_layers, hold

    def _attributes_hold(self) -> bool:
        try:
            return [
                get(variables) for variables, get in self._plain
            ] == self._values and self._caches_now() == self._caches
        except KeyError:
            return False

    def _caches_now(self) -> list[Any]:
        """What the module's own code may change as it runs: private attributes, and objects'."""
        fields = [_settings(x) for x in self._objects]
        return [*fields, *(get(variables) for variables, get in self._private)]

    def accept_caches(self) -> None:
        """Take what the module's own code has just written for what it was made with."""
        with contextlib.suppress(KeyError):  # then it counts as changed
            self._caches = self._caches_now()

    def _only_known_hooks(self) -> bool:
        """transformers puts hooks of its own on modules, which do nothing unless it asks."""
        return all(map(is_known_hook, (hook for d in self._hooks for hook in d.values())))


def _getters(
    named: Iterable[tuple[dict[str, Any], Mapping[str, Any]]],
) -> list[tuple[dict[str, Any], Callable[[dict[str, Any]], Any]]]:
    """For each dictionary what reads the entries named off it."""
    return [(d, operator.itemgetter(*names)) for d, names in named if names]


def _objects_in(modules: Sequence[nn.Module]) -> list[Any]:
    """Configurations and the like among the attributes of ``modules``, whose fields are read."""
    found: dict[int, Any] = {}
    for module in modules:
        for name, value in vars(module).items():
            if name not in TORCHS_OWN and hasattr(value, "__dict__") and not _is_code(value):
                found[id(value)] = value
    return list(found.values())


def _is_code(value: object) -> bool:
    """Whether ``value`` computes, or tells others what to do, rather than being read by a forward.

    What ``generate`` of transformers reads, such as the token that pads, is everybody's to set.
    """
    tells_generate = type(value).__module__.startswith("transformers.generation.")
    return tells_generate or callable(value) or isinstance(value, torch.Tensor | types.ModuleType)


def _is_replaced(variables: Mapping[str, Any]) -> bool:
    """Whether a module with these attributes has a forward that is not its class's."""
    return "forward" in variables and not isinstance(variables["forward"], InPlaceOfForward)


def fingerprint(module: nn.Module) -> int:
    """A checksum of the module's layers, attributes and tensors."""
    found = 0
    for name, inner in module.named_modules():
        plain = {**_plain_values(inner), **_private_values(inner)}
        values = {k: getattr(v, "__qualname__", v) for k, v in plain.items()}
        replaced = inner is not module and _is_replaced(vars(inner))
        text = f"{name} {type(inner).__module__} {type(inner).__qualname__} {replaced}"
        found = zlib.crc32(repr(sorted(values.items())).encode(), found)
        found = zlib.crc32(text.encode(), found)
        tensors = (*inner._parameters.items(), *inner._buffers.items())
        named = ((f"{key} {tuple(x.shape)}", x) for key, x in tensors if x is not None)
        found = tensor_checksum(named, found)
    objects = [vars(module).get("config"), *_objects_in(list(module.modules()))]
    return zlib.crc32(repr(list(map(_settings, objects))).encode(), found)


def is_known_hook(hook: object) -> bool:
    """Whether ``hook`` is one of those that transformers uses to collect what it is asked for.

    Or one by which a whole model takes and returns another floating type.
    """
    own = is_type_hook(hook)
    return own or str(getattr(hook, "__module__", "")).startswith("transformers.")


def only_known_hooks(module: nn.Module) -> bool:
    """Whether all hooks of ``module`` itself are such; it may have none."""
    hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
    return all(map(is_known_hook, hooks))


#: What a forward may read off its module and compute with.
_PLAIN = (
    bool, int, float, str, type(None), torch.dtype,
    types.FunctionType, types.BuiltinFunctionType,
)  # fmt: skip


def _plain_values(module: nn.Module) -> dict[str, Any]:
    """The public attributes of ``module`` that are numbers, functions and the like.

    With them the type that int8 layers take.
    """
    found = _plain_attributes(module).items()
    return {k: v for k, v in found if not k.startswith("_") or k == "_float_type"}


def _private_values(module: nn.Module) -> dict[str, Any]:
    """The private ones, of the user's modules; ours have nothing but caches there."""
    if type(module).__module__.startswith("x86quant."):
        return {}
    return {k: v for k, v in _plain_attributes(module).items() if k.startswith("_")}


def _plain_attributes(module: nn.Module) -> dict[str, Any]:
    return {
        name: value
        for name, value in vars(module).items()
        if name not in TORCHS_OWN
        and (
            type(value) in _PLAIN
            or (type(value) is tuple and all(type(v) in _PLAIN for v in value))
        )
    }


#: What save_pretrained sets in a configuration; no forward reads it.
_SET_BY_SAVING = ("architectures", "dtype", "torch_dtype", "transformers_version")


def _settings(config: object) -> dict[str, Any]:
    """The plain entries of a configuration, which a forward may read at each call."""
    entries = vars(config) if hasattr(config, "__dict__") else {}
    left_out = _SET_BY_SAVING if _is_of_transformers(config) else ()
    plain = (bool, int, float, str, type(None), torch.dtype)
    return {k: v for k, v in entries.items() if type(v) in plain and k not in left_out}


def _is_of_transformers(config: object) -> bool:
    return any(kind.__module__.startswith("transformers.") for kind in type(config).__mro__)
