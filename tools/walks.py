"""How many files of the package a reader enters, from a call to what it does.

    python -m tools.walks            # files entered by each walk, and by all of them
    python -m tools.walks --files    # and which, by package

A file counts when a function of it is called, generators and methods among them; that it is
imported does not count. The walks are those of a transformer: ``quantize`` and the first call of
what it returns, ``save``, ``load``; and ``quantize`` of a convolutional network.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import pkgutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

import x86quant
import x86quant.kernels
from x86quant.torchvision_import import import_torchvision

#: No walk depends on times.
PLAIN: dict[str, Any] = {"speed_check": False, "progress": False}
#: Where the package's files lie, and what each folder is called in it.
ROOTS = {Path(x86quant.__file__).parent: "", Path(x86quant.kernels.__file__).parent: "kernels/"}


@contextmanager
def entered() -> Iterator[set[str]]:
    """A block, and the files of the package whose functions it calls."""
    codes: set[Any] = set()
    found: set[str] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            codes.add(frame.f_code)

    sys.setprofile(note)
    try:
        yield found
    finally:
        sys.setprofile(None)
        for code in codes:
            path = Path(code.co_filename)
            is_function = code.co_flags & inspect.CO_OPTIMIZED  # bodies of classes are none
            for root, name in ROOTS.items():
                if is_function and path.is_relative_to(root):
                    found.add(f"{name}{path.relative_to(root)}")


def import_all() -> None:
    """Import every file of the package, whose decorators would be taken for calls later."""
    for module in pkgutil.walk_packages(x86quant.__path__, "x86quant.", onerror=lambda _: None):
        if not module.name.endswith("__main__"):
            with suppress(ImportError):  # of what is optional
                importlib.import_module(module.name)


def bert() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A transformer of two layers, and arguments for it."""
    import transformers

    config = transformers.BertConfig(
        vocab_size=100, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=128,
    )  # fmt: skip
    ids = torch.randint(0, 100, (2, 12))
    return transformers.BertModel(config).eval(), {
        "input_ids": ids, "attention_mask": torch.ones_like(ids),
    }  # fmt: skip


def walks(folder: Path) -> dict[str, Callable[[], Any]]:
    """What is walked, by name, in order."""
    model, inputs = bert()
    file = folder / "model.x86q"
    made: list[nn.Module] = []
    images = torch.rand(4, 3, 16, 16)
    network = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 196, 4)
    ).eval()

    def quantized() -> None:
        made.append(x86quant.quantize(model, [inputs] * 2, fuse_blocks=True, **PLAIN))
        made[0](**inputs)

    return {
        "quantize(bert)": quantized,
        "save": lambda: x86quant.save(made[0], file),
        "load": lambda: x86quant.load(file)(**inputs),
        "quantize(cnn)": lambda: x86quant.quantize(network, images, **PLAIN)(images),
    }


def main(arguments: list[str] | None = None) -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--files", action="store_true", help="name the files, by package")
    wanted = parser.parse_args(arguments)
    torch.manual_seed(0)
    import_torchvision()  # transformers imports it where it is installed
    import_all()
    every: set[str] = set()
    with tempfile.TemporaryDirectory() as folder:
        for name, walk in walks(Path(folder)).items():
            with entered() as found:
                walk()
            every |= found
            _print(name, found, wanted.files)
    _print("all", every, False)


def _print(name: str, found: set[str], files: bool) -> None:
    packages = Counter(path.partition("/")[0] for path in found if "/" in path)
    print(f"{name}: {len(found)} files in {len(packages)} packages")
    for package in sorted(packages) if files else ():
        inside = sorted(p.partition("/")[2] for p in found if p.startswith(f"{package}/"))
        print(f"  {package:14} {len(inside):3}  {', '.join(inside)}")


if __name__ == "__main__":
    main()
