"""Attributes of a float model that its int8 graph holds as they were when it was made."""

from __future__ import annotations

import warnings
from typing import Any

from torch import nn

from x86quant.errors import X86QuantWarning


class Baked(nn.Module):
    """A module that stands for a float one whose code no longer runs.

    To set what that code read, a flag or a temperature, has no effect, which is said.
    """

    def note_attributes_of(self, original: nn.Module) -> None:
        """Remember what ``original`` might read of itself."""
        mine = {*dir(self), *vars(self)}
        self.__dict__["_baked"] = frozenset(_attributes(original)) - mine

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__.get("_baked", ()):
            warnings.warn(
                f"setting {name} has no effect: the int8 graph holds it as it was; set it in the "
                "float model, and quantize that again",
                X86QuantWarning,
                stacklevel=2,
            )
        super().__setattr__(name, value)


def _attributes(module: nn.Module) -> set[str]:
    """The attributes of ``module``, and those of its class that are no methods."""
    found = {*vars(module), *module._parameters, *module._buffers, *module._modules}
    for kind in type(module).__mro__:
        if kind is nn.Module:
            break
        found |= {name for name, value in vars(kind).items() if not callable(value)}
    return {name for name in found if not name.startswith("_")}
