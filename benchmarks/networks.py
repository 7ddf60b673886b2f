"""The torchvision networks that benchmarks run."""

from __future__ import annotations

import torch
from torch import nn

from x86quant.bench.vision import (
    images,
    network_for_images,
    random_model,
    settle,
)

__all__ = [
    "NETWORKS",
    "images",
    "network_for_images",
    "random_model",
    "settle",
    "torchvision_model",
]

#: The convolutional networks that benchmarks run.
NETWORKS = (
    "resnet18",
    "resnet50",
    "resnext50_32x4d",
    "mobilenet_v2",
    "mobilenet_v3_large",
    "efficientnet_b0",
    "shufflenet_v2_x1_0",
    "densenet121",
    "googlenet",
    "convnext_tiny",
)


def torchvision_model(name: str, size: int = 224) -> nn.Module:
    """The float network in eval mode, its batch norms settled on noise; nothing is downloaded."""
    model = random_model(name)
    settle(model, [torch.randn(8, 3, size, size) for _ in range(2)])
    return model
