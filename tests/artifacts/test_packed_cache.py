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
from tests.models import bert
from x86quant import extension
from x86quant.cli import main
from x86quant.packing.linear_dynamic import row_linear
from x86quant.runtime import packed_cache
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
    assert [known for known, _ in given] == [None] * 3
    given.clear()
    _result(path, x)
    assert len(given) == 3
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
        extension.native().set_native_cpu(here.isa, 12345, here.l2 or 0)
        (told,) = _packs_anew(path, x, caplog)
    finally:
        extension.native().set_native_cpu(here.isa, here.l1d or 0, here.l2 or 0)
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
        handle = extension.native().pack_graph_conv(
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
    extension.native().set_native_cpu(level, *caches)
    try:
        alone = _packed(*LAYERS[layer], threads=1)
        for threads in (2, 3, 7):
            assert torch.equal(_packed(*LAYERS[layer], threads=threads), alone)
    finally:
        extension.native().set_native_cpu(here.isa, *caches)


# --- rows: linears of dynamic models ---


@pytest.fixture(name="rows", scope="module")
def _rows(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.Tensor, torch.Tensor]:
    """As ``net``, of a model whose linears take rows of codes, in a graph of their own."""
    model, call = bert()
    ids = call["input_ids"]
    path = tmp_path_factory.mktemp("rows") / "bert.x86q"
    options: dict[str, Any] = {"fuse_blocks": True, "speed_check": False, "progress": False}
    x86quant.save(x86quant.quantize(model, [(ids,)], mode="dynamic", **options), path)
    return path, ids, x86quant.load(path)(ids)[0]


def _states(path: Path, ids: torch.Tensor) -> torch.Tensor:
    states: torch.Tensor = x86quant.load(path, packed_cache=True)(ids)[0]
    return states


@pytest.fixture(name="known_rows")
def _known_rows(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, Any]]:
    """For each pack of rows: what the cache knew of it, and what was made."""
    found: list[tuple[Any, Any]] = []

    def watched(weights: Any, activation: str | None, known: Any = (None,)) -> Any:
        handle = row_linear(weights, activation, known)
        found.append((known[0], handle.blobs()[0]))
        return handle

    monkeypatch.setattr(packed_cache, "row_linear", watched)
    return found


def test_rows_come_from_the_file(rows: Case, known_rows: list[tuple[Any, Any]]) -> None:
    path, ids, expected = rows
    _cache_of(path).unlink(missing_ok=True)
    assert torch.equal(_states(path, ids), expected)
    count = len(known_rows)
    assert [known for known, _ in known_rows] == [None] * count
    assert count >= 5
    before = _cache_of(path).read_bytes()  # written in the first call
    known_rows.clear()
    assert torch.equal(_states(path, ids), expected)
    assert len(known_rows) == count
    assert all(known.data_ptr() == blob.data_ptr() for known, blob in known_rows)
    assert _cache_of(path).read_bytes() == before


@pytest.mark.parametrize("wrong", ["cut", "changed", "of another CPU"])
def test_rows_of_a_file_that_does_not_fit_are_packed_again(
    rows: Case, wrong: str, known_rows: list[tuple[Any, Any]]
) -> None:
    path, ids, expected = rows
    cache = _cache_of(path)
    cache.unlink(missing_ok=True)
    here = x86quant.cpu()
    try:
        if wrong == "of another CPU":
            extension.native().set_native_cpu(here.isa, 12345, here.l2 or 0)
        _states(path, ids)
    finally:
        extension.native().set_native_cpu(here.isa, here.l1d or 0, here.l2 or 0)
    good = cache.read_bytes()
    if wrong == "cut":
        cache.write_bytes(good[:-64])
    elif wrong == "changed":
        at = len(good) - 100
        cache.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
    known_rows.clear()
    assert torch.equal(_states(path, ids), expected)
    assert known_rows
    assert all(known is None for known, _ in known_rows)


def test_rows_of_another_size_are_packed_again() -> None:
    extension.load()
    weight, scale = torch.randint(-127, 128, (32, 64), dtype=torch.int8), torch.rand(32)
    pack = extension.native().pack_row_linear
    (blob,) = pack(weight, scale, None, None, [0, 0]).blobs()
    for known in (blob[:-64].clone(), torch.cat([blob, blob[:64]])):
        (again,) = pack(weight, scale, None, None, [0, 0], known).blobs()
        assert torch.equal(again, blob)
    (same,) = pack(weight, scale, None, None, [0, 0], blob).blobs()
    assert same.data_ptr() == blob.data_ptr()


@pytest.mark.parametrize("level", ["avx2", "avx512", "avx512_vnni", "amx_int8"])
def test_threads_pack_the_same_rows(level: str) -> None:
    if not isa.has(level):
        pytest.skip(f"this CPU has no {level}")
    extension.load()
    torch.manual_seed(0)
    # So many that packing is worth 64 threads.
    weights = [torch.randint(-127, 128, (4100, 2600), dtype=torch.int8) for _ in range(2)]
    scale, bias = torch.rand(4100), torch.randn(4100)
    here = x86quant.cpu()
    before = torch.get_num_threads()
    found = []
    try:
        extension.native().set_native_cpu(level, here.l1d or 0, here.l2 or 0)
        for threads in (1, 2, 4, 64):
            torch.set_num_threads(threads)
            parts = [(weight, scale, bias) for weight in weights]
            one = extension.native().pack_row_linear(*parts[0], "gelu", [0, 0]).blobs()
            two = extension.native().pack_gated_rows(*parts[0], *parts[1], "silu", [0, 0]).blobs()
            found.append([*one, *two])
    finally:
        torch.set_num_threads(before)
        extension.native().set_native_cpu(here.isa, here.l1d or 0, here.l2 or 0)
    for other in found[1:]:
        assert len(other) == 3
        assert all(map(torch.equal, other, found[0]))


def test_a_file_is_written_when_all_places_have_run(tmp_path: Path) -> None:
    """Else a model of many graphs would write it anew after each."""
    extension.load()
    graphs = [nn.Linear(2, 2) for _ in range(4)]
    places = {"a": graphs[:2], "b": [graphs[2]], "never": [graphs[3]]}
    path = tmp_path / "packed"
    cache = packed_cache.PackedCache(path, places, "0")
    some = torch.zeros(64, dtype=torch.uint8)

    def is_written_after(graph: nn.Module, number: int) -> bool:
        path.unlink(missing_ok=True)
        cache._keep([str(number)], [None], [some])
        cache.write(graph)
        return path.exists()

    runs = [graphs[1], graphs[2], graphs[1]]  # of the alternatives at a place one is enough
    assert [is_written_after(graph, n) for n, graph in enumerate(runs)] == [False, False, True]
    both = packed_cache.PackedCache(path, {"a": graphs[:2], "b": [graphs[2]]}, "0")
    cache = both
    assert [is_written_after(graph, n) for n, graph in enumerate(runs[:2])] == [False, True]
