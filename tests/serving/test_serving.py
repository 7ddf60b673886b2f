"""Program files, run by the C++ library: it gets no torch, and its answers are those of Python."""

from __future__ import annotations

import concurrent.futures
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import x86quant
from tests.isa import LEVELS, has
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
from tests.serving.served import (
    BAD_ARGUMENT,
    SHAPES,
    WRONG_SHAPE,
    RefusedError,
    Served,
    Tagger,
    are_same,
    branches,
    file,
    flattened,
    quantized,
)
from x86quant.quantization import outcome

__all__ = ["branches", "file"]


class Both(nn.Module):
    """Two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(12, 8), nn.Linear(6, 8)
        self.top = nn.Linear(8, 4)

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return self.top(torch.relu(self.left(a) + self.right(b)))


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
        assert are_same(served(x), branches(x))


def test_threads_and_callers_change_nothing(branches: nn.Module, file: Path) -> None:
    served = Served(file, threads=3)
    inputs = [torch.randn(SHAPES[i % 3]) for i in range(60)]
    expected = [branches(x) for x in inputs]
    assert all(map(are_same, map(served, inputs), expected))
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert all(map(are_same, pool.map(served, inputs), expected))


def recommender() -> nn.Module:
    batch = torch.randn(64, 4), torch.randint(0, ROWS, (64, TABLES))
    model = Plain(lower_triangle).eval()
    return x86quant.quantize(model, [batch], speed_check=False, progress=False)


def test_slopes_of_channels(tmp_path: Path) -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.PReLU(8), nn.Conv2d(8, 8, 3, groups=8), nn.LeakyReLU(0.2),
        nn.Conv2d(8, 4, 1),
    )  # fmt: skip
    model[1].weight.data = torch.linspace(-0.5, 1.5, 8)
    x = torch.randn(2, 3, 9, 9)
    module = quantized(model.eval(), x)
    x86quant.export_program(module, tmp_path / "model.xq", [(x,)])
    assert are_same(Served(tmp_path / "model.xq")(x), [module(x)])


def test_two_inputs_in_the_order_of_the_model(tmp_path: Path) -> None:
    torch.manual_seed(0)
    a, b = torch.randn(3, 12), torch.randn(3, 6)
    module = quantized(Both(), a, b)
    x86quant.export_program(module, tmp_path / "both.xq", [{"b": b, "a": a}])
    served = Served(tmp_path / "both.xq")
    assert are_same(served(a, b), [module(a, b)])
    with pytest.raises(RefusedError, match="takes 2 inputs, got 1"):
        served(a)


def test_a_video(tmp_path: Path) -> None:
    """Steps over tensors of five dimensions, each of another size."""
    layers = (nn.Conv3d(3, 8, (2, 3, 3), padding=1), nn.ReLU(), nn.MaxPool3d((1, 2, 2)))
    model = nn.Sequential(*layers, nn.Conv3d(8, 4, (3, 1, 2))).eval()
    x = torch.randn(2, 3, 4, 6, 10)
    module = x86quant.quantize(model, [(x,)], mode="static", speed_check=False, progress=False)
    x86quant.export_program(module, tmp_path / "video.xq", [x])
    assert are_same(Served(tmp_path / "video.xq")(x), [module(x)])


def test_a_recommender_with_its_tables(tmp_path: Path) -> None:
    module = recommender()
    dense, indices = torch.randn(9, 4), torch.randint(0, ROWS, (9, TABLES))
    calls = [(dense, indices), (dense[:2], indices[:2])]
    x86quant.export_program(module, tmp_path / "dlrm.xq", calls)
    served = Served(tmp_path / "dlrm.xq", threads=2)
    for call in calls:
        assert are_same(served(*call), [module(*call)])
    wrong = indices.clone()
    wrong[3, 1] = ROWS
    with pytest.raises(RefusedError, match=r"tables\.1: index 50 at position 3") as caught:
        served(dense, wrong)
    assert caught.value.status == BAD_ARGUMENT
    assert are_same(served(*calls[0]), [module(*calls[0])])
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
    assert are_same(want, [module(dense, offsets, indices)])
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
    assert are_same(served(dense, empty, indices), [module(dense, empty, indices)])
    others = offsets[:, :7], indices[:, 1:]
    for call in (
        (dense, others[0], indices), (dense[:7], offsets, indices), (dense, offsets, others[1]),
    ):  # fmt: skip
        with pytest.raises(RefusedError, match="no plan for float32"):
            served(*call)
    assert are_same(served(dense, offsets, indices), want)


@pytest.mark.parametrize("bits", [None, 4])
def test_lists_of_any_number_of_indices_and_weights(
    bits: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # All of it in int8, though ranges of so few random weights do not hold.
    monkeypatch.setattr(outcome, "good_enough", lambda choices, model, **_: (choices, model))
    model = Weighted(lower_triangle).eval()
    batches = [weighted() for _ in range(3)]
    module = x86quant.quantize(
        model, batches, embedding_bits=bits, speed_check=False, progress=False
    )
    calls = [weighted(samples) for samples in (9, 9, 9, 2)]
    flat = [flattened(call) for call in calls]
    program = program_of(module)
    x86quant.export_program(program, tmp_path / "dlrm.xq", [flat[0], flat[1], flat[3]])
    served = Served(tmp_path / "dlrm.xq", threads=2)
    assert served.plans == 2  # one for 9 samples, whatever the numbers of indices
    assert [served.sizes_of(0, at) for at in (0, 1)] == [(9, 4), (-1,)]
    for own, call in zip(flat, calls, strict=True):
        assert are_same(served(*own), [module(*call)])
    none = list(flat[3])
    for at, empty in ((2, 0), (12, 0)):  # indices and weights of the second table
        none[at] = none[at][:empty]
    none[7] = torch.zeros_like(none[7])
    assert are_same(served(*none), list(program(*none)))
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
    assert are_same(served(*flat[0]), [module(*calls[0])])


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_layers_at_every_level(kind: type[nn.LSTM | nn.GRU], tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = quantized(Tagger(kind), torch.randn(3, 9, 20))
    inputs = [torch.randn(3, 9, 20), torch.randn(1, 4, 20)]
    x86quant.export_program(module, tmp_path / "tagger.xq", inputs)
    for level in filter(has, LEVELS):
        served = Served(tmp_path / "tagger.xq", threads=2, isa=level)
        for x in inputs:
            assert are_same(served(x), [module(x)])


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
    module = quantized(Streaming(), *call)
    x86quant.export_program(module, tmp_path / "streaming.xq", [call])
    for level in filter(has, LEVELS):
        served, states = Served(tmp_path / "streaming.xq", isa=level), list(call[1:])
        for _ in range(3):
            expected = module(call[0], *states)
            assert are_same(served(call[0], *states), expected)
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
    module = quantized(Softmaxed(), x)
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
