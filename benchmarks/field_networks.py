"""Networks of libraries that people take them from, for ``x86quant bench``.

Weights are random; batch norms have the statistics that random images give, as a network of
defaults lets nothing through. Each needs its library::

    pip install ultralytics open_clip_torch diffusers monai vit-pytorch segment-anything encodec
    x86quant bench benchmarks.field_networks:yolo11n --shape 1,3,320,320 \\
        --backends x86quant,openvino,fp32
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from x86quant.torchvision_import import import_torchvision


def _settled(model: nn.Module, *inputs: torch.Tensor) -> nn.Module:
    """``model`` with the statistics of ``inputs`` in its batch norms."""
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = 0.5
        norm.train()
    with torch.no_grad():
        for _ in range(6 if norms else 0):
            model(*(torch.randn_like(x) for x in inputs))
    return model.eval()


def _library(name: str) -> Any:
    torch.manual_seed(0)
    import_torchvision()  # which some of them import
    return importlib.import_module(name)


def _yolo(file: str) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        model = _library("ultralytics.nn.tasks").DetectionModel(file, verbose=False).eval()
        _settled(model, torch.randn(4, 3, 320, 320))
        model.model[-1].export = True  # one tensor, which OpenVINO can trace
        model.model[-1].shape = None
        found: nn.Module = model
        return found

    return build


yolov8n, yolo11n, yolo12n, yolo26n = map(
    _yolo, ("yolov8n.yaml", "yolo11n.yaml", "yolo12n.yaml", "yolo26n.yaml")
)


def clip_rn50() -> nn.Module:
    """CLIP's network of images, whose end pools by attention; 224 pixels."""
    model = _library("open_clip").create_model("RN50", pretrained=None).visual.eval()
    return _settled(model, torch.randn(4, 3, 224, 224))


class _OfImages(nn.Module):
    """A diffusion network at one step."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> Any:
        """The noise that it finds."""
        return self.model(x, torch.full((x.shape[0],), 500), return_dict=False)[0]


def diffusion_unet() -> nn.Module:
    """Of images of 64 pixels."""
    widths = (64, 128, 256, 256)
    unet = _library("diffusers").UNet2DModel(64, block_out_channels=widths).eval()
    return _OfImages(unet).eval()


def basic_unet() -> nn.Module:
    """MONAI's, of slices of one channel and 256 pixels."""
    return _settled(_library("monai.networks.nets").BasicUNet(2, 1, 2).eval())


def cvt() -> nn.Module:
    """Convolutions and attention spelled with einops; 224 pixels."""
    kind = _library("vit_pytorch.cvt").CvT
    model: nn.Module = kind(num_classes=1000, s1_emb_dim=64, s2_depth=2, s3_depth=4).eval()
    return model


def sam_encoder() -> nn.Module:
    """What Segment Anything sees an image of 512 pixels with, narrower than the smallest."""
    kind = _library("segment_anything.modeling").ImageEncoderViT
    model: nn.Module = kind(
        img_size=512, embed_dim=384, depth=4, num_heads=6, use_rel_pos=True, window_size=14,
        global_attn_indexes=(1, 3),
    ).eval()  # fmt: skip
    return model


def encodec_encoder() -> nn.Module:
    """A causal network of sound, whose margins depend on how long it is; [1, 1, 24000]."""
    model: nn.Module = _library("encodec.modules").SEANetEncoder(lstm=0).eval()
    return model
