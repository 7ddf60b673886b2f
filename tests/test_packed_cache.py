"""Packed weights beside an artifact: the same results with and without, whatever is in the file."""

from __future__ import annotations

import logging
import multiprocessing
import os
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import x86quant
from tests import isa
from x86quant import extension
from x86quant.cli import main
from x86quant.runtime.programs import LayerWeights, Programs

_FOUND = "is not used"


class Net(nn.Module):
    """Convolutions of two kinds, a residual and a linear."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(8, 16, 3, padding=1)
        self.second = nn.Conv2d(16, 16, 3, padding=1, groups=16)
        self.third = nn.Conv2d(16, 16, 1)
        self.last = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores."""
        y = self.first(x).relu()
        y = y + self.third(self.second(y).relu())
        scores: torch.Tensor = self.last(y.mean((2, 3)))
        return scores


def _saved(path: Path, seed: int = 0) -> torch.Tensor:
    """An input; the model of this ``seed`` is in ``path``."""
    torch.manual_seed(seed)
    calls = [torch.randn(2, 8, 12, 12) for _ in range(2)]
    int8 = x86quant.quantize(Net().eval(), calls, speed_check=False, progress=False)
    x86quant.save(int8, path)
    return calls[0]


@pytest.fixture(name="net")
def _net(tmp_path: Path) -> tuple[Path, torch.Tensor, torch.Tensor]:
    """The file of a model, an input, and the result without a cache."""
    path = tmp_path / "net.x86q"
    x = _saved(path)
    return path, x, x86quant.load(path)(x)


Case = tuple[Path, torch.Tensor, torch.Tensor]


def _cache_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.packed")


