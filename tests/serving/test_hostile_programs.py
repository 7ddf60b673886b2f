"""Program files made to get outside of their memory: each is refused, or keeps to it."""

from __future__ import annotations

import itertools
import operator
import random
import re
import struct
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import x86quant
from tests.cpp import program
from tests.program_files import attempts, layout, plan, write
from tests.serving.served import RefusedError, Served
from tests.step_files import (
    ARENA,
    BYTES,
    STEPS,
    WRITTEN,
    addresses,
    copy_step,
    kind_of,
    placed,
    step_file,
)
from x86quant import extension

ONE = [layout([1], "float32")]


# ------------------------------------------------------------------------ files that got out once


def _pointwise(channels: int, stride: tuple[int, int]) -> dict[str, Any]:
    """A convolution of one tap, and its tensors."""
    weights = {"w": torch.ones(32, channels, 1, 1, 1, dtype=torch.int8), "m": torch.ones(32)}
    pack = {
        "weight": "w", "mult": "m", "bias": None, "lut": None, "slopes": None,
        "codes": [0, 0, 0, 255, 0, 0],
        "geometry": [1, 1, 1, 1, *stride, 0, 0, 0, 1, 1, 1, 1, 0], "res_mult": 0.0,
    }  # fmt: skip
    return {"tensors": weights, "packs": [pack]}


@pytest.mark.parametrize(
    "stride", [(2**30, 2**29), (256, 256), (2048, 2048), (8192, 8192), (2**31 - 1, 2**31 - 1)]
)
def test_a_stride_of_any_size_takes_the_memory_of_a_pixel(
    stride: tuple[int, int], tmp_path: Path
) -> None:
    """Its copy of the input has what the one tap reads; 4 GB were taken at a stride of 8192."""
    for channels in (8, 32, 64):
        fields = {
            "pack": {"pack": 0}, "in": [1, 0, 1, 1, 1, 1, *[channels] * 5],
            "out": [2, 0, 1, 1, 1, 1, *[32] * 5],
        }  # fmt: skip
        outer = layout([channels], "uint8"), layout([32], "uint8")
        steps = [plan(64, outer[:1], outer[1:], [("conv", fields)])]
        file = write(tmp_path / f"{channels}.xq", steps, **_pointwise(channels, stride))
        assert attempts([file], megabytes=1024) == ["ran; ran"]


def test_a_lookup_cannot_write_over_its_indices(tmp_path: Path) -> None:
    """They are compared with the number of rows in blocks, and read behind that."""
    table = torch.frombuffer(bytearray(struct.pack("<qq", 2**36, 2**36)), dtype=torch.uint8)
    fields = {
        "bags": 4, "tables": 1, "last_offset": False, "rows0": {"table": "t"}, "strides0": [1, 1],
        "table0": [1, 16, 4, 32, 0, 0, 0, 0, -1, 1, 4, 8], "indices0": [0, 0], "out": [0, 0],
        "out_stride": 4,
    }  # fmt: skip
    steps = [copy_step((1, 0), (0, 0), 64), ("lookup", fields), copy_step((0, 0), (2, 0), 4)]
    plans = [plan(64, [layout([8], "int64")], ONE, steps)]
    (said,) = attempts([write(tmp_path / "lookup.xq", plans, {"t": table[None]})])
    assert '"lookup" of a plan writes over what it reads' in said


def test_tokens_cannot_be_gathered_over_their_starts(tmp_path: Path) -> None:
    fields = {
        "batch": 2, "tokens": 1, "features": 6, "starts": [0, 0], "x": [0, 128], "out": [0, 0],
        "places": [0, 4096],
    }  # fmt: skip
    plans = [plan(ARENA, BYTES, ONE, [copy_step((1, 0), (0, 0), ARENA), ("gather_tokens", fields)])]
    (said,) = attempts([write(tmp_path / "gather.xq", plans)])
    assert '"gather_tokens" of a plan writes over what it reads' in said


def test_a_plan_cannot_write_to_its_inputs(tmp_path: Path) -> None:
    plans = [plan(64, BYTES, ONE, [copy_step((0, 0), (1, 0), 16), copy_step((0, 0), (2, 0), 4)])]
    (said,) = attempts([write(tmp_path / "input.xq", plans)])
    assert "writes to input 0" in said


