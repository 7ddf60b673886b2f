"""Models without what torch.compile puts around their modules."""

from __future__ import annotations

from torch import nn


def as_written(model: nn.Module) -> nn.Module:
    """``model`` itself, in which every submodule stands without the wrapping of torch.compile."""
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            while isinstance(inner := getattr(child, "_orig_mod", None), nn.Module):
                parent._modules[name] = child = inner
    return model
