"""Program files, run by the C++ library: it gets no torch, and its answers are those of Python."""

from __future__ import annotations

import concurrent.futures
import ctypes
import dataclasses
import json
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import nn

import x86quant
from tests.isa import LEVELS, has
from tests.lowering.test_lowering import stock
from tests.quantization.test_recommenders import (
    ROWS,
    TABLES,
    ByNumber,
    Plain,
    Weighted,
    all_stacked,
    lower_triangle,
    program_of,
    weighted,
)
from tests.runtime.test_stages import CACHE, Narrowing
from x86quant.quantization import outcome
from x86quant.runtime import parts
from x86quant.serving.program_file import sealed

OK, BAD_ARGUMENT, CANNOT_READ, DAMAGED, WRONG_VERSION, MALFORMED, CPU, WRONG_SHAPE = range(8)


class ServedTensor(ctypes.Structure):
    """``x86quant_tensor``."""

    _fields_ = [
        ("type", ctypes.c_int32),
        ("rank", ctypes.c_int32),
        ("sizes", ctypes.c_int64 * 8),
        ("data", ctypes.c_void_p),
        ("bytes", ctypes.c_uint64),
    ]

    @classmethod
    def of(cls, array: npt.NDArray[Any]) -> ServedTensor:
        assert array.flags.c_contiguous
        sizes = (ctypes.c_int64 * 8)(*array.shape)
        kind = {"float32": 0, "uint8": 1, "int32": 2, "int64": 3}[array.dtype.name]
        return cls(kind, array.ndim, sizes, array.ctypes.data, array.nbytes)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.sizes[: self.rank])


class Options(ctypes.Structure):
    """``x86quant_options``."""

    _fields_ = [
        ("threads", ctypes.c_int32),
        ("isa", ctypes.c_char_p),
        ("cache", ctypes.c_char_p),
    ]