def _places(offset: int, sizes: Sequence[int], strides: Sequence[int]) -> set[int]:
    steps = itertools.product(*map(range, sizes))
    return {offset + sum(map(operator.mul, step, strides)) for step in steps}


def _moved(sizes: list[int], source: list[Any], to: list[Any]) -> dict[str, Any]:
    """A plan of one copy within the arena, of single bytes, and another that writes the output."""
    fields = {
        "element_size": 1, "sizes": sizes, "from": [0, source[0]], "to": [0, to[0]],
        "from_strides": source[1], "to_strides": to[1],
    }  # fmt: skip
    return plan(256, BYTES, ONE, [("strided_copy", fields), copy_step((0, 0), (2, 0), 4)])


def test_a_copy_that_runs_reads_no_byte_that_it_writes(tmp_path: Path) -> None:
    """Of random places, many of which lie among each other: a refusal may be careful, a run not."""
    rng, files, shared = random.Random(0), [], []
    for number in range(600):
        sizes = [rng.choice([1, 2, 2, 3, 4]) for _ in range(rng.randint(1, 3))]
        step = rng.choice([4, 6, 8, 12])
        ends = []
        for _ in range(2):
            strides = [rng.choice([0, 1, 1, 2, 3, step, step, 2 * step, -1, -step]) for _ in sizes]
            ends.append([100 + rng.randint(0, 2 * step), strides])
        files.append(write(tmp_path / f"{number}.xq", [_moved(sizes, *ends)]))
        source, to = (_places(offset, sizes, strides) for offset, strides in ends)
        shared.append(bool(source & to))
    said = attempts(files)
    assert set(said) == {
        "ran; ran",
        next(text for text in said if "writes over what it reads" in text),
    }
    assert not [
        file
        for file, text, one in zip(files, said, shared, strict=True)
        if text == "ran; ran" and one
    ]
    # Neither all nor nothing is refused, which would be no test of the other.
    assert 100 < said.count("ran; ran") < 500
    assert sum(shared) > 100


@pytest.mark.parametrize(
    ("sizes", "source", "to"),
    [
        ([4], [0, [2]], [1, [2]]),  # every other byte, and those between
        ([4, 3], [0, [8, 1]], [3, [8, 1]]),  # channels 0 to 2 and 3 to 5 of eight
        ([4, 3], [5, [8, 1]], [0, [8, 1]]),
        ([4, 3], [0, [8, 1]], [5, [8, 1]]),  # up to the last byte of a step
        ([3, 4, 2], [0, [32, 8, 1]], [2, [64, 8, 1]]),  # of steps that hold each other
        ([4, 3], [26, [-8, -1]], [3, [8, 1]]),  # backwards, from bytes 0 to 2 of a step
        ([4], [0, [1]], [4, [1]]),  # one behind the other
        ([4], [4, [1]], [0, [1]]),
    ],
)
def test_slices_that_lie_among_each_other_are_copied(
    sizes: list[int], source: list[Any], to: list[Any], tmp_path: Path
) -> None:
    """As concatenations do; none shares a byte."""
    assert not _places(source[0], sizes, source[1]) & _places(to[0], sizes, to[1])
    assert attempts([write(tmp_path / "a.xq", [_moved(sizes, source, to)])]) == ["ran; ran"]


def test_a_pool_of_impossible_height_is_refused(tmp_path: Path) -> None:
    """The product of both heights leaves 64 bits."""
    height = 2**33
    fields = {
        "a": [0, 0, 1, 1, height, 1, 1, 0, 0, 1, 1], "out": [2, 0, 1, 1, 2**31, 1, 1, 0, 0, 0, 1],
        "a_zp": 0, "a_mult": 1.0, "out_zp": 0,
    }  # fmt: skip
    outer = [layout([1], "uint8")]
    plans = [plan(height, outer, outer, [("adaptive_avg_pool", fields)])]
    (said,) = attempts([write(tmp_path / "pool.xq", plans)])
    assert "impossible sizes" in said


