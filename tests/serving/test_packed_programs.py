"""Packed weights that the C++ library keeps for the next load of a program file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import x86quant
from tests.isa import LEVELS, has
from tests.serving.served import (
    SHAPES,
    Served,
    are_same,
    branches,
    changed,
    file,
)

__all__ = ["branches", "file"]


def test_packed_weights_are_kept_for_the_next_load(
    branches: nn.Module, file: Path, tmp_path: Path
) -> None:
    cache, x = tmp_path / "branches.xq.packed", torch.randn(SHAPES[0])
    assert are_same(Served(file, cache=cache)(x), branches(x))
    written = cache.stat()
    assert are_same(Served(file, cache=cache, threads=3)(x), branches(x))
    assert cache.stat().st_ino == written.st_ino  # not written again: it was used


def _checksum(data: bytes) -> int:
    """What a cache holds: CRC-32C, without turning bits, of four words side by side."""
    table = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
        table.append(value)

    def more(crc: int, added: bytes) -> int:
        for byte in added:
            crc = table[(crc ^ byte) & 0xFF] ^ crc >> 8
        return crc

    whole = len(data) // 32 * 32
    words = [data[at : at + 8] for at in range(0, whole, 8)]
    found = 0
    for lane in range(4):
        found = more(found, more(lane, b"".join(words[lane::4])).to_bytes(8, "little"))
    return more(found, data[whole:])


def test_packed_weights_are_what_runs(branches: nn.Module, file: Path, tmp_path: Path) -> None:
    """A cache with other weights and a right checksum gives other answers, so it is read."""
    cache, x = tmp_path / "packed", torch.randn(SHAPES[0])
    Served(file, cache=cache)
    data = bytearray(cache.read_bytes())
    data[-256:] = bytes(byte ^ 64 if byte else 0 for byte in data[-256:])  # of the last weights
    data[8:12] = _checksum(bytes(data[24:])).to_bytes(4, "little")
    cache.write_bytes(data)
    assert not are_same(Served(file, cache=cache)(x), branches(x))


#: How packed weights begin: xq::kMagic.
_HEAD = (0x58513807).to_bytes(4, "little")


@pytest.mark.parametrize(
    "spoiled", ["flipped", "cut", "empty", "writable", "level", "program", "head"]
)
def test_a_cache_that_does_not_fit_is_not_used(
    spoiled: str, branches: nn.Module, file: Path, tmp_path: Path
) -> None:
    cache, x = tmp_path / "packed", torch.randn(SHAPES[0])
    level = None
    if spoiled == "program":
        other = changed(file, tmp_path / "other.xq", lambda manifest: manifest.update(more=1))
        Served(other, cache=cache)
    else:
        Served(file, cache=cache)
    data = bytearray(cache.read_bytes())
    if spoiled == "flipped":
        data[-7] ^= 1
    elif spoiled == "cut":
        del data[-1:]
    elif spoiled == "empty":
        data.clear()
    elif spoiled == "writable":
        cache.chmod(0o666)
    elif spoiled == "head":  # of weights for another layer, as a right checksum says
        data[data.rindex(_HEAD) + 32] ^= 1
        data[8:12] = _checksum(bytes(data[24:])).to_bytes(4, "little")
    elif spoiled == "level":
        level = next((name for name in LEVELS if has(name) and name != x86quant.cpu().isa), None)
        if level is None:
            pytest.skip("this CPU has one level")
    cache.write_bytes(data)
    before = cache.stat().st_ino
    assert are_same(Served(file, cache=cache, isa=level)(x), branches(x))
    if spoiled != "head":  # which one layer notices, not the file
        assert cache.stat().st_ino != before  # written anew
    assert cache.stat().st_mode & 0o777 == 0o600


def test_a_cache_that_cannot_be_written_is_done_without(
    branches: nn.Module, file: Path, tmp_path: Path
) -> None:
    x = torch.randn(SHAPES[0])
    for cache in (tmp_path / "nowhere" / "packed", tmp_path, Path("/dev/null/packed")):
        assert are_same(Served(file, cache=cache)(x), branches(x))
