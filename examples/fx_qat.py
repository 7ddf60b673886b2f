"""Quantization-aware training: a few steps with rounding simulated, then int8.

python examples/fx_qat.py
"""

from __future__ import annotations

import torch
from torch import nn

import x86quant


def main() -> None:
    """Train a network to tell where a bright spot is, and quantize it."""
    torch.manual_seed(0)
    images = torch.rand(256, 1, 8, 8)
    labels = torch.randint(0, 4, (256,))
    for image, label in zip(images, labels, strict=True):
        row, column = divmod(int(label), 2)
        image[0, 4 * row + 1 : 4 * row + 3, 4 * column + 1 : 4 * column + 3] += 2

    layers = (nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4))
    prepared = x86quant.prepare_qat(nn.Sequential(*layers), (images[:1],))
    optimizer = torch.optim.Adam(prepared.parameters(), lr=1e-2)
    for _ in range(30):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(prepared(images), labels)
        loss.backward()
        optimizer.step()

    int8 = x86quant.convert_qat(prepared)
    right = float((int8(images).argmax(1) == labels).float().mean())
    print(f"int8 gets {right:.0%} right")
    x86quant.assert_int8(int8, (images,))


if __name__ == "__main__":
    main()
