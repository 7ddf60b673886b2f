"""Int8 accuracy of small networks trained here on real data, and what the accuracy kit recovers.

    python -m benchmarks.accuracy

Trains a plain, a depthwise-separable and a residual CNN and a small transformer on two of
scikit-learn's data sets (handwritten digits, breast cancer), for several seeds with a split of
their own each, quantizes them by ``x86quant.quantize`` with its defaults, and compares accuracy on
the half of the data that was not trained on.

Then networks are made hard on purpose: channels between layers are rescaled, up and down by orders
of magnitude, which leaves their function as it was. Plain min-max loses most of their accuracy; the
kit must bring it back.

Exit status 0 if both targets are met: a mean loss of at most half a point for every network, and at
least 90% of what plain min-max loses recovered; else 1.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import statistics
import sys
from collections.abc import Callable

import torch
from sklearn.datasets import load_breast_cancer, load_digits
from torch import nn
from torch.nn import functional

import x86quant
from x86quant.terminal.text_table import text_table

LARGEST_LOSS = 0.5
LEAST_RECOVERY = 0.9
EPOCHS = 25
#: Channels are scaled by up to 10 to the power of this, up and down.
ORDERS = 1.5

Data = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def digits(seed: int) -> Data:
    """8×8 images (N, 1, 8, 8) of ten digits: training images and labels, then test ones."""
    data = load_digits()
    x = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
    return split(x, torch.tensor(data.target), seed)


def breast_cancer(seed: int) -> Data:
    """Ten features of cell nuclei (N, 3, 10): mean, error and worst of each; two classes."""
    data = load_breast_cancer()
    x = torch.tensor(data.data, dtype=torch.float32).view(-1, 3, 10)
    return split((x - x.mean(0)) / x.std(0), torch.tensor(data.target), seed)


def split(x: torch.Tensor, y: torch.Tensor, seed: int) -> Data:
    """Two random halves."""
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    first, second = order[: len(x) // 2], order[len(x) // 2 :]
    return x[first], y[first], x[second], y[second]


class Layers:
    """Layers by the number of spatial dimensions."""

    def __init__(self, dims: int) -> None:
        self.conv: type[nn.Conv2d] = {1: nn.Conv1d, 2: nn.Conv2d}[dims]
        self.norm: type[nn.BatchNorm2d] = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d}[dims]
        self.pool: type[nn.AdaptiveAvgPool2d] = {
            1: nn.AdaptiveAvgPool1d,
            2: nn.AdaptiveAvgPool2d,
        }[dims]

    def unit(self, c_in: int, c_out: int, kernel: int = 3, **more: int) -> list[nn.Module]:
        """conv-bn-relu."""
        conv = self.conv(c_in, c_out, kernel, padding=kernel // 2, bias=False, **more)
        return [conv, self.norm(c_out), nn.ReLU()]

    def head(self, channels: int, classes: int) -> list[nn.Module]:
        """Pool and classify."""
        return [self.pool(1), nn.Flatten(), nn.Linear(channels, classes)]


class Residual(nn.Module):
    """Two units around which the input is added."""

    def __init__(self, layers: Layers, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *layers.unit(channels, channels), *layers.unit(channels, channels)[:2]
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu(self.body(x) + x)


class Transformer(nn.Module):
    """Tokens are the columns of the input; two pre-norm layers."""

    def __init__(self, features: int, tokens: int, classes: int, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Linear(features, width)
        self.position = nn.Parameter(torch.zeros(tokens, width))
        layer = nn.TransformerEncoderLayer(
            width, 4, 2 * width, dropout=0.1, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width)
        self.classify = nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x.flatten(1, -2).transpose(1, 2)) + self.position
        return self.classify(self.norm(self.layers(x)).mean(1))


def plain(x: torch.Tensor, classes: int) -> nn.Module:
    layers = Layers(x.dim() - 2)
    return nn.Sequential(
        *layers.unit(x.shape[1], 16),
        *layers.unit(16, 32, stride=2),
        *layers.unit(32, 32),
        *layers.head(32, classes),
    )


def separable(x: torch.Tensor, classes: int) -> nn.Module:
    layers = Layers(x.dim() - 2)
    return nn.Sequential(
        *layers.unit(x.shape[1], 16),
        *layers.unit(16, 16, groups=16),
        *layers.unit(16, 32, 1),
        *layers.unit(32, 32, groups=32, stride=2),
        *layers.unit(32, 48, 1),
        *layers.head(48, classes),
    )


def residual(x: torch.Tensor, classes: int) -> nn.Module:
    layers = Layers(x.dim() - 2)
    return nn.Sequential(
        *layers.unit(x.shape[1], 24),
        Residual(layers, 24),
        Residual(layers, 24),
        *layers.head(24, classes),
    )


def transformer(x: torch.Tensor, classes: int) -> nn.Module:
    return Transformer(x.flatten(1, -2).shape[1], x.shape[-1], classes)


DATA_SETS: dict[str, Callable[[int], Data]] = {"digits": digits, "breast_cancer": breast_cancer}
NETWORKS: dict[str, Callable[[torch.Tensor, int], nn.Module]] = {
    "plain CNN": plain,
    "separable CNN": separable,
    "residual CNN": residual,
    "transformer": transformer,
}


def train(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> nn.Module:
    """Adam with a falling rate; returns the model in evaluation mode."""
    optimizer = torch.optim.Adam(model.parameters(), 4e-3)
    batches = -(-len(x) // 64)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, EPOCHS * batches)
    model.train()
    for _ in range(EPOCHS):
        for batch in torch.randperm(len(x)).split(64):
            loss = functional.cross_entropy(model(x[batch]), y[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    return model.eval()


@torch.no_grad()
def accuracy(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    """In percent."""
    return 100 * float((model(x).argmax(1) == y).double().mean())


def folded(model: nn.Sequential) -> nn.Sequential:
    """conv-bn pairs as one conv, so that channels can be rescaled."""
    layers: list[nn.Module] = []
    for layer in copy.deepcopy(model):
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            layers[-1] = torch.nn.utils.fusion.fuse_conv_bn_eval(layers[-1], layer)
        else:
            layers.append(layer)
    return nn.Sequential(*layers).eval()


@torch.no_grad()
def made_hard(model: nn.Sequential) -> nn.Sequential:
    """The same function, with channels between convolutions of very different ranges."""
    model = folded(model)
    convs = [m for m in model if isinstance(m, nn.modules.conv._ConvNd)]
    for first, second in itertools.pairwise(convs):
        scales = 10 ** (torch.rand(first.out_channels) * 2 * ORDERS - ORDERS)
        shape = (-1, *(1,) * (first.weight.dim() - 1))
        first.weight *= scales.view(shape)
        first.bias *= scales
        if second.groups == 1:
            second.weight /= scales.view(1, *shape)[..., 0]
        else:
            second.weight /= scales.view(shape)
    return model


def check_networks(seeds: int) -> tuple[str, bool]:
    """A table of accuracy with the defaults, and whether every network is within the target."""
    rows, met = [], True
    for data_name, load in DATA_SETS.items():
        for name, make in NETWORKS.items():
            losses, exact = [], []
            for seed in range(seeds):
                torch.manual_seed(seed)
                x, y, test_x, test_y = load(seed)
                model = train(make(x, int(y.max()) + 1), x, y)
                exact.append(accuracy(model, test_x, test_y))
                losses.append(exact[-1] - accuracy(x86quant.quantize(model, x), test_x, test_y))
                print(f"{data_name}, {name}, seed {seed}: {losses[-1]:.2f}", file=sys.stderr)
            mean = statistics.mean(losses)
            met &= mean <= LARGEST_LOSS
            rows.append(
                [
                    data_name,
                    name,
                    f"{statistics.mean(exact):.2f}",
                    f"{statistics.mean(exact) - mean:.2f}",
                    f"{mean:+.2f}",
                    f"{max(losses):+.2f}",
                    "yes" if mean <= LARGEST_LOSS else "NO",
                ]
            )
    header = ["data", "network", "fp32 %", "int8 %", "mean loss", "worst loss", "within 0.5"]
    return text_table(header, rows), met


def check_recovery(seeds: int) -> tuple[str, bool]:
    """A table of what the kit recovers on hard networks, and whether it is enough."""
    nothing = {"observer": "minmax", "equalize": False, "bias_correction": False}
    kits: dict[str, dict[str, object]] = {
        "min-max": nothing,
        "mse": {**nothing, "observer": "mse"},
        "bias": {**nothing, "bias_correction": True},
        "equalize": {**nothing, "equalize": True},
        "defaults": {},
    }
    rows, met = [], True
    for name in ("plain CNN", "separable CNN"):
        found: dict[str, list[float]] = {kit: [] for kit in ("fp32", *kits)}
        for seed in range(seeds):
            torch.manual_seed(seed)
            x, y, test_x, test_y = digits(seed)
            model = made_hard(train(NETWORKS[name](x, 10), x, y))
            found["fp32"].append(accuracy(model, test_x, test_y))
            for kit, arguments in kits.items():
                int8 = x86quant.quantize(model, x, **arguments)
                found[kit].append(accuracy(int8, test_x, test_y))
            print(f"hard {name}, seed {seed}: {found['defaults'][-1]:.2f}", file=sys.stderr)
        means = {kit: statistics.mean(values) for kit, values in found.items()}
        lost = means["fp32"] - means["min-max"]
        recovered = (means["defaults"] - means["min-max"]) / lost if lost > 0 else 0.0
        met &= recovered >= LEAST_RECOVERY
        rows.append([name, *(f"{value:.2f}" for value in means.values()), f"{recovered:.1%}"])
    return text_table(["hard network", "fp32 %", *kits, "recovered"], rows), met


def main() -> int:
    """Print both tables; the exit status says whether the targets are met."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--seeds", type=int, default=3, help="networks of each kind (default: 3)")
    options = parser.parse_args()
    networks, close = check_networks(options.seeds)
    print(networks, end="\n\n")
    hard, recovered = check_recovery(options.seeds)
    print(hard)
    return 0 if close and recovered else 1


if __name__ == "__main__":
    sys.exit(main())