@pytest.mark.parametrize("base", [-1, 3, 2**32 + 1, 2**32 - 1, 2**31])
def test_a_base_that_there_is_not_is_refused(base: int, tmp_path: Path) -> None:
    """Also one whose lower half is that of the input."""
    plans = [plan(64, BYTES, ONE, [copy_step((base, 0), (2, 0), 4)])]
    (said,) = attempts([write(tmp_path / "base.xq", plans)])
    assert f"no base {base}" in said


@pytest.mark.parametrize(
    "steps", [[], [copy_step((1, 0), (2, 0), 3)]], ids=["none", "all but a byte"]
)
def test_an_output_that_no_step_writes_is_refused(steps: list[Any], tmp_path: Path) -> None:
    """What lies there may be what another program left."""
    plans = [plan(64, BYTES, ONE, [copy_step((1, 0), (0, 0), 8), *steps])]
    (said,) = attempts([write(tmp_path / "unwritten.xq", plans)])
    assert "no step of a plan writes all of output 0" in said


def test_parts_of_a_batch_cannot_write_over_each_others_indices(tmp_path: Path) -> None:
    """Each part reads places from its piece of an output, on which another one may be at work."""
    take = {
        "batch": 1, "tokens": 1, "taken": 1, "features": 1, "x": [1, 0], "out": [3, 0],
        "places": [2, 0],
    }  # fmt: skip
    outputs = [layout([2], "int64"), layout([2], "float32")]
    steps = [copy_step((1, 0), (2, 0), 8), ("take_tokens", take)]
    plans = [plan(64, BYTES, outputs, steps, {"times": 2, "bytes": [8, 8, 4]})]
    (said,) = attempts([write(tmp_path / "parts.xq", plans)])
    assert "a part of a plan writes over what says where another one reads" in said
    # Places right behind, or before, what is written are nobody's to change.
    outputs[0] = layout([4], "int64")
    for at, places in ((0, 16), (16, 0)):
        steps = [copy_step((1, 0), (2, at), 8)] * 2 + [
            ("take_tokens", {**take, "places": [2, places]})
        ]
        plans = [plan(64, BYTES, outputs, steps, {"times": 2, "bytes": [8, 8, 4]})]
        assert attempts([write(tmp_path / "beside.xq", plans)]) == ["ran; ran"]


def test_sums_beyond_32_bits_are_refused(tmp_path: Path) -> None:
    """Python sends such a layer to torch; a file that somebody else wrote may hold one."""
    for count, message in ((65_793, "ran; ran"), (70_000, "do not fit 32 bits")):
        made = _pointwise(count, (1, 1))
        made["tensors"]["w"].fill_(-128)
        fields = {
            "pack": {"pack": 0}, "in": [1, 0, 1, 1, 1, 1, *[count] * 5],
            "out": [2, 0, 1, 1, 1, 1, *[32] * 5],
        }  # fmt: skip
        outer = [layout([count], "uint8")], [layout([32], "uint8")]
        said = attempts([write(tmp_path / "k.xq", [plan(64, *outer, [("conv", fields)])], **made)])
        assert message in said[0]


# Each a form of a step, fields that are changed, and what is said.
_BEYOND: dict[str, tuple[str, dict[str, Any], str]] = {
    # Numbers of each row were written when it was loaded: gigabytes.
    "a scale of many rows": ("rows, of one scale", {"rows": 2**30}, "reaches bytes|writes over"),
    "many steps of many": ("recurrent", {"steps": 2**18, "sequences": 2**12}, "writes over"),
    # What all indices or keys take that lie in one place of memory.
    "one index": ("lookup", {"table1": [9, 8, 4, 8, 0, 4, 1, 1, -1, 2**33, 3 * 2**33, 4],
                             "strides1": [0, 0]}, "repeats one index without end"),
    "one key": ("attention, causal", {"keys": 2**33, "k_strides": [0, 0, 0],
                                      "v_strides": [0, 0, 0]}, "are one and the same"),
    "one value": ("attention, causal", {"keys": 2**17, "k_strides": [0, 4, 0],
                                        "v_strides": [0, 0, 0]}, "are one and the same"),
    "one key held": ("cached_attention", {"keys_strides": [64, 32, 0]}, "over each other"),
    "one value held": ("cached_attention, of floats", {"values_strides": [64, 32, 0]},
                       "over each other"),
    # Sums that left 64 bits.
    "sentences": ("gather_tokens", {"batch": 2**63 - 1, "tokens": 1}, "no number of sentences"),
    "bags": ("lookup", {"bags": 2**63 - 1, "last_offset": True}, "no number of bags"),
}  # fmt: skip


