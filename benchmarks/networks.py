"""torchvision networks, with weights that keep activations in a sane range."""

from __future__ import annotations

import contextlib

import torch


def torchvision_model(name: str, size: int = 224) -> tuple[torch.nn.Module, torch.Tensor]:
    """A torchvision network in eval mode and one input; no weights are downloaded."""
    _declare_missing_ops()
    import torchvision

    torch.manual_seed(0)
    model = getattr(torchvision.models, name)(weights=None)
    x = torch.randn(1, 3, size, size).contiguous(memory_format=torch.channels_last)
    # Let batch norm see data, or random weights blow the activations up layer by layer.
    model.train()
    with torch.no_grad():
        for _ in range(3):
            model(torch.randn(4, 3, size, size))
    return model.eval(), x


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
