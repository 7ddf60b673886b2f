"""What a C program may ask of a loaded program, and what it is refused."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.serving.served import (
    BAD_ARGUMENT,
    OK,
    SHAPES,
    WRONG_SHAPE,
    Served,
    ServedTensor,
    branches,
    file,
)

__all__ = ["branches", "file"]


def _size(value: int) -> ctypes.c_size_t:
    return ctypes.c_size_t(value)


class Raw:
    """A program with two outputs, and a call of it that is right, of which all can be changed."""

    def __init__(self, file: Path) -> None:
        self.served = Served(file)
        self.x = np.zeros(SHAPES[0], np.float32)
        self.inputs = (ServedTensor * 1)(ServedTensor.of(self.x))
        self.outputs = (ServedTensor * 2)()
        for i in range(2):
            assert self.described("output", 0, i) == OK
            self.outputs[i] = self.found
        self.memory = [np.zeros(one.bytes, np.uint8) for one in self.outputs]
        for one, memory in zip(self.outputs, self.memory, strict=True):
            one.data = memory.ctypes.data

    def described(self, kind: str, plan: int, index: int, program: object = ...) -> int:
        self.found = ServedTensor()
        ask = getattr(self.served.library, f"x86quant_{kind}")
        of = self.served.program if program is ... else program
        return int(ask(of, _size(plan), _size(index), ctypes.byref(self.found)))

    def run(self, counts: Sequence[int] = (1, 2)) -> int:
        first, second = map(_size, counts)
        run = self.served.library.x86quant_run
        return int(run(self.served.program, self.inputs, first, self.outputs, second))

    @property
    def said(self) -> str:
        return self.served.library.x86quant_error().decode()


@pytest.fixture
def raw(file: Path) -> Raw:
    made = Raw(file)
    assert made.run() == OK
    return made


@pytest.mark.parametrize(("kind", "count"), [("input", 1), ("output", 2)])
def test_what_is_not_there_is_not_described(raw: Raw, kind: str, count: int) -> None:
    plans = len(SHAPES)
    assert raw.described(kind, plans - 1, count - 1) == OK
    for plan, index in ((plans, 0), (0, count), (plans, count), (2**64 - 1, 0), (0, 2**64 - 1)):
        assert raw.described(kind, plan, index) == BAD_ARGUMENT
        assert f"there is no plan {plan} with an {kind} {index}" in raw.said
    assert raw.described(kind, 0, 0, program=None) == BAD_ARGUMENT
    ask = getattr(raw.served.library, f"x86quant_{kind}")
    assert ask(raw.served.program, _size(0), _size(0), None) == BAD_ARGUMENT


def test_places_for_answers_are_needed(raw: Raw) -> None:
    library, program = raw.served.library, raw.served.program
    assert library.x86quant_find(program, raw.inputs, _size(1), None) == BAD_ARGUMENT
    assert library.x86quant_find(None, raw.inputs, _size(1), ctypes.byref(_size(0))) == BAD_ARGUMENT
    assert library.x86quant_run(None, raw.inputs, _size(1), raw.outputs, _size(2)) == BAD_ARGUMENT
    assert library.x86quant_load(None, None, ctypes.byref(ctypes.c_void_p())) == BAD_ARGUMENT
    assert library.x86quant_load(b"a", None, None) == BAD_ARGUMENT


@pytest.mark.parametrize(("inputs", "outputs"), [(0, 2), (2, 2), (1, 0), (1, 1), (1, 3)])
def test_other_counts_are_refused(raw: Raw, inputs: int, outputs: int) -> None:
    assert raw.run((inputs, outputs)) == BAD_ARGUMENT
    wrong = f"takes 1 inputs, got {inputs}" if inputs != 1 else f"has 2 outputs, got {outputs}"
    assert wrong in raw.said


def test_no_tensors_at_all_are_refused(raw: Raw) -> None:
    run, program = raw.served.library.x86quant_run, raw.served.program
    assert run(program, None, _size(1), raw.outputs, _size(2)) == BAD_ARGUMENT
    assert "takes 1 inputs, got 0" in raw.said
    assert run(program, raw.inputs, _size(1), None, _size(2)) == BAD_ARGUMENT
    assert "has 2 outputs, got 0" in raw.said


@pytest.mark.parametrize(("rank", "kind"), [(-1, 0), (9, 0), (4, -1), (4, 17)])
def test_tensors_of_no_kind_are_refused(raw: Raw, rank: int, kind: int) -> None:
    raw.inputs[0].rank, raw.inputs[0].type = rank, kind
    assert raw.run() == BAD_ARGUMENT
    assert f"input 0 has rank {rank} and type {kind}" in raw.said


@pytest.mark.parametrize(("rank", "kind"), [(0, 0), (3, 0), (8, 0), (4, 1)])
def test_tensors_of_another_kind_are_refused(raw: Raw, rank: int, kind: int) -> None:
    raw.inputs[0].rank, raw.inputs[0].type = rank, kind
    assert raw.run() == WRONG_SHAPE


def test_memory_that_is_not_given_has_no_bytes(raw: Raw) -> None:
    raw.outputs[1].data = None
    assert raw.run() == BAD_ARGUMENT
    assert "output 1 takes 20 bytes, got 0" in raw.said
    raw.inputs[0].data = None
    assert raw.run() == BAD_ARGUMENT
    assert f"input 0 takes {raw.x.nbytes} bytes, got 0" in raw.said


def test_results_lie_over_nothing_else(raw: Raw) -> None:
    """Not by a byte; side by side they may lie."""
    first, second = raw.outputs
    for inside in (first.data, first.data + first.bytes - 1, first.data - second.bytes + 1):
        second.data = inside
        assert raw.run() == BAD_ARGUMENT
        assert "output 1 lies over output 0" in raw.said
    room = np.zeros(2 * raw.x.nbytes, np.uint8)
    room[: raw.x.nbytes] = raw.x.view(np.uint8).reshape(-1)
    raw.inputs[0].data, second.data = room.ctypes.data, room.ctypes.data + raw.x.nbytes
    assert raw.run() == OK
    second.data -= 1
    assert raw.run() == BAD_ARGUMENT
    assert "output 1 lies over input 0" in raw.said
