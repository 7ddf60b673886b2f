"""Networks for pictures, of torchvision and timm, whose activations keep in a sane range."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from x86quant.torchvision_import import import_torchvision

_SIZE = 224
#: Parameters by which blocks are scaled before they are added: of torchvision, and of timm.
_SHARES = re.compile(r"layer_scale$|(^|\.)(gamma|gamma_?[0-9]|ls[0-9]\.gamma|alpha[0-9]?)$")
#: Such a scale is felt from here on.
_FELT = 0.01


def network_for_images(name: str, size: int = 224) -> nn.Module:
    """The network, settled on :func:`images`, with every block's share felt."""
    model = random_model(name)
    for parameter_name, parameter in model.named_parameters():
        if _SHARES.search(parameter_name) and float(parameter.abs().max()) < _FELT:
            # A fresh ConvNeXt's is 1e-6: its blocks could compute anything, unnoticed.
            nn.init.constant_(parameter, 0.3)
    settle(model, [images(8, size, seed) for seed in (1, 2)])
    return model


def images(count: int, size: int, seed: int) -> torch.Tensor:
    """Noise with the spectrum of photographs, of unit variance: ``(count, 3, size, size)``.

    White noise looks the same everywhere, and so do the results of a network on it.
    """
    generator = torch.Generator().manual_seed(seed)
    white = torch.fft.rfft2(
        torch.randn(count, 3, size, size, generator=generator, dtype=torch.float32)
    )
    rows, columns = torch.fft.fftfreq(size)[:, None], torch.fft.rfftfreq(size)[None]
    frequency = (rows.square() + columns.square()).sqrt().clamp(min=1 / size)
    pictures: torch.Tensor = torch.fft.irfft2(white / frequency, s=(size, size))
    return pictures / pictures.std()


def settle(model: nn.Module, batches: Sequence[torch.Tensor]) -> None:
    """Give batch norms the statistics of ``batches``, and leave the model in eval mode.

    Without, random weights blow the activations up layer by layer.
    """
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    model.train()
    for norm in norms:
        norm.momentum = None  # a plain average over the batches
    with torch.no_grad():
        for batch in batches if norms else ():
            model(batch)
    model.eval()


#: What models of timm are called by, before their own name.
TIMM = "timm:"


def image_size(name: str) -> int:
    """How high and wide the network called ``name`` wants its pictures."""
    if not name.startswith(TIMM):
        return _SIZE
    import timm

    known = timm.get_pretrained_cfg(name.removeprefix(TIMM))
    return _SIZE if known is None else int(known.input_size[-1])


def random_model(name: str, **options: Any) -> nn.Module:
    """The float network with random weights, as torchvision or timm makes it from ``options``."""
    torchvision: Any = import_torchvision()
    if name.startswith(TIMM):
        import timm

        torch.manual_seed(0)
        found: nn.Module = timm.create_model(name.removeprefix(TIMM), pretrained=False, **options)
        return found
    if torchvision is None:
        raise ImportError("no module named 'torchvision'")
    torch.manual_seed(0)
    if name == "googlenet":
        options = {"aux_logits": False, "init_weights": True, **options}
    if name.startswith(("fcn_", "deeplabv3_", "lraspp_")):
        options = {"weights_backbone": None, **options}
    model: nn.Module = torchvision.models.get_model(name, weights=None, **options)
    return model
