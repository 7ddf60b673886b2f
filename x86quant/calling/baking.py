"""A user's modules without what stands between a layer and its weight.

That is what torch.compile wraps them in, and parametrizations, or hooks of torch, that compute
weights at each call.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.nn.utils import parametrize
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm


def as_written(model: nn.Module) -> nn.Module:
    """``model`` itself, in which every submodule stands without the wrapping of torch.compile."""
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            while isinstance(inner := getattr(child, "_orig_mod", None), nn.Module):
                parent._modules[name] = child = inner
    return model


def computes_weights(module: nn.Module) -> bool:
    """Whether parametrizations or hooks of torch compute a weight of ``module`` itself."""
    return parametrize.is_parametrized(module) or any(_weight_hooks(module))


def bake(module: nn.Module) -> None:
    """Give ``module`` the weights that are computed for it now, as plain ones."""
    for key, hook in list(_weight_hooks(module)):
        hook.remove(module)
        del module._forward_pre_hooks[key]
    if parametrize.is_parametrized(module):
        _class_of_its_own(module)
        for name in list(module.parametrizations):  # type: ignore[arg-type]
            parametrize.remove_parametrizations(module, name)


def _weight_hooks(module: nn.Module) -> Iterator[tuple[int, Any]]:
    """The hooks of torch.nn.utils that make a weight: norms of it, and pruning."""
    for key, hook in module._forward_pre_hooks.items():
        if isinstance(hook, WeightNorm | SpectralNorm | BasePruningMethod):
            yield key, hook


def _class_of_its_own(module: nn.Module) -> None:
    """Part ``module`` from its copies, whose class torch changes when a parametrization goes."""
    kind = type(module)
    own = {k: v for k, v in vars(kind).items() if k not in ("__dict__", "__weakref__")}
    module.__class__ = type(kind.__name__, kind.__bases__, own)
