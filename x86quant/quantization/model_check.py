"""What can be quantized at all."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from x86quant.compiled import CompiledModule
from x86quant.compiled.guarded import GuardedModule
from x86quant.dynamic import Int8Linear
from x86quant.dynamic.torchao_weights import is_torchao
from x86quant.errors import InvalidInputError

#: Where stock PyTorch keeps its quantized layers.
_STOCK = ("torch.ao.nn.quantized", "torch.ao.nn.intrinsic.quantized")


def check_model(model: Any) -> nn.Module:
    """``model`` itself, or what torch.compile wraps, if it can be quantized at all.

    Raises:
        InvalidInputError: it is no module, is quantized, is not on the CPU, is hardly in float32,
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
    parameters = [pair for pair in model.named_parameters() if pair[1].is_floating_point()]
    others = [pair for pair in parameters if pair[1].dtype != torch.float32]
    matrices = [sum(x.dim() > 1 for _, x in pairs) for pairs in (others, parameters)]
    if others and 2 * matrices[0] >= matrices[1]:
        name, tensor = others[0]
        raise InvalidInputError(f"{name} is {tensor.dtype}: call model.float() first")
    for name, tensor in parameters:  # buffers may be masks
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise InvalidInputError(f"{name} holds NaN or infinity: check the float model")
    return model