class RefusedError(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(str(x86quant.cpp_paths().library))
    library.x86quant_error.restype = ctypes.c_char_p
    for name in ("plans", "inputs", "outputs"):
        getattr(library, f"x86quant_{name}").restype = ctypes.c_size_t
    library.x86quant_isa.restype = ctypes.c_char_p
    return library


class Served:
    """A loaded program file."""

    def __init__(
        self, path: Path, threads: int = 1, isa: str | None = None, cache: Path | None = None
    ) -> None:
        self.library = _library()
        self.program = ctypes.c_void_p()
        texts = [None if text is None else str(text).encode() for text in (isa, cache)]
        options = Options(threads, *texts)
        name = str(path).encode()
        self._check(
            self.library.x86quant_load(name, ctypes.byref(options), ctypes.byref(self.program))
        )

    def __del__(self) -> None:
        self.library.x86quant_free(self.program)

    def _check(self, status: int) -> None:
        if status != OK:
            raise RefusedError(status, self.library.x86quant_error().decode())

    @property
    def isa(self) -> str:
        return self.library.x86quant_isa(self.program).decode()

    @property
    def plans(self) -> int:
        return int(self.library.x86quant_plans(self.program))

    def sizes_of(self, plan: int, index: int) -> tuple[int, ...]:
        """Of an input."""
        found = ServedTensor()
        at = ctypes.c_size_t(plan), ctypes.c_size_t(index)
        self._check(self.library.x86quant_input(self.program, *at, ctypes.byref(found)))
        return found.shape

    def __call__(
        self, *inputs: torch.Tensor, missing: int = 0, cut: int | None = None
    ) -> list[torch.Tensor]:
        """The outputs, each in memory that is smaller by ``missing`` bytes than it should be.

        Of input ``cut`` a byte is not there.
        """
        arrays = [np.ascontiguousarray(x.numpy()) for x in inputs]
        given = (ServedTensor * len(arrays))(*map(ServedTensor.of, arrays))
        if cut is not None:
            given[cut].bytes -= 1
        plan = ctypes.c_size_t()
        find = self.library.x86quant_find
        self._check(find(self.program, given, ctypes.c_size_t(len(arrays)), ctypes.byref(plan)))
        count = self.library.x86quant_outputs(self.program)
        results = (ServedTensor * count)()
        memory = []
        for i, result in enumerate(results):
            self._check(
                self.library.x86quant_output(
                    self.program, plan, ctypes.c_size_t(i), ctypes.byref(result)
                )
            )
            dtype = np.float32 if result.type == 0 else np.uint8
            memory.append(np.empty(result.shape, dtype))
            result.data, result.bytes = memory[-1].ctypes.data, result.bytes - missing
        self._check(self.library.x86quant_run(
            self.program, given, ctypes.c_size_t(len(arrays)), results, ctypes.c_size_t(count)
        ))  # fmt: skip
        return [torch.from_numpy(m) for m in memory]


class Branches(nn.Module):
    """Concatenation, pools, upsampling, a residual; an image and a vector come out."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, stride=2, padding=1), nn.ReLU())
        self.depthwise = nn.Conv2d(16, 16, 3, padding=1, groups=16)
        self.point = nn.Sequential(nn.Conv2d(16, 16, 1), nn.Hardswish())
        self.pool = nn.MaxPool2d(3, 2, 1)
        self.up = nn.Upsample(scale_factor=2)
        self.head = nn.Linear(32, 5)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.stem(x)
        y = self.point(self.depthwise(x)) + x
        z = torch.cat([self.up(self.pool(y)), x], 1)
        return z, self.head(z.mean((2, 3)))


class Both(nn.Module):
    """Two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(12, 8), nn.Linear(6, 8)
        self.top = nn.Linear(8, 4)

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return self.top(torch.relu(self.left(a) + self.right(b)))


def _quantized(model: nn.Module, *inputs: torch.Tensor) -> nn.Module:
    batches = [inputs, tuple(x + 0.5 for x in inputs)]
    return x86quant.quantize(
        model.eval(), batches if len(inputs) > 1 else [b[0] for b in batches], mode="static",
        speed_check=False, progress=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def branches() -> nn.Module:
    torch.manual_seed(0)
    return _quantized(Branches(), torch.randn(2, 3, 16, 16))


SHAPES = ((1, 3, 16, 16), (8, 3, 16, 16), (1, 3, 24, 16))


@pytest.fixture(scope="module")
def file(branches: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("programs") / "branches.xq"
    x86quant.export_program(branches, path, [torch.zeros(shape) for shape in SHAPES])
    return path


def _same(actual: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> bool:
    return len(actual) == len(expected) and all(
        a.shape == e.shape and torch.equal(a, e) for a, e in zip(actual, expected, strict=True)
    )


@pytest.mark.parametrize("level", LEVELS)
def test_the_answers_are_those_of_python_at_every_level(
    level: str, branches: nn.Module, file: Path
) -> None:
    if not has(level):
        pytest.skip(f"this CPU has no {level}")
    served = Served(file, isa=level)
    assert served.isa == level
    for shape in SHAPES:
        x = torch.randn(shape)
        assert _same(served(x), branches(x))


def test_threads_and_callers_change_nothing(branches: nn.Module, file: Path) -> None:
    served = Served(file, threads=3)
    inputs = [torch.randn(SHAPES[i % 3]) for i in range(60)]
    expected = [branches(x) for x in inputs]
    assert all(map(_same, map(served, inputs), expected))
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert all(map(_same, pool.map(served, inputs), expected))


def recommender() -> nn.Module:
    batch = torch.randn(64, 4), torch.randint(0, ROWS, (64, TABLES))
    model = Plain(lower_triangle).eval()
    return x86quant.quantize(model, [batch], speed_check=False, progress=False)


def test_two_inputs_in_the_order_of_the_model(tmp_path: Path) -> None:
    torch.manual_seed(0)
    a, b = torch.randn(3, 12), torch.randn(3, 6)
    module = _quantized(Both(), a, b)
    x86quant.export_program(module, tmp_path / "both.xq", [{"b": b, "a": a}])
    served = Served(tmp_path / "both.xq")
    assert _same(served(a, b), [module(a, b)])
    with pytest.raises(RefusedError, match="takes 2 inputs, got 1"):
        served(a)


def test_a_recommender_with_its_tables(tmp_path: Path) -> None:
    module = recommender()
    dense, indices = torch.randn(9, 4), torch.randint(0, ROWS, (9, TABLES))
    calls = [(dense, indices), (dense[:2], indices[:2])]
    x86quant.export_program(module, tmp_path / "dlrm.xq", calls)
    served = Served(tmp_path / "dlrm.xq", threads=2)
    for call in calls:
        assert _same(served(*call), [module(*call)])
    wrong = indices.clone()
    wrong[3, 1] = ROWS
    with pytest.raises(RefusedError, match=r"tables\.1: index 50 at position 3") as caught:
        served(dense, wrong)
    assert caught.value.status == BAD_ARGUMENT
    assert _same(served(*calls[0]), [module(*calls[0])])
    with pytest.raises(RefusedError, match=r"no plan for float32 \[9, 4\], int32 \[9, 5\]"):
        served(dense, indices.int())


def test_wrong_indices_and_offsets_of_a_program_are_said(tmp_path: Path) -> None:
    """By table and position; nothing outside the tables is read, and the next call is right."""
    model = ByNumber(lower_triangle).eval()
    dense, offsets, indices = all_stacked(8)  # 16 indices a table, in bags of any number
    batches = [all_stacked(8) for _ in range(2)]
    module = x86quant.quantize(model, batches, speed_check=False, progress=False)
    x86quant.export_program(module, tmp_path / "dlrm.xq", [(dense, offsets, indices)])
    served = Served(tmp_path / "dlrm.xq")
    want = served(dense, offsets, indices)
    assert _same(want, [module(dense, offsets, indices)])
    for value in (ROWS, -1, 2**40, -(2**40)):
        wrong = indices.clone()
        wrong[2, 5] = value
        text = rf"tables\.2: index {value} at position 5 is not in 0\.\.{ROWS - 1}"
        with pytest.raises(RefusedError, match=text):
            served(dense, offsets, wrong)
    starts = torch.arange(0, 16, 2)
    beyond = "is less than the one before it, or beyond the 16 indices"
    for at, value, text in (
        (0, 1, "offsets must start with 0, got 1"),
        (4, 3, f"offset 4 {beyond}: 3"),
        (7, 17, f"offset 7 {beyond}: 17"),
        (3, -1, f"offset 3 {beyond}: -1"),
    ):
        wrong = starts.repeat(TABLES, 1)
        wrong[1, at] = value
        with pytest.raises(RefusedError, match=rf"tables\.1: {text}"):
            served(dense, wrong, indices)
    empty = torch.zeros(TABLES, 8, dtype=torch.int64)  # all but the last bag
    assert _same(served(dense, empty, indices), [module(dense, empty, indices)])
    others = offsets[:, :7], indices[:, 1:]
    for call in (
        (dense, others[0], indices), (dense[:7], offsets, indices), (dense, offsets, others[1]),
    ):  # fmt: skip
        with pytest.raises(RefusedError, match="no plan for float32"):
            served(*call)
    assert _same(served(dense, offsets, indices), want)


def _flat(call: tuple[Any, ...]) -> list[torch.Tensor]:
    """The inputs of a program: those of a call, one by one."""
    dense, *lists = call
    return [dense, *(x for one in lists for x in one)]


@pytest.mark.parametrize("bits", [None, 4])
def test_lists_of_any_number_of_indices_and_weights(
    bits: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # All of it in int8, though ranges of so few random weights do not hold.
    monkeypatch.setattr(outcome, "_good_enough", lambda choices, model: (choices, model))
    model = Weighted(lower_triangle).eval()
    batches = [weighted() for _ in range(3)]
    module = x86quant.quantize(
        model, batches, embedding_bits=bits, speed_check=False, progress=False
    )
    calls = [weighted(samples) for samples in (9, 9, 9, 2)]
    flat = [_flat(call) for call in calls]
    program = program_of(module)
    x86quant.export_program(program, tmp_path / "dlrm.xq", [flat[0], flat[1], flat[3]])
    served = Served(tmp_path / "dlrm.xq", threads=2)
    assert served.plans == 2  # one for 9 samples, whatever the numbers of indices
    assert [served.sizes_of(0, at) for at in (0, 1)] == [(9, 4), (-1,)]
    for own, call in zip(flat, calls, strict=True):
        assert _same(served(*own), [module(*call)])
    none = list(flat[3])
    for at, empty in ((2, 0), (12, 0)):  # indices and weights of the second table
        none[at] = none[at][:empty]
    none[7] = torch.zeros_like(none[7])
    assert _same(served(*none), list(program(*none)))
    for at, text in (
        (1, rf"tables\.0: there are {len(flat[0][1])} per_sample_weights for"),
        (13, rf"tables\.2: there are {len(flat[0][13]) - 1} per_sample_weights for"),
    ):
        wrong = list(flat[0])
        wrong[at] = wrong[at][:-1]
        with pytest.raises(RefusedError, match=text) as caught:
            served(*wrong)
        assert caught.value.status == BAD_ARGUMENT
    for at, value in ((1, flat[0][1].int()), (1, flat[0][1][:, None]), (0, flat[0][0][:3])):
        wrong = list(flat[0])
        wrong[at] = value
        with pytest.raises(RefusedError, match=r"no plan for .* float32 \[9, 4\], int64 \[any\]"):
            served(*wrong)
    with pytest.raises(RefusedError, match=r"input 1 takes \d+ bytes, got \d+"):
        served(*flat[0], cut=1)
    assert _same(served(*flat[0]), [module(*calls[0])])


class Tagger(nn.Module):
    """A recurrent layer between two linears."""

    def __init__(self, kind: type[nn.LSTM | nn.GRU]) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(20, 16), nn.Linear(48, 5)
        self.rnn = kind(16, 24, num_layers=2, bidirectional=True, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.rnn(self.first(x))[0])


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_layers_at_every_level(kind: type[nn.LSTM | nn.GRU], tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = _quantized(Tagger(kind), torch.randn(3, 9, 20))
    inputs = [torch.randn(3, 9, 20), torch.randn(1, 4, 20)]
    x86quant.export_program(module, tmp_path / "tagger.xq", inputs)
    for level in filter(has, LEVELS):
        served = Served(tmp_path / "tagger.xq", threads=2, isa=level)
        for x in inputs:
            assert _same(served(x), [module(x)])


class Streaming(nn.Module):
    """A recurrent layer that goes on from what it gave for the last call."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(16, 24, proj_size=8), nn.Linear(8, 5)

    def forward(
        self, x: torch.Tensor, h: torch.Tensor, c: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        out, (h, c) = self.rnn(x, (h, c))
        return self.head(out), h, c


def test_a_sequence_in_several_calls(tmp_path: Path) -> None:
    torch.manual_seed(0)
    call = torch.randn(4, 3, 16), torch.randn(1, 3, 8), torch.randn(1, 3, 24)
    module = _quantized(Streaming(), *call)
    x86quant.export_program(module, tmp_path / "streaming.xq", [call])
    for level in filter(has, LEVELS):
        served, states = Served(tmp_path / "streaming.xq", isa=level), list(call[1:])
        for _ in range(3):
            expected = module(call[0], *states)
            assert _same(served(call[0], *states), expected)
            states = [x.detach() for x in expected[1:]]


def test_a_shape_without_a_plan_is_told_with_those_there_are(file: Path) -> None:
    with pytest.raises(RefusedError) as caught:
        Served(file)(torch.zeros(2, 3, 16, 16))
    assert caught.value.status == WRONG_SHAPE
    for shape in ((2, 3, 16, 16), *SHAPES):
        assert f"float32 [{', '.join(map(str, shape))}]" in str(caught.value)
    with pytest.raises(RefusedError, match=r"no plan for uint8 \[1, 3, 16, 16\]"):
        Served(file)(torch.zeros(1, 3, 16, 16, dtype=torch.uint8))


def test_memory_that_is_too_small_is_not_written(file: Path) -> None:
    with pytest.raises(RefusedError, match=r"output 0 takes \d+ bytes, got \d+"):
        Served(file)(torch.zeros(SHAPES[0]), missing=1)


def test_the_library_needs_neither_python_nor_torch() -> None:
    listed = subprocess.run(
        ["ldd", str(x86quant.cpp_paths().library)], capture_output=True, text=True, check=True
    ).stdout
    # Their names alone: addresses behind them are hexadecimal, and may spell c10.
    names = " ".join(line.split()[0] for line in listed.splitlines())
    assert "libstdc++" in names
    assert not any(name in names for name in ("torch", "python", "c10", "gomp"))


def test_the_paths_name_the_header_and_the_library() -> None:
    paths = x86quant.cpp_paths()
    assert (paths.include / "x86quant" / "runtime.h").is_file()
    assert paths.library.is_file()
    command = [sys.executable, "-m", "x86quant", "cpp", "--cflags", "--libs"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert said == [*paths.cflags.split(), *paths.libs.split()]


# ------------------------------------------------------------------------ what is not exported


class Softmaxed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.last = nn.Conv2d(4, 8, 3), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.erfinv(0.5 * self.conv(x).mean((2, 3)).tanh()))


def test_float_steps_are_named(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 4, 8, 8)
    module = _quantized(Softmaxed(), x)
    with pytest.raises(x86quant.UnsupportedError, match=r"erfinv.*serve it from Python"):
        x86quant.export_program(module, tmp_path / "no.xq", [x])
    assert not (tmp_path / "no.xq").exists()


def test_what_cannot_be_exported_is_said(branches: nn.Module, tmp_path: Path) -> None:
    path, x = tmp_path / "no.xq", torch.zeros(SHAPES[0])
    with pytest.raises(x86quant.UnsupportedError, match="compiled as a whole, got Linear"):
        x86quant.export_program(nn.Linear(3, 3), path, [x])
    with pytest.raises(x86quant.InvalidInputError, match="an example of inputs for each"):
        x86quant.export_program(branches, path, [])
    with pytest.raises(x86quant.InvalidInputError, match="not empty"):
        x86quant.export_program(branches, path, [x[:0]])
    with pytest.raises(x86quant.InvalidInputError, match="rank 4"):
        x86quant.export_program(branches, path, [x[0]])
    with pytest.raises(x86quant.InvalidInputError, match="no folder"):
        x86quant.export_program(branches, tmp_path / "nowhere" / "no.xq", [x])


# ------------------------------------------------------------------------ the packed cache


def test_packed_weights_are_kept_for_the_next_load(
    branches: nn.Module, file: Path, tmp_path: Path
) -> None:
    cache, x = tmp_path / "branches.xq.packed", torch.randn(SHAPES[0])
    assert _same(Served(file, cache=cache)(x), branches(x))
    written = cache.stat()
    assert _same(Served(file, cache=cache, threads=3)(x), branches(x))
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
    assert not _same(Served(file, cache=cache)(x), branches(x))


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
        other = _changed(file, tmp_path / "other.xq", lambda manifest: manifest.update(more=1))
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
    assert _same(Served(file, cache=cache, isa=level)(x), branches(x))
    if spoiled != "head":  # which one layer notices, not the file
        assert cache.stat().st_ino != before  # written anew
    assert cache.stat().st_mode & 0o777 == 0o600


def test_a_cache_that_cannot_be_written_is_done_without(
    branches: nn.Module, file: Path, tmp_path: Path
) -> None:
    x = torch.randn(SHAPES[0])
    for cache in (tmp_path / "nowhere" / "packed", tmp_path, Path("/dev/null/packed")):
        assert _same(Served(file, cache=cache)(x), branches(x))


# ------------------------------------------------------------------------ bad files


def _changed(file: Path, to: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """``file`` with another manifest, and the checksum of that."""
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    head, _, text = header["__metadata__"]["x86quant"].partition("\n")
    manifest = json.loads(text)
    change(manifest)
    header["__metadata__"]["x86quant"] = f"{head}\n{json.dumps(manifest)}"
    new = json.dumps(header).encode()
    to.write_bytes(sealed(len(new).to_bytes(8, "little") + new + data[8 + length :]))
    return to


def test_a_file_sealed_again_runs(branches: nn.Module, file: Path, tmp_path: Path) -> None:
    """So that what the next tests see refused is refused for the change alone."""
    same = _changed(file, tmp_path / "same.xq", lambda manifest: None)
    x = torch.randn(SHAPES[0])
    assert _same(Served(same)(x), branches(x))


@pytest.mark.parametrize("kept", [0, 7, 8, 100, 0.5, -1])
def test_a_truncated_file_is_refused(kept: float, file: Path, tmp_path: Path) -> None:
    data = file.read_bytes()
    end = int(len(data) * kept) if isinstance(kept, float) else kept
    (tmp_path / "cut.xq").write_bytes(data[:end])
    with pytest.raises(RefusedError) as caught:
        Served(tmp_path / "cut.xq")
    assert caught.value.status == DAMAGED


def test_every_changed_byte_is_seen(file: Path, tmp_path: Path) -> None:
    data = bytearray(file.read_bytes())
    for at in range(0, len(data), 97):
        data[at] ^= 1
        (tmp_path / "bad.xq").write_bytes(data)
        data[at] ^= 1
        with pytest.raises(RefusedError) as caught:
            Served(tmp_path / "bad.xq")
        assert caught.value.status in (DAMAGED, WRONG_VERSION)


def test_other_files_are_refused(file: Path, tmp_path: Path) -> None:
    for path, status in (
        (tmp_path, CANNOT_READ),
        (tmp_path / "none", CANNOT_READ),
        (Path(__file__), DAMAGED),
    ):
        with pytest.raises(RefusedError) as caught:
            Served(path)
        assert caught.value.status == status
    newer = file.read_bytes().replace(b"x86quant-program 4 ", b"x86quant-program 5 ")
    (tmp_path / "newer.xq").write_bytes(newer)
    with pytest.raises(RefusedError, match="format version 5, and this library reads version 4"):
        Served(tmp_path / "newer.xq")


def test_a_level_that_the_cpu_lacks_is_refused(file: Path) -> None:
    with pytest.raises(RefusedError, match='does not reach the level "avx1024"; it reaches avx2'):
        Served(file, isa="avx1024")


def _first(plan: dict[str, Any], kind: str) -> dict[str, Any]:
    return next(step["fields"] for step in _steps(plan) if step["kind"] == kind)


def _steps(plan: dict[str, Any]) -> list[dict[str, Any]]:
    return [step for stage in plan["stages"] for step in stage["steps"]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m["plans"][0].update(arena=64), "reaches bytes"),
        (lambda m: m["plans"][0].update(arena=-1), "negative sizes"),
        (lambda m: m["plans"][0].update(arena=1 << 62), "not enough memory|malformed|impossible"),
        (lambda m: m.update(plans=[]), "no plan"),
        (lambda m: m.pop("packs"), 'lacks "packs"'),
        (lambda m: _first(m["plans"][0], "quantize")["a"].__setitem__(1, -4), "reaches bytes -4"),
        (lambda m: _first(m["plans"][0], "quantize")["a"].__setitem__(0, 9), "no base 9"),
        (lambda m: _first(m["plans"][0], "quantize")["a"].__setitem__(0, -1), "no base -1"),
        (lambda m: _first(m["plans"][0], "conv")["in"].__setitem__(4, 1 << 60), "impossible sizes"),
        (lambda m: _first(m["plans"][0], "conv")["out"].__setitem__(10, 1 << 20), "reaches bytes"),
        (lambda m: _first(m["plans"][0], "conv")["pack"].update(pack=99), "no pack 99"),
        (lambda m: _first(m["plans"][0], "conv").update(pack=3), "takes packed weights, got Int"),
        (lambda m: m["packs"][0].update(weight="t99"), "no tensor t99"),
        (lambda m: m["packs"][0]["geometry"].__setitem__(12, 0), "refuses this convolution"),
        (lambda m: m["packs"][0]["geometry"].__setitem__(12, 1 << 40), "number of groups"),
        (lambda m: m["packs"][0]["codes"].__setitem__(0, 256), "refused"),
        (lambda m: _steps(m["plans"][0])[0].update(kind="rm"), 'no kind of step "rm"'),
        (lambda m: m["plans"][0]["inputs"][0]["sizes"].__setitem__(0, 0), "impossible"),
        (lambda m: m["plans"][0]["inputs"][0]["strides"].__setitem__(3, 1 << 61), "impossible"),
    ],
)  # fmt: skip
def test_an_impossible_plan_is_refused(
    change: Callable[[dict[str, Any]], object], message: str, file: Path, tmp_path: Path
) -> None:
    bad = _changed(file, tmp_path / "bad.xq", change)
    with pytest.raises(RefusedError, match=message):
        Served(bad)(torch.zeros(SHAPES[0]))


def _open_beside_kept(plan: dict[str, Any]) -> None:
    """An input of any size, whose size would lie where steps look for what is kept."""
    plan["inputs"].append({"sizes": [-1], "strides": [1], "type": "int64"})
    for stage in plan["stages"]:
        stage["parts"] = None


@pytest.fixture(scope="module")
def staged(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, Path]:
    """A network whose batches run in stages, and its program file."""
    path = tmp_path_factory.mktemp("programs") / "staged.xq"
    here = dataclasses.replace(parts.cpu(), l2=CACHE)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(parts, "cpu", lambda: here)
        torch.manual_seed(0)
        x = torch.randn(2, 3, 32, 32)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # stock PyTorch's own
            module = x86quant.compile(stock(Narrowing(), x), (x,))
        x86quant.export_program(module, path, [torch.zeros(n, 3, 32, 32) for n in (8, 16)])
    return module, path


@pytest.mark.parametrize("threads", [1, 2])
def test_plans_in_stages_give_the_same(
    threads: int, staged: tuple[nn.Module, Path], tmp_path: Path
) -> None:
    module, file = staged
    served = Served(file, threads=threads)
    for batch in (8, 16):
        x = torch.randn(batch, 3, 32, 32)
        assert _same(served(x), module(x))
    seen: list[dict[str, Any]] = []
    _changed(file, tmp_path / "same.xq", lambda manifest: seen.extend(manifest["plans"]))
    assert all(len(plan["stages"]) > 1 and plan["kept"] for plan in seen)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: p["kept"].__setitem__(0, p["kept"][0] - 1), "reaches bytes"),
        (lambda p: p["kept"].__setitem__(0, -1), "impossible sizes"),
        (lambda p: p["kept"].__setitem__(0, (1 << 63) - 1), "impossible sizes"),
        (lambda p: p["kept"].pop(), "parts of a plan are malformed"),
        (lambda p: p["stages"][0]["parts"].update(times=9), "reaches bytes"),
        (lambda p: p["stages"][1]["parts"].update(times=1 << 62), "malformed|reaches bytes"),
        (lambda p: p["stages"][1]["parts"]["bytes"].pop(), "parts of a plan are malformed"),
        (lambda p: p["stages"][1]["parts"]["bytes"].__setitem__(-1, -64), "malformed"),
        (lambda p: p.pop("stages"), 'lacks "stages"'),
        (lambda p: p["stages"][1].pop("parts"), 'lacks "parts"'),
        (_open_beside_kept, "parts of a plan are malformed"),
    ],
)  # fmt: skip
def test_impossible_stages_are_refused(
    change: Callable[[dict[str, Any]], object],
    message: str,
    staged: tuple[nn.Module, Path],
    tmp_path: Path,
) -> None:
    bad = _changed(staged[1], tmp_path / "bad.xq", lambda m: change(m["plans"][0]))
    with pytest.raises(RefusedError, match=message):
        Served(bad)


@pytest.fixture(scope="module")
def bags_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("programs") / "bags.xq"
    model = Weighted(lower_triangle).eval()
    batches = [weighted() for _ in range(3)]
    module = x86quant.quantize(model, batches, speed_check=False, progress=False)
    x86quant.export_program(program_of(module), path, [_flat(weighted(4))])
    return path


def _lookup(manifest: dict[str, Any]) -> dict[str, Any]:
    return _first(manifest["plans"][0], "lookup")


def _input(manifest: dict[str, Any], index: int) -> dict[str, Any]:
    return manifest["plans"][0]["inputs"][index]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: _lookup(m).update(count0=_lookup(m)["count1"]), "the size of another input"),
        (lambda m: _lookup(m).update(weight_count0=_lookup(m)["count0"]), "of another input"),
        (lambda m: _lookup(m)["count0"].__setitem__(0, 1), "the size of another input"),
        (lambda m: _lookup(m)["count0"].__setitem__(1, 1 << 40), "the size of another input"),
        (lambda m: _lookup(m)["indices0"].__setitem__(1, 8), "does not begin where its input does"),
        (lambda m: _lookup(m)["indices0"].__setitem__(0, 0), "no input of any size at base 0"),
        (lambda m: _lookup(m)["indices0"].__setitem__(0, 17), "no input of any size at base 17"),
        (lambda m: _lookup(m)["indices0"].__setitem__(0, 1), "not like this"),
        (lambda m: _lookup(m)["table0"].__setitem__(11, 4), "not like this"),
        (lambda m: _input(m, 1).update(type="int32"), "not like this"),
        (lambda m: _input(m, 1).update(sizes=[8]), "not like this"),
        (lambda m: _input(m, 1).update(strides=[2]), "impossible sizes"),
        (lambda m: _input(m, 1).update(sizes=[-1, 2], strides=[2, 1]), "impossible sizes"),
        (lambda m: _input(m, 1).update(sizes=[-2]), "impossible sizes"),
        (lambda m: _lookup(m).pop("count0"), "reaches bytes"),
        (lambda m: m["plans"][0]["outputs"][0].update(sizes=[-1], strides=[1]), "has no size"),
    ],
)  # fmt: skip
def test_impossible_inputs_of_any_size_are_refused(
    change: Callable[[dict[str, Any]], object], message: str, bags_file: Path, tmp_path: Path
) -> None:
    Served(bags_file)(*_flat(weighted(4)))
    with pytest.raises(RefusedError, match=message):
        Served(_changed(bags_file, tmp_path / "bad.xq", change))


@pytest.fixture(scope="module")
def tagger_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("programs") / "tagger.xq"
    x86quant.export_program(_quantized(Tagger(nn.LSTM), TAGGED), path, [TAGGED])
    return path


TAGGED = torch.linspace(-1, 1, 540).view(3, 9, 20)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.pop("row_packs"), 'lacks "row_packs"'),
        (lambda m: m["row_packs"].pop(), "no pack 8"),
        (lambda m: m["row_packs"][0].update(activation="x"), 'no activation "x"'),
        (lambda m: m["row_packs"][0].update(linears=[]), "has 0 linears"),
        (lambda m: m["row_packs"][0]["linears"][0].update(weight="t99"), "no tensor t99"),
        (lambda m: m["row_packs"][0]["linears"].append(m["row_packs"][1]["linears"][0]),
         "gate and up must have one shape"),
        (lambda m: _linear(m).update(scale=_linear(m)["weight"]), "takes a scale, or"),
        (lambda m: _linear(m).update(weight=_linear(m)["scale"]), "takes an int8 weight"),
        (lambda m: _recurrent(m).update(units=25), "has weights of other sizes"),
        (lambda m: _recurrent(m).update(steps=1000), "reaches bytes|writes over"),
        (lambda m: _recurrent(m).update(sequences=1 << 40), "is not a size"),
        (lambda m: _recurrent(m).update(h_zp=256), "is no code"),
        (lambda m: _recurrent(m).update(hidden0=3), "takes packed weights of rows, got Int"),
        (lambda m: _recurrent(m)["x"].__setitem__(1, -64), "reaches bytes -64|writes over"),
        (lambda m: _quantize(m)["a"].__setitem__(1, 2), "does not lie at whole elements of 4"),
    ],
)  # fmt: skip
def test_an_impossible_recurrent_layer_is_refused(
    change: Callable[[dict[str, Any]], object], message: str, tagger_file: Path, tmp_path: Path
) -> None:
    bad = _changed(tagger_file, tmp_path / "bad.xq", change)
    with pytest.raises(RefusedError, match=message):
        Served(bad)(TAGGED)


def _recurrent(manifest: dict[str, Any]) -> dict[str, Any]:
    return _first(manifest["plans"][0], "recurrent")


def _quantize(manifest: dict[str, Any]) -> dict[str, Any]:
    return _first(manifest["plans"][0], "quantize")


def _linear(manifest: dict[str, Any]) -> dict[str, Any]:
    return manifest["row_packs"][0]["linears"][0]
