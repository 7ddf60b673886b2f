"""Batches by Ray Data: rows a second with two workers of one thread, over one worker.

python -m benchmarks.ray_batch [--rounds 3]

Timed from the first batch that comes back to the last, so that starting processes does not count.
One worker and two take turns. Needs a quiet machine with a core for each worker, and pip install
'x86quant[ray]'.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import ray
import ray.data
import torch
from torch import nn

import x86quant
from benchmarks.environment import print_environment
from x86quant.ray import predict

_BATCH, _BLOCKS = 64, 48


def save(path: Path) -> None:
    """A plain network of about 300 million multiply-adds a row."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 3, padding=1), nn.ReLU()]
    for _ in range(8):
        layers += [nn.Conv2d(64, 64, 3, padding=1), nn.ReLU()]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)).eval()
    batches = [torch.randn(4, 3, 32, 32) for _ in range(2)]
    x86quant.save(x86quant.quantize(model, batches, speed_check=False, progress=False), path)


def rows_a_second(dataset: ray.data.Dataset, path: Path, workers: int) -> float:
    """The pace between the first batch and the last."""
    found = predict(
        dataset, path, inputs="data", outputs="scores", keep=[], batch_size=_BATCH, workers=workers
    )
    start, rows = None, 0
    for batch in found.iter_batches(batch_size=None):
        if start is None:
            start = time.perf_counter()
        else:
            rows += len(batch["scores"])
    assert start is not None
    return rows / (time.perf_counter() - start)


def main() -> None:
    """Measure in turns and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    print_environment()
    ray.init(
        num_cpus=2,
        object_store_memory=512 * 2**20,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="error",
    )
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    context.wait_for_min_actors_s = 120  # both workers are there when the first batch runs
    block = np.random.default_rng(0).standard_normal((2 * _BATCH, 3, 32, 32), dtype=np.float32)
    dataset = ray.data.from_numpy([block] * _BLOCKS)
    paces: dict[int, list[float]] = {1: [], 2: []}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "net.x86q"
        save(path)
        for _ in range(options.rounds):
            for workers, found in paces.items():
                found.append(rows_a_second(dataset, path, workers))
    one, two = (statistics.median(found) for found in paces.values())
    print(f"one worker   {one:8.0f} rows a second")
    print(f"two workers  {two:8.0f} rows a second, {two / one:.2f} times as many")
    ratios = [b / a for a, b in zip(paces[1], paces[2], strict=True)]
    print(f"round by round: {', '.join(f'{ratio:.2f}' for ratio in ratios)}")


if __name__ == "__main__":
    main()
