"""What can be quantized at all; which parts become static int8, which dynamic, and why."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import nn

from x86quant.calling.wording import listed
from x86quant.compiled import CompiledModule
from x86quant.compiled.guarded import GuardedModule
from x86quant.dynamic import Int8Linear, is_experts, is_linear, is_recurrent, why_float
from x86quant.dynamic.layers import weight_of
from x86quant.dynamic.torchao_weights import is_torchao
from x86quant.errors import InvalidInputError
from x86quant.ops.float_type import OTHER_FLOATS
from x86quant.quantization.tracing.recurrent_layers import LAYERS

#: Where stock PyTorch keeps its quantized layers.
_STOCK = ("torch.ao.nn.quantized", "torch.ao.nn.intrinsic.quantized")


def check_model(model: Any) -> nn.Module:
    """``model`` itself, or what torch.compile wraps, if it can be quantized at all.

    Raises:
        InvalidInputError: it is no module, is quantized, is not on the CPU, has weights of 8 bits,
            or holds NaN.
    """
    if not isinstance(model, nn.Module):
        raise InvalidInputError(f"model must be an nn.Module, not {type(model).__name__}")
    inner = getattr(model, "_orig_mod", None)
    if isinstance(inner, nn.Module):  # what torch.compile returned
        return check_model(inner)
    if isinstance(model, torch.jit.ScriptModule):
        raise InvalidInputError(
            "the model is a ScriptModule, whose code cannot be traced: give the nn.Module that it "
            "was made from"
        )
    for path, module in model.named_modules():
        kind = type(module)
        if isinstance(
            module, CompiledModule | GuardedModule | Int8Linear
        ) or kind.__module__.startswith(_STOCK):
            raise InvalidInputError(
                f"the model is quantized already ({path or 'all of it'}: {kind.__name__}): "
                "give the float model it was made from"
            )
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if nn.parameter.is_lazy(tensor):
            raise InvalidInputError(f"{name} has no size yet: call the model once, on an example")
        if tensor.device.type != "cpu":
            raise InvalidInputError(f"{name} is on {tensor.device}: call model.cpu() first")
        if is_torchao(tensor):
            raise InvalidInputError(
                f"{name} is torchao's {type(tensor).__name__}, quantized already: "
                "x86quant.to_dynamic(model) takes over its codes, or give the float model"
            )
    for name, tensor in model.named_parameters():  # buffers may be masks
        if not tensor.is_floating_point():
            continue
        if tensor.dtype not in (torch.float32, *OTHER_FLOATS):
            raise InvalidInputError(
                f"{name} is {tensor.dtype}, a type of codes that are nothing without their scales: "
                "give the float model"
            )
        if not bool(torch.isfinite(tensor).all()):
            raise InvalidInputError(f"{name} holds NaN or infinity: check the float model")
    return model


def float_type(model: nn.Module) -> torch.dtype:
    """The type that the weights of ``model`` are in: the one of most matrices, if not float32."""
    counts = Counter(x.dtype for x in model.parameters() if x.is_floating_point() and x.dim() > 1)
    others = [dtype for dtype in counts if dtype is not torch.float32]
    most = max(others, key=counts.__getitem__, default=torch.float32)
    return most if 2 * sum(counts[x] for x in others) >= counts.total() else torch.float32


Mode = Literal["auto", "static", "dynamic", "weight_only"]
MODES: tuple[Mode, ...] = ("auto", "static", "dynamic", "weight_only")

_ATTENTIONS = (nn.MultiheadAttention,)
TABLES = (nn.Embedding, nn.EmbeddingBag)
_CONVOLUTIONS = nn.modules.conv._ConvNd
_ATTENTION = re.compile("attention|attn", re.IGNORECASE)
#: Norms of other packages, such as LlamaRMSNorm and T5LayerNorm.
_NORM = re.compile("(Layer|RMS)Norm$")
#: How linears of queries are called, and those of their keys and values.
_QUERY = re.compile("(^|_)(q|query)(_|$)")
_OTHERS = {"q": ("k", "v"), "query": ("key", "value")}


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
    convolutions = any(map(_is_convolution, model.modules()))
    recurrent = any(is_recurrent(m) for m in model.modules())
    if not recurrent and not is_transformer(model):
        return Scheme(True, False, False, "neither a transformer nor recurrent: static int8")
    kind = "recurrent network" if recurrent else "transformer"
    if not convolutions:
        dynamic = Scheme(
            False, True, False, f"a {kind}: its linears quantize each token as it comes"
        )
        small = any(type(m) in LAYERS.values() for m in model.modules())
        if small and not any(dynamic_layers(model, dynamic)):
            return Scheme(
                True, False, False, "a recurrent network with nothing to gain in dynamic int8"
            )
        return dynamic
    return Scheme(
        True, True, False, f"convolutions in static int8, the {kind}'s linears in dynamic int8"
    )


def is_transformer(model: nn.Module) -> bool:
    """Whether ``model`` has attention, or is made of layer norms and linears alone."""
    kinds = [type(m) for m in model.modules()]
    if any(issubclass(kind, nn.MultiheadAttention) for kind in kinds):
        return True
    convolutions = any(map(_is_convolution, model.modules()))
    if not any(_is_norm(m) for m in model.modules()):
        # Some norm by functions (OLMo), or by nothing but a scale (MobileBERT).
        return not convolutions and any(_has_queries(m) for m in model.modules())
    if convolutions:
        return any(_is_attention(m, path) for path, m in model.named_modules())
    return any(is_linear(m) for m in model.modules())


def _is_convolution(module: nn.Module) -> bool:
    """Whether ``module`` is a convolution that does a part of the work.

    A depthwise one over a sequence, as in Mamba, only mixes tokens, whose linears do the work.
    """
    if not isinstance(module, _CONVOLUTIONS):
        return False
    mixes_tokens = isinstance(module, nn.Conv1d) and module.groups == module.in_channels > 1
    return not mixes_tokens


def _is_norm(module: nn.Module) -> bool:
    """Whether ``module`` normalises each token: by torch's class, or by its name and one weight."""
    if isinstance(module, nn.LayerNorm | nn.RMSNorm):
        return True
    weight = getattr(module, "weight", None)
    named = _NORM.search(type(module).__name__) is not None
    return named and isinstance(weight, torch.Tensor) and weight.dim() == 1


