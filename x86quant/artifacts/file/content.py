"""What a record in a file holds, checked, before it is made a module."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from torch import nn

from x86quant.compiled import CompiledModule


@dataclasses.dataclass(frozen=True)
class Content:
    """A module in a file.

    Attributes:
        build: the module; given the skeleton, which only a tree needs.
        needs: the class that a skeleton must have; None if the file is self-contained.
        parts: the compiled models in it.
        whole: the compiled model that it is, or whose inputs it takes, if there is one.
    """

    build: Callable[[nn.Module | None], nn.Module]
    needs: str | None = None
    parts: tuple[CompiledModule, ...] = ()
    whole: CompiledModule | None = None
