"""An int8 model over a dataset, on several processes of this machine or a cluster.

    pip install 'x86quant[ray]'
    python examples/ray_batch.py

``ray.init()`` joins a cluster where RAY_ADDRESS names one.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import ray
import torch
from torch import nn

import x86quant
from x86quant.ray import predict


def save(path: Path) -> None:
    """Quantize a small network and save it."""
    torch.manual_seed(0)
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), *head).eval()
    batches = [torch.randn(8, 3, 16, 16) for _ in range(2)]
    x86quant.save(x86quant.quantize(model, batches, speed_check=False, progress=False), path)


def main() -> None:
    """Predict in order with two workers, and compare with a run in this process."""
    ray.init(num_cpus=2, include_dashboard=False, ignore_reinit_error=True, log_to_driver=False)
    images = np.random.default_rng(0).standard_normal((256, 3, 16, 16), dtype=np.float32)
    rows = [{"name": f"image {i}", "image": image} for i, image in enumerate(images)]
    dataset = ray.data.from_items(rows, override_num_blocks=8)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "net.x86q"
        save(path)
        predicted = predict(
            dataset,
            path,
            inputs="image",
            outputs="scores",
            keep=["name"],
            batch_size=32,
            workers=2,
            in_order=True,
        )
        found = predicted.take_all()
        here = x86quant.load(path)(torch.from_numpy(images)).numpy()
    print(f"{len(found)} rows, the last is {found[-1]['name']}")
    there = np.stack([row["scores"] for row in found])
    print(f"largest difference from a run in this process: {np.abs(there - here).max():.2g}")


if __name__ == "__main__":
    main()
