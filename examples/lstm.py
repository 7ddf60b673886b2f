"""Train an LSTM to read digits row by row, quantize it, and see what that costs and gains.

    pip install 'x86quant[examples]'
    python examples/lstm.py

Each of scikit-learn's 8x8 digits is a sequence of eight rows. The LSTM's weights become int8, the
input of each step is quantized as it comes, and a whole sequence is one native call.
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn

import x86quant
from x86quant.profiling.timing import interleaved


class Reader(nn.Module):
    """Rows of pixels to classes, by the last state of an LSTM."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, size, num_layers=2, batch_first=True)
        self.head = nn.Linear(size, 10)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows are [images, 8, 8], the result is [images, 10]."""
        states, _ = self.lstm(rows)
        scores: torch.Tensor = self.head(states[:, -1])
        return scores


def train(model: nn.Module, images: torch.Tensor, labels: torch.Tensor, epochs: int) -> None:
    """Adam, in place."""
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    model.train()
    for _ in range(epochs):
        for batch in torch.randperm(len(images)).split(64):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    model.eval()


def main() -> None:
    """Train, quantize, compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=256)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=50)
    options = parser.parse_args()
    torch.manual_seed(0)
    digits = load_digits()
    order = torch.randperm(len(digits.images))
    images = torch.tensor(digits.images, dtype=torch.float32)[order] / 16
    labels = torch.tensor(digits.target)[order]

    model = Reader(options.size)
    train(model, images[:1400], labels[:1400], options.epochs)
    int8 = x86quant.quantize(model, [images[:64]], speed_check=False, progress=False)
    print(int8.quantization)
    models = {"float": model, "int8": int8}
    with torch.inference_mode():
        one = images[1400:1401]
        calls = {name: lambda m=m: m(one) for name, m in models.items()}  # type: ignore[misc]
        times = interleaved(calls, rounds=options.rounds)
        for name, each in models.items():
            right = float((each(images[1400:]).argmax(1) == labels[1400:]).float().mean())
            print(f"{name:<6} {right:6.1%} right   {times[name].median * 1e6:8.0f} µs an image")


if __name__ == "__main__":
    main()
