"""Packed weights that the C++ library keeps for the next load of a program file."""

from __future__ import annotations

import os
import re
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

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


def checksum(data: bytes) -> int:
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


def test_a_cache_is_known_by_the_build_of_the_library(file: Path, tmp_path: Path) -> None:
    """By the id that the linker gave it, which stands in a note of the library."""
    cache = tmp_path / "packed"
    Served(file, cache=cache)
    library = x86quant.cpp_paths().library.read_bytes()
    (found,) = re.findall(rb"\x04\0\0\0\x14\0\0\0\x03\0\0\0GNU\0(.{20})", library, re.DOTALL)
    assert cache.read_bytes()[24:].startswith(found.hex().encode() + b" ")


def test_packed_weights_are_what_runs(branches: nn.Module, file: Path, tmp_path: Path) -> None:
    """A cache with other weights and a right checksum gives other answers, so it is read."""
    cache, x = tmp_path / "packed", torch.randn(SHAPES[0])
    Served(file, cache=cache)
    data = bytearray(cache.read_bytes())
    # The last weights; zeros may be padding, as they are at the end of AMX's.
    for place in [place for place in range(24, len(data)) if data[place]][-256:]:
        data[place] ^= 64
    data[8:12] = checksum(bytes(data[24:])).to_bytes(4, "little")
    cache.write_bytes(data)
    assert not are_same(Served(file, cache=cache)(x), branches(x))


_INTERNAL = Path(__file__).parents[2] / "kernels" / "native" / "internal.h"
#: How packed weights begin.
_HEAD = int(_INTERNAL.read_text().partition("kMagic = ")[2].partition(";")[0], 0).to_bytes(
    4, "little"
)


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
        data[8:12] = checksum(bytes(data[24:])).to_bytes(4, "little")
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


class _Cache:
    """The parts of a cache of packed weights: its key, and each layer's bytes."""

    def __init__(self, path: Path) -> None:
        self.path, data = path, path.read_bytes()
        key_bytes, self.count = struct.unpack_from("<IQ", data, 12)
        self.key = data[24 : 24 + key_bytes]
        self.sizes = [*struct.unpack_from(f"<{self.count}Q", data, 24 + key_bytes)]
        at, self.blobs = _aligned(24 + key_bytes + 8 * self.count), []
        for size in self.sizes:
            self.blobs.append(data[at : at + size])
            at += _aligned(size)

    def write(self, key_bytes: int | None = None, count: int | None = None) -> None:
        """All of it again behind a right checksum, with these numbers in its head."""
        body = self.key + struct.pack(f"<{len(self.sizes)}Q", *self.sizes)
        for blob in self.blobs:
            body = body.ljust(_aligned(24 + len(body)) - 24, b"\0") + blob
        head = struct.pack("<IIQ", checksum(body),
                           len(self.key) if key_bytes is None else key_bytes,
                           len(self.sizes) if count is None else count)  # fmt: skip
        self.path.write_bytes(self.path.read_bytes()[:8] + head + body)


