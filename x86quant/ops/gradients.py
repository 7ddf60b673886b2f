"""No gradient flows through int8 layers: whoever asks for one is told, instead of getting none."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

from x86quant.errors import UnsupportedError


def asks_for_gradient(x: Any) -> bool:
    """Whether a float model would keep what it needs for the gradient of ``x``."""
    return (
        isinstance(x, torch.Tensor)  # a proxy of torch.fx is none
        and x.requires_grad
        and torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
    )


def without_gradient(results: Any, name: str, *inputs: torch.Tensor) -> Any:
    """``results`` of the int8 module called ``name``, through which ``backward`` raises."""
    return pytree.tree_map_only(
        torch.Tensor,
        lambda x: _Refusing.apply(name, x, *inputs) if x.is_floating_point() else x,  # type: ignore[no-untyped-call]
        results,
    )


class _Refusing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: str, result: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
        ctx.name = name
        return result.view_as(result)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise UnsupportedError(
            f"no gradient flows through {ctx.name}, which computes in int8; train the float model "
            "(or with x86quant.prepare_qat) and quantize it then, freeze what stands before this "
            "layer by requires_grad_(False), or call it under torch.no_grad()"
        )
