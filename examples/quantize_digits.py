"""Train a small CNN, quantize it with the stock FX workflow, and see what routing changes.

    python examples/quantize_digits.py

Trains on scikit-learn's 8x8 digits (no download), quantizes with the stock engines and with
x86quant, and prints accuracy, latency side by side, and the kernel chosen for each layer.
"""

from __future__ import annotations

import argparse
import copy
import platform
import time
import warnings
from collections.abc import Callable
from importlib.metadata import version

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.ao import quantization as stock
from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx
from torch.nn import functional

import x86quant
from x86quant.profiling.timing import Timing, interleaved

# torch announces the end of torch.ao.quantization and of reduce_range at every call.
warnings.filterwarnings("ignore", message=".*(torch.ao|quantized tensor|quant_min)")


def conv_bn(c_in: int, c_out: int, kernel: int, **kwargs: int) -> list[nn.Module]:
    """A convolution and its batch norm; padding keeps the image's size at stride 1."""
    padding = kwargs.get("dilation", 1) * (kernel // 2)
    conv = nn.Conv2d(c_in, c_out, kernel, padding=padding, bias=False, **kwargs)
    return [conv, nn.BatchNorm2d(c_out)]


class Block(nn.Module):
    """Widen, look near, look far (dilated), narrow, add: the shapes that separate kernels."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *conv_bn(channels, width, 1),
            nn.ReLU(),
            *conv_bn(width, width, 3, groups=width),
            nn.ReLU(),
            *conv_bn(width, width, 3, groups=width, dilation=2),
            nn.ReLU(),
            *conv_bn(width, channels, 1),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(N, channels, H, W) to the same shape."""
        return functional.relu(x + self.body(x))


def make_model() -> nn.Module:
    """A CNN for 16x16 images in 10 classes."""
    return nn.Sequential(
        *conv_bn(1, 32, 3),
        nn.ReLU(),
        *conv_bn(32, 64, 3, stride=2),
        nn.ReLU(),
        Block(64, 128),
        Block(64, 128),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def load_data() -> tuple[torch.Tensor, torch.Tensor]:
    """1797 images (N, 1, 16, 16) in shuffled order, and their labels."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    images = functional.interpolate(images, scale_factor=2, mode="bilinear")
    order = torch.randperm(len(images))
    return images[order], torch.tensor(digits.target)[order]


def train(model: nn.Module, images: torch.Tensor, labels: torch.Tensor, epochs: int) -> None:
    """Train in place and print a line an epoch."""
    steps = -(-len(images) // 64)
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=epochs * steps)
    model.train()
    start = time.perf_counter()
    for epoch in range(epochs):
        total = 0.0
        for batch in torch.randperm(len(images)).split(64):
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(images[batch]), labels[batch])
            loss.backward()
            optimizer.step()
            schedule.step()
            total += loss.item() * len(batch)
        seconds = time.perf_counter() - start
        print(f"  epoch {epoch + 1}/{epochs}  loss {total / len(images):.4f}  {seconds:.0f} s")
    model.eval()


def quantize(
    model: nn.Module, engine: str, mapping: stock.QConfigMapping, images: torch.Tensor
) -> nn.Module:
    """The stock FX workflow, as any user of torch.ao.quantization has it."""
    torch.backends.quantized.engine = engine
    prepared = prepare_fx(copy.deepcopy(model), mapping, (images[:1],))
    for batch in images.split(64):
        prepared(batch)
    return convert_fx(prepared)


def quantize_all(model: nn.Module, images: torch.Tensor) -> dict[str, nn.Module]:
    """The float model, the stock engines with their own mappings, and the routed one."""
    models = {"fp32": model}
    for engine in ("x86", "fbgemm", "onednn"):
        mapping = stock.get_default_qconfig_mapping(engine)
        models[f"stock {engine}"] = quantize(model, engine, mapping, images)
    x86quant.enable()
    models["x86quant"] = quantize(model, "x86", x86quant.get_default_qconfig_mapping(), images)
    return models


def print_results(
    outputs: dict[str, torch.Tensor], labels: torch.Tensor, times: dict[str, Timing]
) -> None:
    """Accuracy, distance from the float model, and latency: one row a model."""
    ours = times["x86quant"].median
    expected = outputs["fp32"]
    print(f"{'':14}{'accuracy':>9}{'SQNR':>9}{'median':>11}{'minimum':>11}  x86quant is")
    for name, output in outputs.items():
        accuracy = (output.argmax(1) == labels).float().mean().item()
        noise = (output - expected).norm()
        sqnr = f"{20 * torch.log10(expected.norm() / noise).item():.1f} dB" if noise else "-"
        taken = times[name]
        print(
            f"{name:14}{accuracy:>9.2%}{sqnr:>9}{taken.median * 1e6:>8.0f} µs"
            f"{taken.minimum * 1e6:>8.0f} µs{taken.median / ours:>8.2f} x as fast"
        )


def runner(model: nn.Module, x: torch.Tensor) -> Callable[[], object]:
    """A call of ``model`` on ``x``."""
    return lambda: model(x)


def main() -> None:
    """Run the whole job."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch", type=int, default=1, help="images a timed call")
    parser.add_argument("--rounds", type=int, default=200, help="timed calls of each model")
    parser.add_argument("--threads", type=int, default=1, help="threads while timing")
    args = parser.parse_args()
    torch.manual_seed(0)
    # A trained network's tiny gradients become denormal numbers, which are a hundred times slower.
    torch.set_flush_denormal(True)

    cpu = x86quant.cpu()
    print(f"CPU       {cpu.name} ({cpu.isa})")
    packages = ("torch", "fbgemm-gpu-cpu", "x86quant")
    print(f"versions  Python {platform.python_version()}, ", end="")
    print(", ".join(f"{name} {version(name)}" for name in packages))

    images, labels = load_data()
    train_images, test_images = images[:1437], images[1437:]
    print(f"\nTraining on {len(train_images)} images")
    model = make_model()
    train(model, train_images, labels[:1437], args.epochs)

    print("\nQuantizing")
    with torch.inference_mode():
        models = quantize_all(model, train_images[:256])
        # Time before testing: oneDNN lays weights out for the first shape it meets, for good.
        torch.set_num_threads(args.threads)
        calls = {name: runner(m, test_images[: args.batch]) for name, m in models.items()}
        times = interleaved(calls, rounds=args.rounds)
        outputs = {name: m(test_images) for name, m in models.items()}

    print(
        f"\n{len(test_images)} test images; latency at batch {args.batch}, "
        f"{args.threads} thread(s), {args.rounds} interleaved rounds"
    )
    print_results(outputs, labels[1437:], times)
    print(f"\nThe kernel of each layer, and why\n{x86quant.explain(models['x86quant'])}")


if __name__ == "__main__":
    main()