def _result(path: Path, x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = x86quant.load(path, packed_cache=True)(x)
    return result


def _packs_anew(path: Path, x: torch.Tensor, caplog: pytest.LogCaptureFixture) -> list[str]:
    """What is logged while ``path`` is loaded and runs, where the cache is not used."""
    caplog.clear()
    with caplog.at_level(logging.INFO, "x86quant.packed_cache"):
        _result(path, x)
    return [message for message in caplog.messages if _FOUND in message]


def test_a_hit_is_a_miss_byte_for_byte(net: Case, caplog: pytest.LogCaptureFixture) -> None:
    path, x, expected = net
    (told,) = _packs_anew(path, x, caplog)
    assert "there is none yet" in told
    cache = _cache_of(path)
    before = cache.read_bytes()
    assert _packs_anew(path, x, caplog) == []
    assert torch.equal(_result(path, x), expected)
    assert cache.read_bytes() == before  # nothing was packed that it lacks
    assert stat.S_IMODE(cache.stat().st_mode) == 0o600


def test_weights_come_from_the_file(net: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else nothing here would show that it is read."""
    path, x, _ = net
    given: list[tuple[Any, Any]] = []
    packed = Programs.packed

    def watched(self: Programs, kernel: str, layer: LayerWeights, known: Any = None) -> Any:
        handle = packed(self, kernel, layer, known)
        given.append((known, handle))
        return handle

    monkeypatch.setattr(Programs, "packed", watched)
    _result(path, x)
    assert [known for known, _ in given] == [None] * 4
    given.clear()
    _result(path, x)
    assert len(given) == 4
    assert all(known.data_ptr() == handle.blob().data_ptr() for known, handle in given)


def test_no_cache_unless_asked_for(net: Case) -> None:
    path, x, _ = net
    x86quant.load(path)(x)
    assert not _cache_of(path).exists()


@pytest.mark.parametrize("place", ["head", "key", "weights", "end"])
def test_damage_is_seen(net: Case, place: str, caplog: pytest.LogCaptureFixture) -> None:
    path, x, expected = net
    _result(path, x)
    cache = _cache_of(path)
    good = cache.read_bytes()
    at = {"head": 10, "key": 30, "weights": len(good) - 100, "end": len(good) - 1}[place]
    cache.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
    (told,) = _packs_anew(path, x, caplog)
    assert "damaged" in told
    assert cache.read_bytes() == good  # and mended
    assert torch.equal(_result(path, x), expected)


@pytest.mark.parametrize("size", [0, 7, 100, -1])
def test_a_part_of_a_file_is_none(net: Case, size: int, caplog: pytest.LogCaptureFixture) -> None:
    path, x, expected = net
    _result(path, x)
    cache = _cache_of(path)
    cache.write_bytes(cache.read_bytes()[:size])
    assert len(_packs_anew(path, x, caplog)) == 1
    assert torch.equal(_result(path, x), expected)


def test_another_model_has_another_cache(net: Case, caplog: pytest.LogCaptureFixture) -> None:
    path, x, expected = net
    _result(path, x)
    stale = _cache_of(path).read_bytes()
    _saved(path, seed=1)
    (told,) = _packs_anew(path, x, caplog)
    assert "another model" in told
    other = x86quant.load(path)(x)
    _cache_of(path).write_bytes(stale)
    assert torch.equal(_result(path, x), other)
    assert not torch.equal(other, expected)


def test_weights_that_have_changed_are_packed_again(net: Case) -> None:
    path, x, expected = net
    _result(path, x)
    good = _cache_of(path).read_bytes()
    changed = [x86quant.load(path, packed_cache=cached) for cached in (False, True)]
    for module in changed:
        weight = next(b for b in module.buffers() if b.dtype is torch.int8 and b.dim() == 4)
        weight.clamp_(max=3)
    plain, cached = (module(x) for module in changed)
    assert torch.equal(plain, cached)
    assert not torch.equal(plain, expected)
    assert _cache_of(path).read_bytes() == good


def test_another_level_has_another_cache(
    net: Case, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, x, expected = net
    _result(path, x)
    here = x86quant.cpu()
    try:
        torch.ops.x86quant.set_native_cpu(here.isa, 12345, here.l2 or 0)
        (told,) = _packs_anew(path, x, caplog)
    finally:
        torch.ops.x86quant.set_native_cpu(here.isa, here.l1d or 0, here.l2 or 0)
    assert "another CPU" in told
    assert torch.equal(_result(path, x), expected)


@pytest.mark.parametrize("mode", [0o620, 0o602])
def test_what_others_may_write_to_is_not_read(
    net: Case, mode: int, caplog: pytest.LogCaptureFixture
) -> None:
    path, x, expected = net
    _result(path, x)
    _cache_of(path).chmod(mode)
    (told,) = _packs_anew(path, x, caplog)
    assert "only this user" in told
    assert torch.equal(_result(path, x), expected)


def test_a_place_that_cannot_be_written_is_done_without(
    net: Case, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, x, expected = net
    nowhere = tmp_path / "missing" / "cache"  # root may write to read-only folders
    with caplog.at_level(logging.INFO, "x86quant.packed_cache"):
        module = x86quant.load(path, packed_cache=nowhere)
        assert torch.equal(module(x), expected)
    assert "cannot be written" in caplog.text
    assert not nowhere.parent.exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder_is_done_without(net: Case) -> None:
    path, x, expected = net
    path.parent.chmod(0o500)
    try:
        assert torch.equal(_result(path, x), expected)
    finally:
        path.parent.chmod(0o700)


def _in_a_process(path: Path, x: torch.Tensor, expected: torch.Tensor) -> None:
    torch.set_num_threads(1)
    for _ in range(5):
        assert torch.equal(_result(path, x), expected)
        _cache_of(path).unlink(missing_ok=True)


def test_many_may_write_at_a_time(net: Case) -> None:
    path, x, expected = net
    # Forked, as workers of a DataLoader are: nothing of the parent may be missing in them.
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_in_a_process, args=(path, x, expected)) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)
        assert worker.exitcode == 0
    _result(path, x)
    assert torch.equal(_result(path, x), expected)
    assert [file.name for file in sorted(path.parent.iterdir())] == [
        path.name,
        _cache_of(path).name,
    ]


def test_copies_pack_by_themselves(net: Case) -> None:
    import copy

    path, x, expected = net
    module = x86quant.load(path, packed_cache=True)
    assert torch.equal(copy.deepcopy(module)(x), expected)
    assert not _cache_of(path).exists()


@pytest.mark.parametrize("command", ["explain", "report", "export-program"])
def test_commands_keep_packed_weights_when_asked(
    command: str, net: Case, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, *_ = net
    others = {
        "explain": ["--shape", "2,8,12,12"],
        "report": ["--shape", "2,8,12,12", "--out", str(tmp_path / "page.html")],
        "export-program": ["--shape", "2,8,12,12", "--out", str(tmp_path / "net.xqp")],
    }
    assert main([command, str(path), *others[command]]) == 0
    assert not _cache_of(path).exists(), "nobody asked for it"
    assert main([command, str(path), *others[command], "--packed-cache"]) == 0
    assert _cache_of(path).exists()
    capsys.readouterr()
    if command != "export-program":  # which takes nothing but files
        assert main([command, "torch.nn:Identity", *others[command], "--packed-cache"]) == 2
        assert "leave out --packed-cache" in capsys.readouterr().err


#: Output channels, input channels of a group, kernel, groups: each packed in another way, at some
#: level.
LAYERS = {
    "products": (512, 500, 1, 1),
    "tiles of 4 × 4, and products for few": (256, 256, 3, 1),
    "tiles of 2 × 2": (300, 512, 3, 1),
    "few input channels": (512, 13, 7, 1),
    "depthwise": (4096, 1, 3, 4096),
    "narrow groups": (1024, 4, 3, 256),
    "wide groups": (512, 32, 3, 16),
}


def _packed(out: int, inside: int, size: int, groups: int, threads: int) -> torch.Tensor:
    torch.manual_seed(0)
    weight = torch.randint(-15, 16, (out, inside, 1, size, size), dtype=torch.int8)
    geometry = [1, size, size, 1, 1, 1, 0, size // 2, size // 2, 1, 1, 1, groups, 0]
    mult, bias = torch.rand(out), torch.rand(out)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        handle = torch.ops.x86quant.pack_graph_conv(
            "native", weight, mult, bias, None, geometry, [3, 5, 0, 255, 0, 0], 0.0
        )
    finally:
        torch.set_num_threads(before)
    found: torch.Tensor = handle.blob()
    return found


@pytest.mark.parametrize("level", ["avx2", "avx512", "avx512_vnni", "amx_int8"])
@pytest.mark.parametrize("layer", LAYERS)
def test_threads_pack_the_same_bytes(layer: str, level: str) -> None:
    if not isa.has(level):
        pytest.skip(f"this CPU has no {level}")
    extension.load()
    here = x86quant.cpu()
    caches = here.l1d or 0, here.l2 or 0
    torch.ops.x86quant.set_native_cpu(level, *caches)
    try:
        alone = _packed(*LAYERS[layer], threads=1)
        for threads in (2, 3, 7):
            assert torch.equal(_packed(*LAYERS[layer], threads=threads), alone)
    finally:
        torch.ops.x86quant.set_native_cpu(here.isa, *caches)