def _aligned(size: int) -> int:
    return -(-size // 64) * 64


@pytest.fixture
def kept(file: Path, tmp_path: Path) -> _Cache:
    Served(file, cache=tmp_path / "packed")
    return _Cache(tmp_path / "packed")


def test_a_cache_is_laid_out_like_this(kept: _Cache, branches: nn.Module, file: Path) -> None:
    """So that what the next test sees refused is refused for its change alone."""
    before = kept.path.read_bytes()
    kept.write()
    assert kept.path.read_bytes() == before
    inode, x = kept.path.stat().st_ino, torch.randn(SHAPES[0])
    assert are_same(Served(file, cache=kept.path)(x), branches(x))
    assert kept.path.stat().st_ino == inode
    assert kept.count == len(kept.blobs) > 1


_LIES: dict[str, Callable[[_Cache], object]] = {
    "a key of another letter": lambda c: _set(c, key=c.key[:-1] + b"-").write(),
    "a longer key": lambda c: _set(c, key=c.key + b" ").write(),
    "a shorter key": lambda c: _set(c, key=c.key[:-1]).write(),
    "no key": lambda c: _set(c, key=b"").write(),
    "a key of all that follows": lambda c: c.write(key_bytes=c.path.stat().st_size - 24, count=0),
    "a key beyond the end": lambda c: c.write(key_bytes=c.path.stat().st_size - 23),
    "a key of 4 GB": lambda c: c.write(key_bytes=2**32 - 1),
    "one layer too few": lambda c: _set(c, sizes=c.sizes[:-1], blobs=c.blobs[:-1]).write(),
    "one layer too many": lambda c: _set(c, sizes=[*c.sizes, 64],
                                         blobs=[*c.blobs, bytes(64)]).write(),
    "no layers": lambda c: c.write(count=0),
    "sizes up to the end": lambda c: c.write(count=_room(c) // 8),
    "sizes beyond the end": lambda c: c.write(count=_room(c) // 8 + 1),
    "sizes that wrap": lambda c: c.write(count=2**61 + c.count),
    "a layer beyond the end": lambda c: _set(c, sizes=[*c.sizes[:-1], c.sizes[-1] + 1]).write(),
    "a layer without end": lambda c: _set(c, sizes=[*c.sizes[:-1], 2**64 - 1]).write(),
    "a layer that wraps": lambda c: _set(c, sizes=[2**64 - 64, *c.sizes[1:]]).write(),
}  # fmt: skip


def _set(cache: _Cache, **parts: Any) -> _Cache:
    for name, part in parts.items():
        setattr(cache, name, part)
    return cache


def _room(cache: _Cache) -> int:
    return cache.path.stat().st_size - 24 - len(cache.key)


@pytest.mark.parametrize("lie", _LIES)
def test_a_cache_whose_numbers_lie_is_written_anew(
    lie: str, kept: _Cache, branches: nn.Module, file: Path
) -> None:
    """Behind a right checksum, which anybody can compute."""
    right = kept.path.read_bytes()
    _LIES[lie](kept)
    assert kept.path.read_bytes() != right
    x = torch.randn(SHAPES[0])
    assert are_same(Served(file, cache=kept.path)(x), branches(x))
    assert kept.path.read_bytes() == right


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o660, 0o606])
def test_a_cache_that_others_may_write_to_is_not_used(mode: int, kept: _Cache, file: Path) -> None:
    kept.path.chmod(mode)
    Served(file, cache=kept.path)
    assert kept.path.stat().st_mode & 0o777 == 0o600


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_cache_of_somebody_else_is_not_used(kept: _Cache, file: Path) -> None:
    os.chown(kept.path, 12345, -1)
    Served(file, cache=kept.path)
    assert kept.path.stat().st_uid == 0


def test_nothing_is_left_beside_a_cache(kept: _Cache, file: Path, tmp_path: Path) -> None:
    """Neither where it was written nor where it could not be."""
    (tmp_path / "folder").mkdir()
    Served(file, cache=tmp_path / "folder")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "packed"]


_CHANGED_CACHES = """
import random, sys
from pathlib import Path
import torch
from tests.serving.served import Served
from tests.serving.test_packed_programs import checksum
file, cache, x = Path(sys.argv[1]), Path(sys.argv[2]), torch.randn(1, 160, 3, 3)
Served(file, isa="avx2", cache=cache)(x)
whole = cache.read_bytes()
places = [at for at in range(24, len(whole) - 3, 4) if any(whole[at : at + 4])]
for at in random.Random(0).sample(places, 300):
    data = bytearray(whole)
    data[at : at + 4] = (1 << 24).to_bytes(4, "little")
    data[8:12] = checksum(bytes(data[24:])).to_bytes(4, "little")
    cache.write_bytes(data)
    Served(file, isa="avx2", cache=cache)(x)
print("all ran")
"""


@pytest.mark.skipif(not has("avx2"), reason="the CPU has no AVX2")
def test_an_order_of_weights_that_leads_elsewhere_is_not_followed(tmp_path: Path) -> None:
    """Without VNNI packed weights say in which order they are read."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(160, 16, 1), nn.ReLU(), nn.Conv2d(16, 16, 3, groups=4)).eval()
    x = [torch.randn(1, 160, 3, 3)]
    int8 = x86quant.quantize(model, x, speed_check=False, progress=False)
    x86quant.export_program(int8, tmp_path / "net.xq", x)
    done = subprocess.run(
        [sys.executable, "-c", _CHANGED_CACHES, tmp_path / "net.xq", tmp_path / "packed"],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.stdout == "all ran\n", (done.returncode, done.stderr[-500:])
