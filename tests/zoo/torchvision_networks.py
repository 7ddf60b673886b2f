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

        return _felt(random_model(name, **options))

    return build


def _felt(model: nn.Module) -> nn.Module:
    """With every weight drawn at random: one that is zero, or next to it, hides what is there."""
    for name, parameter in model.named_parameters():
        if name.endswith("layer_scale"):
            nn.init.constant_(parameter, 0.3)
        elif name.endswith("bn3.weight"):
            # Residual branches of full size make a random network of fifty layers chaotic: noise
            # of 40 dB in its input is 5 dB in its result, in float. Training keeps them small.
            nn.init.constant_(parameter, 0.1)
        elif parameter.dim() > 1 and not parameter.any():
            nn.init.normal_(parameter, std=0.1)
    return model


def _small_maxvit() -> nn.Module:
    """A MaxViT of two stages; those that torchvision names take images of 224 pixels alone."""
    from x86quant.torchvision_import import import_torchvision

    import_torchvision()
    from torchvision.models.maxvit import MaxVit

    return _felt(
        MaxVit(
            input_size=(64, 64),
            stem_channels=16,
            partition_size=4,
            block_channels=[16, 32],
            block_layers=[1, 2],
            head_dim=8,
            stochastic_depth_prob=0.0,
            num_classes=10,
        )
    )


def _images(*sizes: int) -> Callable[[int, int], Inputs]:
    """Noise with the spectrum of photographs: on white noise, random weights answer alike."""

    def make(batch: int, size: int) -> Inputs:
        from benchmarks.networks import images

        seed = int(torch.randint(1 << 31, ()))
        return (images(batch, sizes[size % len(sizes)], seed),)

    return make


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


#: On smaller ones the last layers of random networks see hardly more than padding: MobileNet-v3's
#: results shrink 150 times from images of 80 pixels to those of 48, and no range holds both.
_SIZES = (96, 112, 128)

# Bounds below 15 dB: with random weights these networks make 7 to 17 dB out of noise of 35 dB in
# their input, in float. MobileNet-v3's results are small and vary a hundredfold with the size.
# What torch's own reference of static int8 reaches: EfficientNet 0 to 9, GoogLeNet 7 to 10,
# DeepLab 4 to 8, LR-ASPP 9 to 13 dB.
TORCHVISION: tuple[Animal, ...] = (
    _animal("resnet18", *_SIZES),
    _animal("mobilenet_v2", *_SIZES, bound=8.0),
    _animal("mobilenet_v3_small", *_SIZES, bound=4.0),
    _animal("squeezenet1_1", *_SIZES),
    _animal("shufflenet_v2_x0_5", *_SIZES, bound=8.0),
    _animal("mnasnet0_5", *_SIZES, bound=9.0),
    _animal("regnet_y_400mf", *_SIZES, bound=12.0),
    _animal("efficientnet_b0", *_SIZES, bound=5.0),
    _animal("densenet121", *_SIZES),
    _animal("googlenet", *_SIZES, bound=9.0),
    _animal("convnext_tiny", *_SIZES),
    _animal("swin_t", 64, 96, 128),
    _animal("swin_v2_t", 64, 96, 128),
    Animal("tv_small_maxvit", _small_maxvit, _images(64), sizes=(1,), needs="torchvision"),
    _animal("lraspp_mobilenet_v3_large", *_SIZES, bound=11.0),
    _animal("deeplabv3_mobilenet_v3_large", *_SIZES, bound=6.0),
    _animal("fcn_resnet50", *_SIZES),
    _animal("vit_b_16", 32, image_size=32),
)
