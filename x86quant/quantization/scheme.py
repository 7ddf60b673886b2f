"""Which parts of a model become static int8, which dynamic, and why."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import Any, Literal

from torch import nn

from x86quant.dynamic import DynamicMultiheadAttention

Mode = Literal["auto", "static", "dynamic", "weight_only"]
MODES: tuple[Mode, ...] = ("auto", "static", "dynamic", "weight_only")

_CONVOLUTIONS = nn.modules.conv._ConvNd
_NORMS = (nn.LayerNorm, nn.RMSNorm)
_ATTENTION = re.compile("attention|attn", re.IGNORECASE)


@dataclasses.dataclass(frozen=True, slots=True)
class Scheme:
    """What is done with a model.

    Attributes:
        static: whether parts are calibrated and run in static int8.
        dynamic: whether linears outside of these quantize their input as it comes.
        weight_only: whether they have int8 weights and float inputs instead.
        why: the reason, as a sentence.
    """

    static: bool
    dynamic: bool
    weight_only: bool
    why: str

    @property
    def mode(self) -> str:
        """In a word or two."""
        if self.weight_only:
            return "weight_only"
        return " and ".join(
            name for name, on in (("static", self.static), ("dynamic", self.dynamic)) if on
        )


def decide(model: nn.Module, mode: str) -> Scheme:
    """The plan for ``model``: what was asked for, or by its layers if that is "auto"."""
    if mode != "auto":
        return Scheme(mode == "static", mode == "dynamic", mode == "weight_only", "as asked")
    convolutions = any(isinstance(m, _CONVOLUTIONS) for m in model.modules())
    if not is_transformer(model):
        return Scheme(True, False, False, "no attention: static int8 from end to end")
    if not convolutions:
        return Scheme(
            False, True, False, "a transformer: its linears quantize each token as it comes"
        )
    return Scheme(
        True, True, False, "convolutions in static int8, the transformer's linears in dynamic int8"
    )


def is_transformer(model: nn.Module) -> bool:
    """Whether ``model`` has attention, or is made of layer norms and linears alone."""
    kinds = [type(m) for m in model.modules()]
    if any(issubclass(kind, nn.MultiheadAttention) for kind in kinds):
        return True
    if not any(issubclass(kind, _NORMS) for kind in kinds):
        return False
    if any(issubclass(kind, _CONVOLUTIONS) for kind in kinds):
        return any(_is_attention(m) for m in model.modules())
    return any(issubclass(kind, nn.Linear) for kind in kinds)


def _is_attention(module: nn.Module) -> bool:
    if isinstance(module, nn.MultiheadAttention):
        return True
    named = _ATTENTION.search(type(module).__name__) is not None
    return named and any(isinstance(m, nn.Linear) for m in module.modules())


def static_candidates(model: nn.Module, plan: Scheme) -> Iterator[tuple[str, nn.Module]]:
    """Submodules that may be quantized statically, outer ones before what is in them."""
    for path, module in model.named_modules():
        if plan.dynamic and any(_is_attention(m) for m in module.modules()):
            continue
        wanted: Any = _CONVOLUTIONS if plan.dynamic else (_CONVOLUTIONS, nn.Linear)
        if any(isinstance(m, wanted) for m in module.modules()):
            yield path, module


def dynamic_layers(model: nn.Module, plan: Scheme) -> Iterator[tuple[str, nn.Module]]:
    """The layers that ``to_dynamic`` can turn into int8."""
    inside: tuple[str, ...] = ()
    for path, module in model.named_modules():
        if path.startswith(inside):
            continue
        if isinstance(module, nn.MultiheadAttention):
            if not plan.weight_only and _can_be_dynamic(module):
                yield path, module
            inside = (*inside, f"{path}.")
        elif type(module) is nn.Linear and not _hooked(module):
            yield path, module


def _can_be_dynamic(module: nn.MultiheadAttention) -> bool:
    if type(module) is not nn.MultiheadAttention or _hooked(module):
        return False
    return DynamicMultiheadAttention.refusal(module) is None


def _hooked(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)
