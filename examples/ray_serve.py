"""An int8 model over HTTP, in batches, by Ray Serve.

    pip install 'x86quant[ray]'
    python examples/ray_serve.py

Sends a few requests to itself and ends; a server would stay.
"""

from __future__ import annotations

import json
import tempfile
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import nn

import x86quant
from x86quant.ray import serve_artifact

PORT = 8000


def ask(sample: torch.Tensor) -> list[float]:
    """The answer to one sample."""
    body = json.dumps({"input": sample.tolist()}).encode()
    with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/", body, timeout=60) as answer:
        found: list[float] = json.loads(answer.read())
    return found


def main() -> None:
    """Save a model, serve it, and ask it eight things at once."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4)).eval()
    samples = torch.randn(8, 16)
    int8 = x86quant.quantize(model, [samples], speed_check=False, progress=False)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "net.x86q"
        x86quant.save(int8, path)
        serve_artifact(path, port=PORT, max_batch_size=8, max_wait_ms=10, replicas=(1, 2))
        with ThreadPoolExecutor(8) as pool:
            answers = torch.tensor(list(pool.map(ask, samples)))
    worst = (answers - int8(samples)).abs().max()
    print(f"{len(answers)} answers; largest difference from a run here: {float(worst):.2g}")


if __name__ == "__main__":
    main()
