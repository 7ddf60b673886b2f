"""Packed weights beside a saved model: damaged, and others behind a right checksum."""

from __future__ import annotations

import json
import random
from pathlib import Path

import torch

import x86quant
from benchmarks.readers.changes import anything, json_changes
from benchmarks.readers.reader import Depth, Reader, WrongAnswerError
from tests.artifacts.test_packed_cache import Net
from x86quant import extension
from x86quant.artifacts.file import container
from x86quant.version import __version__

_HEAD = 8 + 4 + 4 + 8
_WRITE, _READ = "write_packed_cache", "read_packed_cache"


def packed_cache(folder: Path) -> Reader:
    """The file that ``load(..., packed_cache=True)`` keeps."""
    torch.manual_seed(0)
    x = torch.randn(1, 8, 6, 6)
    path = folder / "net.x86q"
    module = x86quant.quantize(Net().eval(), [x, x], speed_check=False, progress=False)
    x86quant.save(module, path)
    right = x86quant.load(path)(x)
    x86quant.load(path, packed_cache=True)(x)
    (kept,) = (file for file in folder.iterdir() if file != path)
    sample = kept.read_bytes()
    key = f"{__version__} {container.checksum(path.read_bytes())}"
    assert getattr(extension.native(), _READ)(str(kept), key)[0]

    def change(rng: random.Random, data: bytes) -> bytes:
        if rng.random() < 0.1:
            return anything(rng, data)
        kept.write_bytes(data)
        blobs, why = getattr(extension.native(), _READ)(str(kept), key)
        assert not why
        parts = [blob.numpy().tobytes() for blob in blobs]
        place = rng.randrange(len(parts))
        how = rng.randrange(4)
        if how == 0:
            parts[0] = json.dumps(json_changes(rng, json.loads(parts[0]))).encode()
        elif how == 1:
            parts[place] = anything(rng, parts[place])
        elif how == 2:
            parts[place] = rng.choice(parts)
        elif rng.random() < 0.5:
            del parts[place]
        else:
            parts.insert(place, rng.choice(parts))
        tensors = [torch.frombuffer(bytearray(part), dtype=torch.uint8) if part else
                   torch.empty(0, dtype=torch.uint8) for part in parts]  # fmt: skip
        getattr(extension.native(), _WRITE)(str(kept), key, tensors)
        return kept.read_bytes()

    def tried(data: bytes) -> Depth:
        kept.write_bytes(data)
        _, why = getattr(extension.native(), _READ)(str(kept), key)
        found = x86quant.load(path, packed_cache=True)(x)
        if why and not torch.equal(found, right):
            raise WrongAnswerError(f"not used, since {why}, and the answer is another")
        if not why:
            return Depth.READ
        return Depth.FIRST if len(data) < _HEAD or "kind" in why else Depth.REFUSED

    return Reader([sample], change, tried)
