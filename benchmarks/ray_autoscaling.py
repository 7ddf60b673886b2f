"""Replicas and machines of the encoder service as load comes and goes, on a cluster of one machine.

python -m benchmarks.ray_autoscaling

Ray's own test cluster stands for a cloud: its nodes are processes here, of one CPU each, which the
autoscaler starts and ends as it would machines. An idle service is asked by 16 clients at once for
a while, and then by nobody; whenever the number of nodes or of replicas changes, a line is printed.
Exits with 1 unless both grew and went back.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
# Ray looks more often than every few minutes, so that this takes minutes.
os.environ.setdefault("AUTOSCALER_UPDATE_INTERVAL_S", "1")

from benchmarks.sentence_efficiency import float_folder
from benchmarks.service_load import Client, mixed
from x86quant.torchvision_import import import_torchvision

_PORT = 8471
_CLIENTS = 16


def counts() -> tuple[int, int]:
    """Nodes with a CPU, and replicas that answer."""
    import ray
    from ray import serve

    nodes = [n for n in ray.nodes() if n["Alive"] and n["Resources"].get("CPU")]
    applications = serve.status().applications.values()
    replicas = (d.replica_states for a in applications for d in a.deployments.values())
    return len(nodes), sum(states.get("RUNNING", 0) for states in replicas)


def watch(until: threading.Event, seen: list[tuple[int, int]]) -> None:
    """Print how many there are, whenever that changes."""
    start = time.monotonic()
    while not until.wait(0.5):
        found = counts()
        if not seen or found != seen[-1]:
            seen.append(found)
            nodes, replicas = found
            print(
                f"{time.monotonic() - start:6.0f} s  {nodes} nodes  {replicas} replicas", flush=True
            )


async def load(seconds: float) -> int:
    """How many requests were answered, with so many clients at once."""
    client, requests = Client(_PORT), mixed(0)
    end = time.monotonic() + seconds
    count = 0

    async def work() -> None:
        nonlocal count
        while time.monotonic() < end:
            count += await client.ask(next(requests)) == 200

    await asyncio.gather(*(work() for _ in range(_CLIENTS)))
    client.close()
    return count


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=90, help="of load")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    import_torchvision()
    import ray
    from ray import serve
    from ray.cluster_utils import AutoscalingCluster

    from x86quant.ray import serve_encoder

    cluster = AutoscalingCluster(
        head_resources={"CPU": 0},
        worker_node_types={
            "machine": {
                "resources": {"CPU": 1, "object_store_memory": 80 * 2**20},
                "node_config": {},
                "min_workers": 1,
                "max_workers": 2,
            }
        },
        idle_timeout_minutes=0.2,
    )
    cluster.start()
    seen: list[tuple[int, int]] = []
    ended = threading.Event()
    try:
        with tempfile.TemporaryDirectory() as name:
            folder = float_folder("minilm", Path(name))
            ray.init("auto", log_to_driver=False, logging_level="ERROR")
            serve_encoder(folder, port=_PORT, replicas=(1, 2), ongoing=4, pin=False)
            watching = threading.Thread(target=watch, args=(ended, seen))
            watching.start()
            time.sleep(3)
            print(f"load: {_CLIENTS} clients", flush=True)
            print(
                f"{asyncio.run(load(options.seconds))} requests answered; no more load", flush=True
            )
            end = time.monotonic() + 300
            while time.monotonic() < end and (len(seen) < 2 or seen[-1] != seen[0]):
                time.sleep(1)
            ended.set()
            watching.join()
            serve.shutdown()
            ray.shutdown()
    finally:
        ended.set()
        cluster.shutdown()
    grew = any(n > seen[0][0] and r > seen[0][1] for n, r in seen)
    return 0 if grew and seen[-1] == seen[0] else 1


if __name__ == "__main__":
    sys.exit(main())
