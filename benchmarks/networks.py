"""torchvision networks, with weights that keep activations in a sane range."""

from __future__ import annotations

import contextlib

import torch
from torch import nn


def torchvision_model(name: str, size: int = 224) -> nn.Module:
    """The float network in eval mode, its batch norms settled on noise; nothing is downloaded."""
    _declare_missing_ops()
    import torchvision

    torch.manual_seed(0)
    options = {"aux_logits": False, "init_weights": True} if name == "googlenet" else {}
    model: nn.Module = getattr(torchvision.models, name)(weights=None, **options).train()
    # Let batch norm see data, or random weights blow the activations up layer by layer.
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.momentum = None  # a plain average over the batches below
    with torch.no_grad():
        for _ in range(2):
            model(torch.randn(8, 3, size, size))
    return model.eval()


def _declare_missing_ops() -> None:
    """Declare two operators that torchvision registers fakes for but may come without.

    A torchvision whose C++ part does not load lacks them, and its import fails. Where that part
    loads, or the ops are there, this does nothing.
    """
    for op in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, op):
            with contextlib.suppress(RuntimeError):
                torch.library.define(
                    f"torchvision::{op}",
                    "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
                )
