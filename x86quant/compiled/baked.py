"""What a compiled model answers for the float one that it stands for: attributes and methods.

A graph holds attributes as they were when it was made.
"""

from __future__ import annotations

import copy
import types
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from x86quant.compiled.shown_class import ShowsClass, pickled_class, unpickled_class
from x86quant.errors import UnsupportedError, X86QuantWarning
from x86quant.module_copy import alike

#: What torch itself keeps in every module.
TORCHS_OWN = frozenset(vars(nn.Module()))


class Baked(ShowsClass):
    """A module that stands for a float one whose code no longer runs.

    To set what that code read, a flag or a temperature, has no effect, which is said.
    """

    def note_attributes_of(self, original: nn.Module) -> None:
        """Remember what ``original`` might read of itself, and answers to others."""
        if isinstance(original, Baked):  # which stands for another one
            known = vars(original)
            self.__dict__.update({k: known[k] for k in ("_baked", "_skeleton") if k in known})
            return
        mine = {*dir(self), *vars(self)}
        self.__dict__["_baked"] = frozenset(_attributes(original)) - mine
        if self.__dict__.get("_original") is None:
            self.__dict__["_skeleton"] = Aside(_without_data(original))

    def _answer(self, original: nn.Module, name: str) -> Any:
        """The attribute ``name`` of ``original``; a method of it is one of this module.

        So it calls this module where it calls itself. What asks for the class it stands in, by
        ``super()``, must stay the original's.
        """
        value = getattr(original, name)
        if isinstance(value, types.MethodType) and value.__self__ is original:
            code = getattr(value.__func__, "__code__", None)
            if code is not None and "__class__" not in code.co_freevars:
                return types.MethodType(value.__func__, self)
        return value

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            aside: Aside | None = self.__dict__.get("_skeleton")
            if aside is None or name.startswith("_"):
                raise
            found = self._answer(aside.module, name)
            if isinstance(found, torch.Tensor):  # its values are gone
                raise
            return found

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters; where all weights are int8, the floating-point constants of the graph.

        Code asks the first of them for the model's type and device.
        """
        found = list(super().named_parameters(prefix, recurse, remove_duplicate))
        if not found:
            for name, x in self.named_buffers(prefix, recurse, remove_duplicate):
                if x.is_floating_point():
                    found.append((name, nn.Parameter(x, requires_grad=False)))
        yield from found

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        new.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        for name in ("_skeleton", "_shown"):
            if name in self.__dict__:
                new.__dict__[name] = self.__dict__[name]
        return new

    def __getstate__(self) -> dict[str, Any]:
        # Pickles of graphs need no class of the user's.
        state = {name: value for name, value in self.__dict__.items() if name != "_skeleton"}
        return {**state, "_shown": pickled_class(self.__dict__.get("_shown"))}

    def __setstate__(self, state: dict[str, Any]) -> None:
        shown = unpickled_class(state.get("_shown"))
        super().__setstate__({**state, "_shown": shown})  # type: ignore[no-untyped-call]

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__.get("_baked", ()):
            warnings.warn(
                f"setting {name} has no effect: the int8 graph holds it as it was; set it in the "
                "float model, and quantize that again",
                X86QuantWarning,
                stacklevel=2,
            )
        super().__setattr__(name, value)


class Aside:
    """Holds a module that is no submodule."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __deepcopy__(self, memo: dict[int, Any]) -> Aside:
        return Aside(alike(self.module, memo))


def _without_data(module: nn.Module) -> nn.Module:
    """A copy of ``module`` whose tensors have shapes and types alone."""
    memo: dict[int, Any] = {}
    for x in (*module.parameters(), *module.buffers()):
        empty = torch.empty_like(x, device="meta")
        memo[id(x)] = nn.Parameter(empty, False) if isinstance(x, nn.Parameter) else empty
    try:
        found: nn.Module = copy.deepcopy(module, memo)
    except Exception:  # the user's own classes may raise anything
        return nn.Module()
    for inner in found.modules():
        inner.__dict__["forward"] = _no_weights
    return found


def _no_weights(*_: Any, **__: Any) -> Any:
    raise UnsupportedError(
        "this layer's weights are in the int8 graph, which runs as a whole: call the float model"
    )


def _attributes(module: nn.Module) -> set[str]:
    """The attributes of ``module``, and those of its class that are no methods."""
    found = {*vars(module), *module._parameters, *module._buffers, *module._modules}
    for kind in type(module).__mro__:
        if kind is nn.Module:
            break
        found |= {name for name, value in vars(kind).items() if not callable(value)}
    return {name for name in found if not name.startswith("__")}