@pytest.mark.parametrize("name", _BEYOND)
def test_what_a_plan_has_no_memory_for_is_not_taken(name: str, tmp_path: Path) -> None:
    form, changes, why = _BEYOND[name]
    file = step_file(tmp_path / "beyond.xq", form, {**placed(form), **changes})
    (said,) = attempts([file], megabytes=1024)
    assert re.search(why, said), said


@pytest.mark.parametrize(
    ("steps", "parts", "wanted"),
    [
        # As many bytes as the output has, one of them again and again.
        ([copy_step((1, 0), (2, 1), 4, to_stride=0)], None, [0, 4, 0, 0]),
        ([copy_step((1, 0), (2, 0), 2), copy_step((1, 2), (2, 0), 2)], None, [3, 4, 0, 0]),
        ([copy_step((1, 0), (2, 0), 2)], {"times": 2, "bytes": [2, 0]}, None),
        # All of it, from two sides, and some of it twice.
        ([copy_step((1, 0), (2, 2), 2), copy_step((1, 2), (2, 0), 2)], None, [3, 4, 1, 2]),
        ([copy_step((1, 0), (2, 1), 1), copy_step((1, 0), (2, 0), 4)], None, [1, 2, 3, 4]),
        ([copy_step((1, 0), (2, 0), 2)], {"times": 2, "bytes": [2, 2]}, [1, 2, 3, 4]),
    ],
)  # fmt: skip
def test_what_no_step_writes_of_an_output_is_zero(
    steps: list[Any], parts: dict[str, Any] | None, wanted: list[int] | None, tmp_path: Path
) -> None:
    """What lay there may be what another program left."""
    four = [layout([4], "uint8")]
    file = write(tmp_path / "some.xq", [plan(64, four, four, steps, parts)])
    (found,) = Served(file)(torch.tensor([1, 2, 3, 4], dtype=torch.uint8))
    if wanted is not None:
        assert found.tolist() == wanted
    else:  # the parts run in any order
        assert found.tolist() in ([1, 2, 0, 0], [3, 4, 0, 0])


def _looked_up(tables: int, rows: int, dim: int) -> dict[str, Any]:
    """A lookup of one bag in many tables that are the same tensor, their index the first input."""
    fields: dict[str, Any] = {"bags": 1, "tables": tables, "last_offset": False}
    for i in range(tables):
        fields |= {
            f"table{i}": [rows, dim + 8, dim, 8, 0, dim, 0, 0, -1, 1, 1, 8],
            f"rows{i}": {"table": "t"}, f"strides{i}": [1, 1], f"indices{i}": [1, 0],
        }  # fmt: skip
    return fields


def test_a_tensor_that_many_steps_read_is_copied_once(tmp_path: Path) -> None:
    """Each copied it: a file of a megabyte took gigabytes when it was loaded."""
    table = torch.zeros(2**16, 16, dtype=torch.uint8)
    fields = {**_looked_up(3000, 2**16, 8), "out": [2, 0], "out_stride": 24_000}
    ends = [layout([1], "int64")], [layout([24_000], "float32")]
    file = write(tmp_path / "many.xq", [plan(64, *ends, [("lookup", fields)])], {"t": table})
    (said,) = attempts([file], megabytes=1024)
    assert said.startswith("ran; "), said


