"""Quantize a network, write it as ONNX, and hold what ONNX Runtime computes against ours.

pip install x86quant onnx onnxruntime
python examples/to_onnx.py net.onnx
"""

from __future__ import annotations

import argparse

import numpy as np
import onnxruntime
import torch
from torch import nn

import x86quant


def network() -> nn.Module:
    """A small convolutional network."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, stride=2, padding=1), nn.BatchNorm2d(32), nn.ReLU6(),
        nn.Conv2d(32, 32, 3, padding=1, groups=32), nn.BatchNorm2d(32), nn.ReLU6(),
        nn.Conv2d(32, 64, 1), nn.BatchNorm2d(64), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
    ).eval()  # fmt: skip


def main() -> None:
    """Quantize, write, compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path", nargs="?", default="net.onnx")
    options = parser.parse_args()

    torch.manual_seed(0)
    batches = [torch.randn(4, 3, 64, 64) for _ in range(4)]
    int8 = x86quant.quantize(network(), batches, speed_check=False, progress=False)
    x86quant.export_onnx(int8, options.path)

    # As the file says: fused, ONNX Runtime's products saturate on CPUs without VNNI.
    settings = onnxruntime.SessionOptions()
    settings.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(
        options.path, settings, providers=["CPUExecutionProvider"]
    )
    (given,) = session.get_inputs()
    x = torch.randn(8, 3, 64, 64)
    (theirs,) = session.run(None, {given.name: x.numpy()})
    with torch.no_grad():
        ours = int8(x).numpy()
    step = float(np.ptp(ours)) / 255  # what a code stands for, where results fill 256 of them
    away = int((np.abs(theirs - ours) > step).sum())
    print(f"{options.path}: {given.name} {given.shape}")
    print(f"largest difference: {np.abs(theirs - ours).max():.5f}, a step is {step:.5f}")
    print(f"results further away than a step: {away} of {ours.size}")


if __name__ == "__main__":
    main()
