"""Replicas and machines of the encoder service as load comes and goes, on a cluster of one machine.

python -m benchmarks.ray_autoscaling

Ray's provider of made-up nodes stands for a cloud: they are processes here, of one CPU each, which
the autoscaler starts and ends as it would machines. An idle service is asked by 16 clients at once
for a while, and then by nobody; whenever the number of nodes or of replicas changes, a line is
printed.
Exits with 1 unless both grew and went back.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
# Of this cluster alone, for the head, the nodes and us.
os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))

from benchmarks.sentence_efficiency import float_folder
from benchmarks.service_load import Client, mixed
from x86quant.torchvision_import import import_torchvision

_PORT = 8471
_HEAD_PORT = 6379  # where made-up nodes look for it
_CLIENTS = 16


#: What Ray's autoscaler is told. Nothing is set up on a node, since it is a process here.
_CONFIG = {
    "cluster_name": "processes",
    "provider": {
        "type": "fake_multinode",
        "use_node_id_as_ip": True,
        "disable_node_updaters": True,
        "disable_launch_config_check": True,
    },
    "max_workers": 2,
    "upscaling_speed": 1.0,
    "idle_timeout_minutes": 0.2,
    "head_node_type": "ray.head.default",
    "available_node_types": {
        "ray.head.default": {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0},
        "machine": {
            "resources": {"CPU": 1, "object_store_memory": 80 * 2**20},
            "node_config": {},
            "min_workers": 1,
            "max_workers": 2,
        },
    },
    **{name: {} for name in ("auth", "docker", "file_mounts")},
    **{
        f"{when}_commands": [] for when in ("initialization", "setup", "head_setup", "worker_setup")
    },
    **{f"{node}_start_ray_commands": [] for node in ("head", "worker")},
    **{name: [] for name in ("cluster_synced_files", "rsync_exclude", "rsync_filter")},
    "file_mounts_sync_continuously": False,
}


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[str]:
    """A cluster of one head without CPUs and of nodes as they are needed; its address."""
    import ray

    config, logs = folder / "cluster.json", folder / "r"
    config.write_text(json.dumps(_CONFIG))
    command = [str(Path(sys.executable).with_name("ray")), "start", "--head", "--num-cpus=0"]
    command += [f"--autoscaling-config={config}", f"--port={_HEAD_PORT}", f"--temp-dir={logs}"]
    command += ["--include-dashboard=false", "--disable-usage-stats"]
    environment = {**os.environ, "AUTOSCALER_UPDATE_INTERVAL_S": "1", "RAY_FAKE_CLUSTER": "1"}
    try:
        subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
        yield f"{ray.util.get_node_ip_address()}:{_HEAD_PORT}"
    finally:
        end_processes(str(logs))


def end_processes(mark: str) -> None:
    """End every process whose command or environment names ``mark``: `ray stop` ends all there are.

    Some start others while they end.
    """
    for _ in range(3):
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                known = (folder / "cmdline").read_bytes() + (folder / "environ").read_bytes()
                if mark.encode() in known and int(folder.name) != os.getpid():
                    os.kill(int(folder.name), signal.SIGKILL)
        time.sleep(1)


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

    from x86quant.ray import serve_encoder

    seen: list[tuple[int, int]] = []
    ended = threading.Event()
    with tempfile.TemporaryDirectory() as name, cluster(Path(name)) as address:
        folder = float_folder("minilm", Path(name))
        try:
            ray.init(address, log_to_driver=False, logging_level="ERROR")
            serve_encoder(folder, port=_PORT, replicas=(1, 2), ongoing=4, pin=False)
            watching = threading.Thread(target=watch, args=(ended, seen))
            watching.start()
            time.sleep(3)
            print(f"load: {_CLIENTS} clients", flush=True)
            print(
                f"{asyncio.run(load(options.seconds))} requests answered; no more load", flush=True
            )
            end = time.monotonic() + 900  # Serve waits ten minutes before it ends a replica
            while time.monotonic() < end and (len(seen) < 2 or seen[-1] != seen[0]):
                time.sleep(1)
            ended.set()
            watching.join()
            serve.shutdown()
        finally:
            ended.set()
            ray.shutdown()
    grew = any(n > seen[0][0] and r > seen[0][1] for n, r in seen)
    return 0 if grew and seen[-1] == seen[0] else 1


if __name__ == "__main__":
    sys.exit(main())