@pytest.mark.parametrize("rows", [True, False])
def test_packs_that_share_weights_take_what_a_file_accounts_for(rows: bool, tmp_path: Path) -> None:
    """Each packs them for itself: some do share them, thousands do not."""
    made = _pointwise(1024, (1, 1))
    tensors = {**made["tensors"], "rw": torch.ones(512, 2048, dtype=torch.int8)}
    tensors |= {"w": torch.ones(32, 2**15, 1, 1, 1, dtype=torch.int8), "s": torch.ones(512)}
    linear = {"linears": [{"weight": "rw", "scale": "s", "bias": None}], "activation": ""}
    plans = [plan(64, ONE, ONE, [copy_step((1, 0), (2, 0), 4)])]
    for count, wanted in ((20, "ran; ran"), (3000, "would take more than 64 times its size")):
        packs = ([], [linear] * count) if rows else (made["packs"] * count, [])
        (said,) = attempts([write(tmp_path / "p.xq", plans, tensors, *packs)], megabytes=1024)
        assert wanted in said, said


def test_a_recurrence_takes_no_more_than_a_plan_has(tmp_path: Path) -> None:
    """Its units are projected to so little that a plan has next to nothing of them."""
    units, sequences = 1024, 2**20
    tensors = {
        "gates": torch.ones(4 * units, 1, dtype=torch.int8), "down": torch.ones(1, units).char(),
        "gate_scales": torch.ones(4 * units), "scale": torch.ones(1),
    }  # fmt: skip
    packs = [
        {"linears": [{"weight": weight, "scale": scale, "bias": None}], "activation": ""}
        for weight, scale in (("gates", "gate_scales"), ("down", "scale"))
    ]
    fields = {
        "lstm": True, "batch_first": False, "steps": 1, "sequences": sequences, "features": 1,
        "units": units, "input0": {"row_pack": 0}, "hidden0": {"row_pack": 0},
        "projection0": {"row_pack": 1}, "x": [1, 0], "out": [2, 0], "x_scale": 1.0, "x_zp": 3,
        "h_scale": 1.0, "h_zp": 3, "h_mult": 1.0,
    }  # fmt: skip
    for count, wanted in ((sequences, '"units" are more'), (64, "ran; ran")):
        ends = [layout([count], "uint8")], [layout([count], "uint8")]
        steps = [("recurrent", {**fields, "sequences": count})]
        file = write(tmp_path / "r.xq", [plan(64, *ends, steps)], tensors, [], packs)
        (said,) = attempts([file], megabytes=1024)
        assert wanted in said, said


