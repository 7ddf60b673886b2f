"""From a file to the first result: ours against OpenVINO, each time in a new process.

    python -m benchmarks.cold_start [--networks resnet50 bert-base] [--rounds 5]

Both read the file of a network in int8 and run it on one thread, the file in the page cache: what
importing the library takes besides torch, what loading takes, then the first call (of OpenVINO:
compiling and the first inference), then a second one. OpenVINO's network is quantized by NNCF and
saved by itself. ``+cache`` is with ``load(..., packed_cache=True)``, and with OpenVINO's
``CACHE_DIR``, which also keeps the compiled model. All take turns; medians and minima in
milliseconds. Cap the level by ``X86QUANT_ISA``. Of BERT-base, which is dynamic and has its class
from transformers, imported before, it is ours alone.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch

import x86quant
from benchmarks.artifacts import converted
from benchmarks.environment import print_environment
from benchmarks.networks import torchvision_model
from x86quant.bench.backends import Task, backend, missing
from x86quant.bench.subjects import subject
from x86quant.given_model import Arguments

_SIZE = 224
_COLUMNS = ("import", "load", "first", "second", "load+first")
_CACHE = "+cache"
_BERT = "bert-base"

#: What runs in a process of its own: imports, then times of loading, a first and a second call.
_CHILD = f"""
import json, sys, time, warnings
warnings.simplefilter("ignore")
import numpy, torch
torch.set_num_threads(1)
if sys.argv[3] == "{_BERT}":
    from x86quant.torchvision_import import import_torchvision
    import_torchvision()
    import transformers.models.bert.modeling_bert
    inputs = [torch.arange(1000, 1128).reshape(1, 128), torch.ones(1, 128, dtype=torch.int64)]
else:
    x = torch.randn(1, 3, {_SIZE}, {_SIZE}).contiguous(memory_format=torch.channels_last)
    inputs = [x]
times = []
def timed(work):
    start = time.perf_counter()
    result = work()
    times.append((time.perf_counter() - start) * 1e3)
    return result
who, _, cache = sys.argv[1].partition("+")
if who == "ours":
    def library():
        import x86quant
        x86quant.load
        return x86quant
    x86quant = timed(library)
    module = timed(lambda: x86quant.load(sys.argv[2], packed_cache=bool(cache)))
    run = lambda: module(*inputs)
    timed(run)
else:
    def library():
        import openvino
        return openvino.Core()
    core = timed(library)
    if cache:
        core.set_property({{"CACHE_DIR": sys.argv[2] + ".cache"}})
    model = timed(lambda: core.read_model(sys.argv[2]))
    array = numpy.ascontiguousarray(x.numpy())
    def first():
        settings = {{"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": 1, "NUM_STREAMS": 1,
                     "ENABLE_CPU_PINNING": False}}
        request = core.compile_model(model, "CPU", settings).create_infer_request()
        request.infer([array])
        return request
    request = timed(first)
    run = lambda: request.infer([array])
timed(run)
print(json.dumps(times))
"""


def once(who: str, file: Path, name: str) -> list[float]:
    """Milliseconds of ``_COLUMNS`` but the last, in a new process."""
    command = [sys.executable, "-c", _CHILD, who, str(file), name]
    # As where packages are installed: what was imported once is compiled.
    kept = {"PYTHONPYCACHEPREFIX": str(file.parent / "pycache"), "PYTHONDONTWRITEBYTECODE": ""}
    environment = {**os.environ, **kept}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    times: list[float] = json.loads(done.stdout.splitlines()[-1])
    return times


def files(name: str, folder: Path) -> dict[str, Path]:
    """The network as each of the two reads it."""
    found = {"ours": folder / f"{name}.x86q"}
    if name == _BERT:
        bert = subject(name)
        batch = bert.arguments(seed=0).kwargs or bert.arguments(seed=0).args
        options: dict[str, Any] = {"fuse_blocks": True, "speed_check": False, "progress": False}
        x86quant.save(
            x86quant.quantize(bert.model(), [batch], mode="dynamic", **options), found["ours"]
        )
        return found
    model = torchvision_model(name)
    x = torch.randn(1, 3, _SIZE, _SIZE)
    x86quant.save(x86quant.compile(converted(model, x), (x,)), found["ours"])
    peer = backend("openvino")
    if (why := missing(peer)) is not None:
        print(f"  OpenVINO left out: {why}")
        return found
    example = Arguments((x,))
    prepared = peer.prepare(Task(model, "float", [example], example, 1))
    assert prepared.save is not None
    (folder / name).mkdir()
    prepared.save(folder / name)
    (found["openvino"],) = (folder / name).glob("*.xml")
    return found


def print_network(name: str, folder: Path, rounds: int) -> None:
    """Lines of the table."""
    found = files(name, folder)
    found |= {who + _CACHE: file for who, file in found.items()}
    taken: dict[str, list[list[float]]] = {who: [] for who in found}
    for who, file in found.items():
        once(who, file, name)  # what the system caches
    for _ in range(rounds):
        for who, file in found.items():
            taken[who].append(once(who, file, name))
    for who, times in taken.items():
        columns = [*zip(*times, strict=True), [one[1] + one[2] for one in times]]
        text = "".join(f"{statistics.median(x):>11.1f}{min(x):>8.1f}" for x in columns)
        print(f"{name:<20}{who:<18}{text}", flush=True)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--networks", nargs="+", default=["resnet50", "efficientnet_v2_s", "mobilenet_v2"]
    )
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # stock PyTorch's own
    print_environment()
    titles = "".join(f"{title:>11}{'least':>8}" for title in _COLUMNS)
    print(f"{'milliseconds':<38}{titles}")
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        for name in options.networks:
            print_network(name, Path(folder), options.rounds)


if __name__ == "__main__":
    main()
