"""Changes GGUF files at random and loads them: a model, an error of ours, and nothing else.

    python -m tests.huggingface.fuzz_gguf --count 5000

What is changed are bytes of the head (and so names, sizes, types and settings), numbers of it that
are set to odd ones, and where the file ends. Counted are files that are refused by their head
alone, that are refused behind it, and that are read.
"""

from __future__ import annotations

import argparse
import collections
import random
import tempfile
import warnings
from pathlib import Path

from x86quant.errors import X86QuantError
from x86quant.torchvision_import import import_torchvision

import_torchvision()  # before transformers looks for it

import transformers  # noqa: E402

from tests.huggingface import gguf_models  # noqa: E402
from x86quant.huggingface import load  # noqa: E402
from x86quant.huggingface.gguf_file import read_gguf  # noqa: E402

FAMILIES = ("llama", "gpt2", "qwen3moe")
_ODD = (0, 1, 2, 3, 7, 31, 64, 127, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1)


def changed(whole: bytes, draw: random.Random, head: int) -> bytes:
    """``whole`` with a few changes, most of them in its first ``head`` bytes."""
    data = bytearray(whole)
    if draw.random() < 0.1:
        return bytes(data[: draw.randrange(len(data))])
    for _ in range(draw.randint(1, 3)):
        at = draw.randrange(4, head if draw.random() < 0.9 else len(data) - 4)
        if draw.random() < 0.5:
            data[at] = draw.randrange(256)
        else:
            data[at : at + 4] = draw.choice(_ODD).to_bytes(4, "little")
    return bytes(data)


def fuzz(count: int, seed: int = 0) -> collections.Counter[str]:
    """What became of ``count`` changed files; whatever is not an error of ours is raised."""
    found: collections.Counter[str] = collections.Counter()
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch, "model.gguf")
        samples = []
        for family in FAMILIES:
            gguf_models.write_model(path, family, "Q4_0")
            whole = path.read_bytes()
            samples.append((whole, whole.find(b"ffn_") + 2500))
        for number in range(count):
            draw = random.Random(f"{seed} {number}")
            path.write_bytes(changed(*_drawn(draw, samples)))
            try:
                read_gguf(path)
            except X86QuantError:
                found["refused by its head"] += 1
                continue
            try:
                load(path, fuse_blocks=False)
                found["read"] += 1
            except X86QuantError:
                found["refused behind it"] += 1
            except BaseException:
                print(f"input {number} of seed {seed}")
                raise
    return found


def _drawn(
    draw: random.Random, samples: list[tuple[bytes, int]]
) -> tuple[bytes, random.Random, int]:
    whole, head = draw.choice(samples)
    return whole, draw, head


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    transformers.utils.logging.set_verbosity(50)
    found = fuzz(options.count, options.seed)
    print(f"{options.count} files: " + ", ".join(f"{n} {what}" for what, n in found.items()))


if __name__ == "__main__":
    main()
