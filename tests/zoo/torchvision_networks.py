"""Networks of torchvision on small images."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.zoo.cases import Animal, Inputs


def _made(name: str, **options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        from benchmarks.networks import random_model

        return random_model(name, **options)

    return build


def _images(*sizes: int) -> Callable[[int, int], Inputs]:
    return lambda batch, size: (
        torch.randn(batch, 3, sizes[size % len(sizes)], sizes[size % len(sizes)]),
    )


def _animal(name: str, *sizes: int, bound: float = 15.0, **options: Any) -> Animal:
    return Animal(
        f"tv_{name}",
        _made(name, num_classes=10, **options),
        _images(*sizes),
        bound=bound,
        sizes=(0, 1, 2) if len(sizes) == 3 else (1,),
        needs="torchvision",
        slow=True,
    )


TORCHVISION: tuple[Animal, ...] = (
    _animal("resnet18", 48, 64, 80),
    _animal("mobilenet_v2", 48, 64, 80),
    _animal("mobilenet_v3_small", 48, 64, 80),
    _animal("squeezenet1_1", 48, 64, 80),
    _animal("shufflenet_v2_x0_5", 48, 64, 80),
    _animal("mnasnet0_5", 48, 64, 80),
    _animal("regnet_y_400mf", 48, 64, 80),
    _animal("efficientnet_b0", 48, 64, 80),
    _animal("densenet121", 48, 64, 80),
    _animal("googlenet", 48, 64, 80),
    _animal("convnext_tiny", 48, 64, 80),
    _animal("swin_t", 64, 96, 128),
    _animal("swin_v2_t", 64, 96, 128),
    _animal("maxvit_t", 64, input_size=(64, 64), partition_size=2),
    _animal("lraspp_mobilenet_v3_large", 48, 64, 80),
    _animal("deeplabv3_mobilenet_v3_large", 48, 64, 80),
    _animal("fcn_resnet50", 48, 64, 80),
    _animal("vit_b_16", 32, image_size=32),
)
