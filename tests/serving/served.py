"""Program files run by the C++ library through its C interface."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import nn

import x86quant
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
    """A loaded program file.

    Attributes:
        results: the memory of the last call's outputs, also where it was refused.
    """

    results: list[npt.NDArray[Any]]

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
        memory = self.results = []
        for i, result in enumerate(results):
            self._check(
                self.library.x86quant_output(
                    self.program, plan, ctypes.c_size_t(i), ctypes.byref(result)
                )
            )
            dtype = np.float32 if result.type == 0 else np.uint8
            memory.append(np.full(result.shape, 7, dtype))  # what another program left there
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


def quantized(model: nn.Module, *inputs: torch.Tensor) -> nn.Module:
    batches = [inputs, tuple(x + 0.5 for x in inputs)]
    return x86quant.quantize(
        model.eval(), batches if len(inputs) > 1 else [b[0] for b in batches], mode="static",
        speed_check=False, progress=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def branches() -> nn.Module:
    torch.manual_seed(0)
    return quantized(Branches(), torch.randn(2, 3, 16, 16))


SHAPES = ((1, 3, 16, 16), (8, 3, 16, 16), (1, 3, 24, 16))


@pytest.fixture(scope="module")
def file(branches: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("programs") / "branches.xq"
    x86quant.export_program(branches, path, [torch.zeros(shape) for shape in SHAPES])
    return path


def are_same(actual: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> bool:
    return len(actual) == len(expected) and all(
        a.shape == e.shape and torch.equal(a, e) for a, e in zip(actual, expected, strict=True)
    )


def flattened(call: tuple[Any, ...]) -> list[torch.Tensor]:
    """The inputs of a program: those of a call, one by one."""
    dense, *lists = call
    return [dense, *(x for one in lists for x in one)]


class Tagger(nn.Module):
    """A recurrent layer between two linears."""

    def __init__(self, kind: type[nn.LSTM | nn.GRU]) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(20, 16), nn.Linear(48, 5)
        self.rnn = kind(16, 24, num_layers=2, bidirectional=True, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.rnn(self.first(x))[0])


def changed(file: Path, to: Path, change: Callable[[dict[str, Any]], object]) -> Path:
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