def test_columns_look_at_no_longer_a_line_than_there_is_memory_for(tmp_path: Path) -> None:
    """Columns so far apart, in so wide a border, that four billion windows make one result."""
    wide = {"padding": [0, 1, 2**31 - 1], "columns": 4, "apart": (2**32 - 1) // 3}
    file = step_file(tmp_path / "c.xq", "conv_columns", {**placed("conv_columns"), **wide})
    (said,) = attempts([file], megabytes=1024)
    assert "look at too long a line" in said, said


@pytest.mark.parametrize(
    ("tables", "dim"), [(100, 2**16), (3000, 8)], ids=["floats before", "products behind"]
)
def test_an_interaction_takes_no_more_than_a_plan_has(
    tables: int, dim: int, tmp_path: Path
) -> None:
    """The rows of all tables of a block, and all of their products, of which few are wanted."""
    fields = _looked_up(tables, 1, dim)
    fields |= {
        "dense": [2, 0], "dense_stride": dim, "places": [0], "a_mult": 1.0, "out_zp": 3,
        "out": [3, 0], "out_stride": dim + 1,
    }  # fmt: skip
    ends = [layout([1], "int64"), layout([dim], "float32")], [layout([dim + 1], "uint8")]
    table = torch.zeros(1, dim + 8, dtype=torch.uint8)
    plans = [plan(64, *ends, [("lookup", fields)])]
    (said,) = attempts([write(tmp_path / "i.xq", plans, {"t": table})])
    assert '"tables" are more than interact' in said, said


# ------------------------------------------------------------------------ what others left


def test_an_arena_holds_nothing_that_another_file_left(tmp_path: Path) -> None:
    """Programs of a process share arenas, and a file could return what lies in its own."""
    size = 1 << 15
    ends = [layout([size], "uint8")]
    keeps = [copy_step((1, 0), (0, 0), size), copy_step((0, 0), (2, 0), size)]
    tells = [copy_step((0, 0), (2, 0), size)]
    first = Served(write(tmp_path / "a.xq", [plan(size, ends, ends, keeps)]))
    others = [
        Served(write(tmp_path / f"{arena}.xq", [plan(arena, ends, ends, tells)]))
        for arena in (size, 2 * size)
    ]
    given = torch.full((size,), 9, dtype=torch.uint8)
    for other in (*others, *others):
        assert first(given)[0].equal(given)
        assert other(given)[0].equal(torch.zeros(size, dtype=torch.uint8))


_COUNTED = {
    "rows": 2, "features": 2, "x": [3, 0], "norm": 1, "eps": 0.5, "normed": [4, 0], "count": [1, 0]
}  # fmt: skip
_GATHERED = {
    "batch": 2, "tokens": 1, "features": 2, "starts": [1, 0], "x": [3, 0], "out": [4, 0],
    "places": [2, 0],
}  # fmt: skip
_ATTENDED = {
    "batch": 2, "queries": 1, "keys": 1, "heads": 1, "kv_heads": 1, "size": 2, "q": [3, 0],
    "k": [3, 0], "v": [3, 0], "q_strides": [2, 2, 2], "k_strides": [2, 2, 2],
    "v_strides": [2, 2, 2], "out": [4, 0], "causal": False, "scale": 1.0, "starts": [1, 0],
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "fields"),
    [("rows", _COUNTED), ("gather_tokens", _GATHERED), ("attention", _ATTENDED)],
)
def test_rows_that_a_step_leaves_out_are_zero(
    kind: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    """How many it writes shows in a run: no more than the first row here, or none."""
    inputs = [layout([3], "int64"), layout([2], "int64"), layout([2, 2], "float32")]
    plans = [plan(64, inputs, [layout([2, 2], "float32")], [(kind, fields)])]
    served = Served(write(tmp_path / "some.xq", plans))
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    for starts in ([0, 0, 0], [1, 0, 0]) if kind == "rows" else ([0, 0, 0], [0, 1, 1]):
        (found,) = served(torch.tensor(starts), torch.tensor([0, 1]), x)
        assert found[1].tolist() == [0, 0]
        assert found[0].tolist() == [0, 0] or any(starts)


@pytest.mark.parametrize(
    ("steps", "parts", "wanted"),
    [
        # Another output is returned before it is written, or where a part has not written yet.
        ([copy_step((2, 0), (3, 0), 4), copy_step((1, 0), (2, 0), 4)], None, 0),
        ([copy_step((1, 0), (2, 0), 4), copy_step((2, 0), (3, 0), 4)], None, 1),
        ([copy_step((2, 0), (3, 0), 2), copy_step((1, 0), (2, 0), 2)], [2, 2, 2], 0),
        ([copy_step((1, 0), (2, 0), 2), copy_step((2, 0), (3, 0), 2)], [2, 2, 2], 1),
        ([copy_step((1, 0), (2, 0), 2, 2), copy_step((2, 1), (3, 0), 2)], [2, 1, 2], None),
    ],
)  # fmt: skip
def test_an_output_is_read_once_it_is_written(
    steps: list[Any], parts: list[int] | None, wanted: int | None, tmp_path: Path
) -> None:
    four = [layout([4], "uint8")]
    times = None if parts is None else {"times": 2, "bytes": parts}
    served = Served(write(tmp_path / "read.xq", [plan(64, four, four * 2, steps, times)]))
    x = torch.tensor([1, 2, 3, 4], dtype=torch.uint8)
    written, copied = served(x)
    assert 7 not in [*written.tolist(), *copied.tolist()]
    if wanted is not None:  # else the parts write between each other's bytes, and run in any order
        assert written.equal(x)
        assert copied.equal(wanted * x)


@pytest.mark.parametrize(
    ("steps", "parts"),
    [
        ([copy_step((1, 0), (3, 0), 4), copy_step((1, 0), (4, 0), 4)], None),
        ([copy_step((1, 0), (3, 0), 4), copy_step((3, 0), (4, 0), 4)], None),
        ([copy_step((1, 0), (3, 0), 2), copy_step((3, 0), (4, 0), 2)], [2, 0, 2, 2]),
    ],
    ids=["written", "written and read", "written and read by parts"],
)  # fmt: skip
def test_outputs_that_are_surely_written_are_not_cleared(
    steps: list[Any], parts: list[int] | None, tmp_path: Path
) -> None:
    """That would take time in each run; what shows it is a run that fails before them."""
    fails = "take_tokens", {
        "batch": 1, "tokens": 1, "features": 1, "taken": 1, "x": [0, 0], "out": [0, 8],
        "places": [2, 0],
    }  # fmt: skip
    four = [layout([4], "uint8")]
    inputs = [*four, layout([1], "int64")]
    times = None if parts is None else {"times": 2, "bytes": parts}
    made = [plan(64, inputs, four * 2, [fails, *steps], times)]
    served = Served(write(tmp_path / "sure.xq", made))
    x = torch.tensor([1, 2, 3, 4], dtype=torch.uint8)
    with pytest.raises(RefusedError, match="of 1 tokens there is no number 5"):
        served(x, torch.tensor([5]))
    assert [result.tolist() for result in served.results] == [[7] * 4] * 2
    assert [result.tolist() for result in served(x, torch.tensor([0]))] == [[1, 2, 3, 4]] * 2


def test_gaps_of_an_output_are_none_of_its_bytes(tmp_path: Path) -> None:
    """Bytes between its elements are written, and not all of these."""
    spread = {"sizes": [2], "strides": [2], "type": "float32"}
    one = [layout([1], "float32")]
    steps = [copy_step((1, 0), (2, 0), 4), copy_step((1, 0), (2, 4), 4)]
    served = Served(write(tmp_path / "gaps.xq", [plan(64, one, [spread], steps)]))
    for _ in range(3):  # of memory that was there before
        assert served(torch.ones(1))[0].tolist() == [1, 0]


# ------------------------------------------------------------------------ every kind of step

_EXTREMES = (
    -1, 0, 1, 7, 2**15, 2**31 - 1, 2**31, 2**32, 2**46, 2**61, 2**62, 2**63 - 1, -(2**63), -(2**31)
)  # fmt: skip


def test_every_kind_of_step_is_here() -> None:
    """Each takes all its fields as they are, so that what is refused below is so for its change."""
    extension.load()
    assert set(map(kind_of, STEPS)) == set(extension.native().step_kinds())


@pytest.mark.parametrize("kind", STEPS)
def test_a_step_keeps_to_its_memory_whatever_its_fields_say(kind: str, tmp_path: Path) -> None:
    """Each number of each field replaced by extremes, each address by each other one."""
    right = placed(kind)
    files = [step_file(tmp_path / "right.xq", kind, right)]
    over = set()
    for number, (change, fields) in enumerate(_changes(kind, right)):
        files.append(step_file(tmp_path / f"{number}-{change}.xq", kind, fields))
    for number, (name, fields) in enumerate(_overlaps(kind, right)):
        files.append(step_file(tmp_path / f"over-{number}-{name}.xq", kind, fields))
        over.add(files[-1])
    said = dict(zip(files, attempts(files, megabytes=4096), strict=True))
    # An arena of zeros may hold bad sizes of sentences, but nothing impossible.
    first = said[files[0]]
    assert "a plan" not in first, first
    assert "ran" in first, first
    assert len(over) > 0
    assert not [
        path.name for path in over if "of a plan writes over what it reads" not in said[path]
    ]
    assert not [path.name for path, text in said.items() if "AN INPUT WAS CHANGED" in text]


def _changes(kind: str, right: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, field in right.items():
        numbers = field if isinstance(field, list) else [field]
        for index, number in enumerate(numbers):
            if type(number) is not int:
                continue
            for extreme in _EXTREMES:
                changed = [*numbers[:index], extreme, *numbers[index + 1 :]]
                yield name, {**right, name: changed if isinstance(field, list) else extreme}
        if name not in addresses(kind):
            yield name, {other: value for other, value in right.items() if other != name}


def _overlaps(kind: str, right: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """What the step writes, over each other tensor of it."""
    for name in WRITTEN.get(kind_of(kind), {"out"}) & right.keys():
        for other in addresses(kind):
            if other != name:
                yield name, {**right, name: [*right[other][:2], *right[name][2:]]}


def _zero_points() -> list[tuple[str, str]]:
    """Each form of a step with each of its fields that is a zero point."""
    return [
        (form, name)
        for form, fields in STEPS.items()
        for name in fields
        if name.endswith("_zp") or name == "zero_point_of_all"
    ]


@pytest.mark.parametrize(("form", "name"), _zero_points())
def test_a_zero_point_that_is_no_code_is_refused(form: str, name: str, tmp_path: Path) -> None:
    """By the one reader of them, so that no kind of step has to know."""
    right = placed(form)
    wrong = (-1, 256, 259, 2**32 + 3)
    files = [
        step_file(tmp_path / f"{number}.xq", form, {**right, name: number})
        for number in (0, 255, *wrong)
    ]
    least, most, *said = attempts(files)
    assert "a plan" not in least + most, (least, most)
    assert said == [
        f'x86quant: step "{kind_of(form)}" of a plan: field "{name}" is no code: {number}'
        ": the file's content is impossible"
        for number in wrong
    ]


@pytest.mark.parametrize("number", range(6))
def test_codes_of_a_convolution_are_codes(number: int, tmp_path: Path) -> None:
    """Zero points and bounds of its weights; the fifth says whether there is a residual."""
    for wrong in (-1, 256):
        weights = _pointwise(32, (1, 1))
        weights["packs"][0]["codes"][number] = wrong
        (said,) = attempts([write(tmp_path / "conv.xq", [plan(64, BYTES, ONE, [])], **weights)])
        assert "convolution's" in said or "native kernel" in said or number == 4, said


@pytest.mark.parametrize(
    ("slopes", "said"),
    [
        (torch.ones(31), "one float slope an output channel"),
        (torch.ones(32, dtype=torch.int8), "one float slope an output channel"),
        (torch.full((32,), float("inf")), "a slope of a convolution is not finite"),
    ],
)
def test_slopes_of_a_convolution_are_one_a_channel(
    slopes: torch.Tensor, said: str, tmp_path: Path
) -> None:
    weights = _pointwise(32, (1, 1))
    weights["tensors"]["s"] = slopes
    weights["packs"][0]["slopes"] = "s"
    (told,) = attempts([write(tmp_path / "conv.xq", [plan(64, BYTES, ONE, [])], **weights)])
    assert said in told


# ------------------------------------------------------------------------ random changes


def test_random_changes_of_a_file_are_refused_or_harmless(tmp_path: Path) -> None:
    """Some seeds of tools/sanitize_serving.py, without the sanitizers."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(72, 4)).eval()
    x = torch.randn(2, 3, 8, 8)
    module = x86quant.quantize(model, [(x,)], mode="static", speed_check=False, progress=False)
    file = tmp_path / "model.xq"
    x86quant.export_program(module, file, [x])
    fuzz = Path(__file__).parent / "fuzz" / "fuzz.cpp"
    fuzzer = program(tmp_path, fuzz, ["serving/crc32.cpp"], x86quant.cpp_paths())
    done = subprocess.run([fuzzer, file, "0", "300"], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("300 changed files: ")


@pytest.mark.parametrize(
    "starts",
    [
        (1, 2, 3),
        (0, 9, 9),
        (0, 2, 1),
        (0, 1, 2**62),
        (0, -8162823121651344054, 1506812620914253237),  # whose difference has no 64 bits
    ],
)
@pytest.mark.parametrize(
    "form",
    [
        form
        for form, fields in STEPS.items()
        if "starts" in fields and "starts" not in WRITTEN.get(kind_of(form), ())
    ],
)
def test_sentences_lie_one_behind_another(
    form: str, starts: tuple[int, ...], tmp_path: Path
) -> None:
    fields = placed(form)
    given = bytearray(ARENA)
    struct.pack_into("<3q", given, fields["starts"][1], *starts)
    served = Served(step_file(tmp_path / "sentences.xq", form, fields))
    with pytest.raises(RefusedError, match="do not lie one behind another"):
        served(torch.frombuffer(given, dtype=torch.uint8))