def _is_attention(module: nn.Module, path: str) -> bool:
    """Whether ``module`` is an attention: by names, or by linears for queries, keys and values."""
    if isinstance(module, nn.MultiheadAttention) or _has_queries(module):
        return True
    linears = sum(is_linear(m) for m in module.modules())
    if _ATTENTION.search(type(module).__name__):
        return linears > 0
    return linears > 1 and _ATTENTION.search(path.rpartition(".")[2]) is not None


def _has_queries(module: nn.Module) -> bool:
    """Whether ``module`` has linears for queries, keys and values, by their names."""
    linears = {name for name, child in module.named_children() if is_linear(child)}
    for name in linears:
        if found := _QUERY.search(name):
            start, end = found.span(2)
            if all(name[:start] + x + name[end:] in linears for x in _OTHERS[found[2]]):
                return True
    return False


def other_precision(module: nn.Module) -> torch.dtype | None:
    """The type of ``module``'s own floating parameters that are not in float32; None if all are."""
    own = (p.dtype for p in module.parameters(recurse=False) if p.is_floating_point())
    return next((dtype for dtype in own if dtype is not torch.float32), None)


def static_candidates(model: nn.Module, plan: Scheme) -> Iterator[tuple[str, nn.Module]]:
    """Submodules that may be quantized statically, outer ones before what is in them.

    A module of the user's may be without layers, where its code calls functions on weights of its
    own.
    """
    for path, module in model.named_modules():
        if plan.dynamic and any(
            _is_attention(m, f"{path}.{inner}") or is_recurrent(m)
            for inner, m in module.named_modules()
        ):
            continue
        wanted: Any = (
            _CONVOLUTIONS if plan.dynamic else (_CONVOLUTIONS, nn.Linear, *LAYERS.values())
        )
        own = not plan.dynamic and _may_call_products(module, whole=not path)
        if own or any(isinstance(m, wanted) for m in module.modules()):
            yield path, module


def _may_call_products(module: nn.Module, whole: bool) -> bool:
    """Whether the forward of ``module`` could multiply by weights of its own, as far as they tell.

    Of torch's modules that are no layers none does: tables, norms. Nor do factors of channels.
    """
    if whole:
        return any(x.dim() > 1 for x in module.parameters())
    is_torchs = type(module).__module__.startswith("torch.")
    own = () if is_torchs else module.parameters(recurse=False)
    return any(sum(size > 1 for size in x.shape) > 1 for x in own)


def dynamic_layers(model: nn.Module, plan: Scheme) -> Iterator[tuple[str, nn.Module]]:
    """The layers that ``to_dynamic`` can turn into int8."""
    inside: tuple[str, ...] = ()
    for path, module in model.named_modules():
        if path.startswith(inside) or other_precision(module) is not None:
            continue
        if isinstance(module, nn.MultiheadAttention):
            if not plan.weight_only and why_float(module) is None:
                yield path, module
            inside = (*inside, f"{path}.")
        elif is_recurrent(module):
            if not plan.weight_only and why_float(module) is None:
                yield path, module
        elif why_float(module) is None and (
            (is_linear(module) and (plan.weight_only or not _is_tiny(module)))
            or is_experts(module)
            or (plan.weight_only and isinstance(module, TABLES))
        ):
            yield path, module


#: Rows of fewer features than this cost more to quantize than their product saves.
_LEAST_FEATURES = 5


def _is_tiny(linear: nn.Module) -> bool:
    """Whether ``linear`` mixes a few heads or coordinates, say."""
    return weight_of(linear).shape[1] < _LEAST_FEATURES


def left_in_float(model: nn.Module, plan: Scheme) -> dict[str, str]:
    """The layers with matrices that ``to_dynamic`` leaves in float, by path, and why."""
    found: dict[str, str] = {}
    taken = {path for path, _ in dynamic_layers(model, plan)}
    for path, module in model.named_modules():
        matrices = [n for n, p in module.named_parameters(recurse=False) if p.dim() > 1]
        if not matrices or isinstance(module, (*TABLES, _CONVOLUTIONS)):
            continue
        if path.startswith(tuple(f"{one}." for one in (*taken, *found))) or path in taken:
            continue
        known = is_linear(module) or is_recurrent(module) or is_experts(module)
        reason = why_float(module) if known or isinstance(module, _ATTENTIONS) else None
        if reason is None and is_linear(module) and _is_tiny(module):
            reason = "rows of so few features gain nothing from int8"
        if (dtype := other_precision(module)) is not None:
            reason = f"it computes in {dtype}"
        if reason is None and any(module.children()):  # tokens and the like, beside layers
            reason = f"{type(module).__name__} computes with {listed(matrices)} itself"
        found[path] = reason or f"{type(module).__name__} has no int8 form in this mode"
    return found
