"""The runtime: plans, memory, views, threads, and every op's native form against the plain one."""

from __future__ import annotations

import concurrent.futures
import copy
import dataclasses
import io
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.ao.quantization import get_default_qconfig_mapping
from torch.ao.quantization.quantize_fx import convert_to_reference_fx
from torch.fx import Interpreter

import x86quant
from tests import isa
from tests.lowering.test_lowering import IMAGE, MODELS, Convolutions, Residual, stock
from tests.op_checks import check_ops
from x86quant import extension
from x86quant.compiled import CompiledModule
from x86quant.errors import ExtensionError, X86QuantWarning
from x86quant.kernels import graph_kernels
from x86quant.runtime import Plan, parts
from x86quant.runtime.native_forms import FORMS
from x86quant.runtime.native_step import NativeStep
from x86quant.runtime.plan import ALIGNMENT, Buffer, aligned, assign_offsets
from x86quant.runtime.plan_cache import plan_bytes
from x86quant.runtime.programs import Programs
from x86quant.runtime.segment import Segment

# Stock PyTorch warns of its own default observers.
pytestmark = pytest.mark.filterwarnings("ignore:Please use quant_min and quant_max:UserWarning")


@pytest.fixture(scope="module", autouse=True)
def loaded() -> None:
    """The extension, which tests use that nothing before them has loaded."""
    extension.load()


def compiled(model: nn.Module, *shape: int) -> CompiledModule:
    torch.manual_seed(0)
    x = torch.randn(shape)
    return x86quant.compile(stock(model, x), (x,))


def plan_of(module: CompiledModule) -> Plan:
    (segment,) = module.segments
    return segment.plans[-1]


def ops_of(module: CompiledModule) -> list[str]:
    return [step.op for step in plan_of(module).steps]


class OneBlock(nn.Module):
    """Dense: each layer reads everything before it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(8 * (i + 1), 8, 3, padding=1) for i in range(3))
        self.last = nn.Conv2d(32, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features = [x]
        for layer in self.layers:
            features.append(F.relu(layer(torch.cat(features, 1))))
        y: torch.Tensor = self.last(torch.cat(features, 1))
        return y


class Shuffled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(4, 16, 1), nn.Conv2d(8, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        n, c, h, w = x.shape
        x = x.view(n, 2, c // 2, h, w).transpose(1, 2).reshape(n, c, h, w)
        left, right = x.chunk(2, dim=1)
        return torch.cat([self.last(left), self.last(right)], 1)


class FloatMiddle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.last(torch.cumsum(self.first(x), 1))
        return y


# ------------------------------------------------------------------------ every op, natively


@pytest.mark.parametrize("name", MODELS)
def test_native_form_of_every_op_is_within_one_step(name: str) -> None:
    build, shape, _, _ = MODELS[name]
    module = compiled(build(), *shape)
    checks = check_ops(module.graph_module, (torch.randn(shape) * 2,))
    assert checks
    assert [str(check) for check in checks if check.steps > 1] == []


def test_native_form_of_a_float_input_that_is_not_a_number() -> None:
    module = compiled(Convolutions(nn.Conv2d(4, 4, 1)), *IMAGE)
    x = torch.randn(IMAGE)
    x[0, 0, 0, :3] = torch.tensor([float("nan"), float("inf"), float("-inf")])
    assert [str(c) for c in check_ops(module.graph_module, (x,)) if c.steps > 0] == []


@pytest.mark.parametrize("level", isa.LEVELS)
def test_native_form_on_every_instruction_set(level: str) -> None:
    isa.skip_unless_lower(level)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    command += ["-k", "native_form_of"]
    done = subprocess.run(
        command, env=isa.environment(level), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout[-3000:]


def test_the_check_notices_a_wrong_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    module = compiled(Convolutions(nn.Conv2d(4, 4, 1)), *IMAGE)
    wrong = copy.deepcopy(module.graph_module)
    real = torch.ops.x86quant.conv.default

    def off_by_two(*args: object, **kwargs: object) -> torch.Tensor:
        y: torch.Tensor = real(*args, **kwargs)
        return y ^ 2

    node = next(n for n in wrong.graph.nodes if n.target is real)
    checks = {c.name: c.steps for c in check_ops(wrong, (torch.randn(IMAGE),))}
    assert checks[node.name] <= 1
    plain = Interpreter.call_function

    def call(self: Interpreter, target: object, args: object, kwargs: object) -> object:
        return plain(self, off_by_two if target is real else target, args, kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(Interpreter, "call_function", call)
    checks = {c.name: c.steps for c in check_ops(wrong, (torch.randn(IMAGE),))}
    assert checks[node.name] >= 2


# ------------------------------------------------------------------------ random networks


class RandomNet(nn.Module):
    """A random chain of blocks with branches; ``pick`` chooses among numbers."""

    def __init__(self, pick: Callable[[list[int]], int], channels: int, dims: int) -> None:
        super().__init__()
        conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
        self.dims = dims
        self.kinds: list[int] = []
        self.layers = nn.ModuleList()
        for _ in range(pick([1, 2, 3, 4])):
            kind = pick(list(range(7)))
            self.kinds.append(kind)
            groups = channels if kind == 1 else 1
            out = channels if kind in (1, 2) else pick([1, 3, 16, 33, 64])
            kernel = pick([1, 3, 5])
            padding = kernel // 2 if kind in (1, 2) else pick([kernel // 2, 0])
            stride = 1 if kind in (1, 2) else pick([1, 2])
            self.layers.append(
                conv(channels, out, kernel, stride, padding, groups=groups, bias=pick([0, 1]) == 1)
            )
            channels = 2 * out if kind == 3 else out
        self.head = nn.Linear(channels, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pool = (F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d)[self.dims - 1]
        for kind, layer in zip(self.kinds, self.layers, strict=True):
            y = layer(x)
            if kind == 1:
                y = F.hardswish(y)
            elif kind == 2:
                y = F.relu(y + x)
            elif kind == 3:
                y = torch.cat([F.relu(y), torch.sigmoid(y)], 1)
            elif kind == 4:
                y = y * torch.sigmoid(pool(y, 1))
            elif kind == 5:
                y = F.interpolate(y, scale_factor=2)
            elif kind == 6:
                y = F.relu6(y)
            x = y
        z: torch.Tensor = self.head(torch.flatten(pool(x, 1), 1))
        return z


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_random_networks_run_as_their_graphs_do(data: st.DataObject) -> None:
    def pick(choices: list[int]) -> int:
        return data.draw(st.sampled_from(choices))

    torch.manual_seed(0)
    dims = pick([1, 2, 2, 2, 3])
    channels = pick([1, 3, 8, 17])
    shape = (pick([1, 2, 5]), channels, *(pick([9, 14, 23]) for _ in range(dims)))
    net = RandomNet(pick, channels, dims)
    mapping = get_default_qconfig_mapping("onednn")
    x = torch.randn(shape)
    try:
        net(x)
    except RuntimeError:  # shrunk to nothing
        hypothesis.reject()
    module = x86quant.compile(stock(net, x, convert_to_reference_fx, mapping), (x,))
    checks = check_ops(module.graph_module, (x,))
    assert [str(check) for check in checks if check.steps > 1] == []
    other = torch.randn(shape[0] + 1, *shape[1:])
    if all(check.different == 0 for check in checks):  # no tie that rounds the other way
        assert torch.equal(module(x), module.graph_module(x))
        assert module(other).shape == (shape[0] + 1, 5)


class Skipping(nn.Module):
    """What is upsampled joins codes of another scale."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.up = nn.Upsample(scale_factor=2, mode=mode)
        self.first, self.below = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 20, 3, padding=1)
        self.last = nn.Conv2d(28, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.first(x))
        y = self.up(self.below(F.max_pool2d(x, 2)))
        result: torch.Tensor = self.last(torch.cat([x, y], 1))
        return result


@pytest.mark.parametrize("mode", ["nearest", "bilinear"])
def test_upsampling_to_codes_of_another_scale(mode: str) -> None:
    module = compiled(Skipping(mode), 2, 3, 12, 14)
    (up,) = (n.kwargs for n in module.graph_module.graph.nodes if "upsample" in n.name)
    assert up["x_scale"] != up["out_scale"], "it gives what the concatenation has"
    checks = check_ops(module.graph_module, (torch.randn(2, 3, 12, 14),))
    assert [str(check) for check in checks if check.steps > 1] == []


# ------------------------------------------------------------------------ plans and memory


@st.composite
def lives(draw: st.DrawFn) -> list[Buffer]:
    def one(index: int) -> Buffer:
        first = draw(st.integers(0, 12))
        return Buffer(
            str(index), draw(st.integers(1, 5000)), first, first + draw(st.integers(0, 6))
        )

    return [one(i) for i in range(draw(st.integers(0, 14)))]


@given(lives())
def test_buffers_in_use_together_lie_apart(buffers: list[Buffer]) -> None:
    peak = assign_offsets(buffers)
    for i, a in enumerate(buffers):
        assert a.offset % ALIGNMENT == 0
        assert a.offset + a.nbytes <= peak
        for b in buffers[:i]:
            together = a.first <= b.last and b.first <= a.last
            apart = a.offset + a.nbytes <= b.offset or b.offset + b.nbytes <= a.offset
            assert apart or not together
    assert peak <= sum(aligned(b.nbytes) for b in buffers)


def test_a_long_chain_needs_the_memory_of_two_tensors() -> None:
    layers = [nn.Conv2d(16, 16, 1) for _ in range(8)]
    module = compiled(Convolutions(nn.Conv2d(4, 16, 1), *layers), 1, 4, 32, 32)
    plan = plan_of(module)
    tensor = 16 * 32 * 32
    assert plan.peak_bytes <= 2 * tensor + 4096
    assert plan.naive_bytes >= 9 * tensor
    assert f"{len(plan.steps)} steps" in str(plan)


def test_dense_blocks_are_concatenated_in_place() -> None:
    module = compiled(OneBlock(), 2, 8, 9, 9)
    # The input itself is the one thing that must be copied.
    assert ops_of(module).count("copy") <= 1
    x = torch.randn(2, 8, 9, 9)
    assert torch.equal(module(x), module.graph_module(x))


def test_a_shuffle_and_a_split_copy_once() -> None:
    module = compiled(Shuffled(), 2, 4, 6, 6)
    ops = ops_of(module)
    assert sum(op in ("copy", "shuffle") for op in ops) <= 1, ops
    x = torch.randn(2, 4, 6, 6)
    assert torch.equal(module(x), module.graph_module(x))


def test_new_shapes_get_plans_of_their_own_up_to_a_bound() -> None:
    module = compiled(Convolutions(nn.Conv2d(4, 4, 3), nn.ReLU()), 1, 4, 8, 8)
    (segment,) = module.segments
    first = segment.plans[0]
    module.plan_cache_bytes = 10 * plan_bytes(first)
    for size in range(9, 9 + 19):
        x = torch.randn(1, 4, size, 8)
        assert torch.equal(module(x), module.graph_module(x))
    assert 2 <= len(segment.plans) <= 10
    assert first not in segment.plans, "the least recently used goes first"
    kept = segment.plans[0]
    x = torch.randn(1, 4, 9 + 19 - len(segment.plans), 8)
    module(x)
    assert segment.plans[-1] is kept, "a plan for these shapes was there"


def test_weights_are_packed_once_for_all_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    module = compiled(Convolutions(nn.Conv2d(4, 4, 3), nn.ReLU()), 1, 4, 8, 8)
    packed = []
    monkeypatch.setattr(Programs, "pack", lambda self, kernel, layer: packed.append(kernel))
    module(torch.randn(1, 4, 12, 8))
    assert packed == []


# ------------------------------------------------------------------------ batches in parts


class Pixels(nn.Module):
    """Work for the threads: many products for each weight."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 6, 1))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.body(x)
        return y, y.flatten(1).unflatten(1, (2, -1))


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
def test_a_batch_runs_in_parts_and_gives_the_same() -> None:
    module = compiled(Pixels(), 6, 4, 32, 32)
    plan = plan_of(module)
    assert plan.parts == 2, "a part each for two threads"
    assert "in 2 parts of 3:" in str(plan)
    x = torch.randn(6, 4, 32, 32)
    for actual, expected in zip(module(x), module.graph_module(x), strict=True):
        assert torch.equal(actual, expected)
    wide = torch.randn(6, 4, 32, 40)[..., 4:36]
    assert torch.equal(module(wide)[0], module.graph_module(wide)[0])
    one = module(x[:1].expand(6, -1, -1, -1))[0]
    assert torch.equal(one, module(x[:1])[0].expand(6, -1, -1, -1))


CACHES = {"48 KiB, 2 MiB": (48 << 10, 2 << 20), "32 KiB, 512 KiB": (32 << 10, 512 << 10)}


def cpu_with(l1: int, l2: int) -> Any:
    return dataclasses.replace(parts.cpu(), l1d=l1, l2=l2)


def test_the_sizes_of_the_caches_reach_the_native_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    extension.load()
    told = []
    monkeypatch.setattr(
        extension.native(), "set_native_cpu", lambda *given: told.append(given) or given[0]
    )
    for caches in CACHES.values():
        here = cpu_with(*caches)
        monkeypatch.setattr(extension, "cpu", lambda here=here: here)
        extension.load.__wrapped__()
        assert told.pop() == (here.isa, *caches)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize(
    ("build", "shape"), [(Pixels, (12, 4, 64, 48)), (OneBlock, (2, 8, 96, 96))]
)
def test_compiled_results_do_not_depend_on_the_sizes_of_the_caches(
    build: type[nn.Module], shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    module, x = compiled(build(), *shape), torch.randn(shape)
    results = []
    try:
        for caches in CACHES.values():
            here = cpu_with(*caches)
            monkeypatch.setattr(parts, "cpu", lambda here=here: here)
            extension.native().set_native_cpu(here.isa, *caches)
            result = CompiledModule(module.graph_module)(x)
            results.append(result if isinstance(result, tuple) else (result,))
    finally:
        monkeypatch.undo()
        extension.load.__wrapped__()
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


@pytest.mark.usefixtures("two_threads")
def test_parts_larger_than_the_cache_become_single_images(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = dataclasses.replace(parts.cpu(), l2=4096)
    monkeypatch.setattr(parts, "cpu", lambda: tiny)
    module = compiled(Pixels(), 6, 4, 32, 32)
    assert plan_of(module).parts == 6
    x = torch.randn(6, 4, 32, 32)
    assert torch.equal(module(x)[0], module.graph_module(x)[0])


class Mixed(nn.Module):
    """Each result depends on all images."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(4, 6, 1), nn.Conv2d(6, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.last(self.first(x).transpose(0, 1))
        return y


@pytest.mark.usefixtures("two_threads")
def test_a_batch_whose_images_mix_stays_whole() -> None:
    module = compiled(Mixed(), 6, 4, 32, 32)
    assert plan_of(module).parts == 1
    x = torch.randn(6, 4, 32, 32)
    assert torch.equal(module(x), module.graph_module(x))


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize(("batch", "why"), [(1, "one image"), (3, "a thread would idle")])
def test_a_batch_that_cannot_be_shared_stays_whole(batch: int, why: str) -> None:
    assert plan_of(compiled(Pixels(), batch, 4, 32, 32)).parts == 1, why


@pytest.mark.usefixtures("two_threads")
def test_few_rows_of_a_large_layer_stay_whole() -> None:
    """Every part would load all weights again."""
    assert plan_of(compiled(Convolutions(nn.Linear(64, 256)), 8, 64)).parts == 1
    assert plan_of(compiled(Convolutions(nn.Linear(64, 256)), 256, 64)).parts == 2


# ------------------------------------------------------------------------ what torch runs


def test_a_float_op_in_the_middle_parts_the_graph() -> None:
    module = compiled(FloatMiddle(), *IMAGE)
    assert len(module.segments) == 2
    assert [node.op for node in module.float_nodes] == ["cumsum"]
    x = torch.randn(IMAGE)
    assert torch.equal(module(x), module.graph_module(x))


def test_a_pickled_module_is_parted_the_same() -> None:
    """Graphs lose what passes noted on their nodes when they are pickled."""
    module = compiled(Shuffled(), 2, 4, 6, 6)
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    other = torch.load(file, weights_only=False)
    x = torch.randn(2, 4, 6, 6)
    assert torch.equal(other(x), module(x))
    assert len(other.segments) == 1
    assert ops_of(other) == ops_of(module)


def test_without_the_extension_one_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    module = compiled(Convolutions(nn.Conv2d(4, 4, 3), nn.ReLU()), 1, 4, 8, 8)
    x = torch.randn(1, 4, 8, 8)
    expected = module(x)

    def missing() -> None:
        raise ExtensionError("the compiled extension is missing")

    monkeypatch.setattr(extension, "load", missing)
    other = copy.deepcopy(module)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results = [other(x), other(x)]
    assert all(torch.equal(result, expected) for result in results)
    (warning,) = caught
    assert issubclass(warning.category, X86QuantWarning)
    assert "plain torch, slowly" in str(warning.message)
    assert "\n" not in str(warning.message)


# ------------------------------------------------------------------------ the direct call


class Tagged(torch.Tensor):
    """A subclass: what it holds is its own business."""


def test_a_second_run_calls_the_program_directly(monkeypatch: pytest.MonkeyPatch) -> None:
    module = compiled(Residual(), *IMAGE)
    x = torch.randn(IMAGE)
    expected = module(x)
    monkeypatch.setattr(Segment, "plan", None)  # no look-up of plans: it would raise
    assert torch.equal(module(x), expected)
    assert torch.equal(module(x.clone()), expected)
    with pytest.raises(TypeError):
        module(x[:1])


def test_what_the_direct_call_does_not_take_runs_all_the_same() -> None:
    module = compiled(Residual(), *IMAGE)
    x = torch.randn(IMAGE)
    expected = module(x)
    assert torch.equal(module(x.as_subclass(Tagged)), expected)
    assert torch.equal(module((-x).conj().resolve_conj()), module.graph_module(-x))
    assert torch.equal(module(torch._neg_view(-x)), expected)
    assert torch.equal(module(x.to(memory_format=torch.channels_last)), expected)
    with pytest.raises(x86quant.InvalidInputError, match="float32"):
        module(x.double())
    with pytest.raises(x86quant.InvalidInputError, match="takes 1 inputs"):
        module(x, x)


def test_a_program_refuses_inputs_it_was_not_planned_for() -> None:
    """Never a read out of bounds, whoever calls."""
    module = compiled(Convolutions(nn.Conv2d(4, 4, 3)), 1, 4, 8, 8)
    program = plan_of(module).program
    for wrong in ([], [torch.randn(1, 4, 8, 7)], [torch.randn(1, 4, 8, 8).double()],
                  [torch.randn(2, 4, 8, 8)[:1].transpose(2, 3)]):  # fmt: skip
        with pytest.raises(ValueError, match="other inputs"):
            program.run(wrong)


# ------------------------------------------------------------------------ layouts and threads


def test_what_is_no_call_of_a_program_is_refused() -> None:
    program = extension.native().Program(0, 1)
    assert program.try_run(()) is None  # it takes one input
    no_lists: tuple[Any, ...] = ({}, None, torch.ones(1))
    for wrong in no_lists:
        with pytest.raises(TypeError, match="list or a tuple"):
            program.try_run(wrong)
    with pytest.raises(TypeError, match="not an object of type int"):
        program.run([1])
    with pytest.raises(TypeError):
        type(program)(0)
    with pytest.raises(TypeError, match="pickle"):
        copy.deepcopy(program)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8, 16])
def test_copies_move_whole_elements(size: int) -> None:
    x = torch.randint(0, 256, (3, 4, 5 * size), dtype=torch.uint8)
    program = extension.native().Program(0, 1)
    program.expect([3, 4, 5 * size], [20 * size, 5 * size, 1], "uint8")
    program.add_output([5, 3, 4 * size], [12 * size, 4 * size, 1], "uint8")
    NativeStep("strided_copy", {
        "element_size": size, "sizes": [5, 3, 4], "from": [1, 0],
        "from_strides": [size, 20 * size, 5 * size],
        "to": [2, 0], "to_strides": [12 * size, 4 * size, size],
    }).add_to(program)  # fmt: skip
    with pytest.raises(ValueError, match="once check_reach has found it right"):
        program.run([x])
    program.check_reach()
    (copy,) = program.run([x])
    assert torch.equal(copy, x.view(3, 4, 5, size).permute(2, 0, 1, 3).reshape(5, 3, 4 * size))


# A step of each kind that is right, but for what a test changes.
_WORDS = [1, 0, 1, 1, 1, 1, 4, 4, 4, 4, 4]
_TENSORS = {"a": _WORDS, "out": [2, *_WORDS[1:]]}
_CODES = {"a_zp": 0, "out_zp": 0}
_WINDOW = {"kernel": [1] * 3, "stride": [1] * 3, "padding": [0] * 3, "dilation": [1] * 3}
_FLOATS, _TABLE = torch.ones(4), torch.zeros(256, dtype=torch.uint8)
_STEPS: dict[str, dict[str, Any]] = {
    "requantize": {**_TENSORS, **_CODES, "a_mult": 1.0},
    "max_pool": {**_TENSORS, **_WINDOW},
    "patches": {**_TENSORS, **_WINDOW, "a_zp": 0},
    "pad": {**_TENSORS, "before": [0] * 3, "mode": 0, "a_zp": 0},
    "lut": {**_TENSORS, "lut": _TABLE},
    "affine": {**_TENSORS, **_CODES, "scale_c": _FLOATS, "shift_c": _FLOATS},
    "rows": {
        "rows": 2, "features": 4, "x": [1, 0], "out_codes": [2, 0], "out_scale": [3, 0],
        "out_zero_point": [4, 0],
    },
    "attention": {
        "batch": 1, "queries": 2, "keys": 3, "heads": 2, "kv_heads": 1, "size": 8, "q": [1, 0],
        "k": [2, 0], "v": [3, 0], "out": [4, 0], "q_strides": [32, 16, 8], "k_strides": [24, 8, 8],
        "v_strides": [24, 8, 8], "causal": False, "scale": 0.5,
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", _STEPS)
def test_steps_take_their_fields(kind: str) -> None:
    NativeStep(kind, _STEPS[kind]).add_to(extension.native().Program(0, 1))


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("eclipse", {}, 'no kind of step "eclipse"'),
        ("requantize", {"eps": 1.0}, '"requantize" .* "eps" is not one of this kind'),
        ("requantize", {"a_zp": [1, 2]}, '"a_zp" takes an integer'),
        ("requantize", {"a_zp": 1.0}, '"a_zp" takes an integer, got Double'),
        ("requantize", {"a_zp": 1 << 40}, '"a_zp" is too large'),
        ("requantize", {"a_zp": 256}, "out-of-range argument"),
        ("requantize", {"a_mult": 1}, '"a_mult" takes a real, got Int'),
        ("requantize", {"a_mult": float("nan")}, "not finite"),
        ("requantize", {"lut": [1]}, '"lut" takes a tensor'),
        ("requantize", {"a": None}, '"a" takes integers'),
        ("requantize", {"a": _WORDS[1:]}, '"a" takes 11 integers, got 10'),
        ("requantize", {"out": [2, *_WORDS[1:5], 2, *_WORDS[6:]]}, "do not fit"),
        ("max_pool", {"kernel": [2, 2]}, '"kernel" takes 3 integers, got 2'),
        ("max_pool", {"stride": [1 << 40, 1, 1]}, '"stride" is too large'),
        ("patches", {"kernel": [1, 2, 1], "padding": [0, 1, 0]}, '"out" has other sizes'),
        ("patches", {"stride": [1, 0, 1]}, "is no window"),
        ("patches", {"kernel": [1 << 30] * 3, "padding": [1 << 29] * 3}, '"out"'),
        ("patches", {"out": [2, *_WORDS[1:6], 8, *_WORDS[7:]]}, "does not hold a window"),
        ("pad", {"mode": 3}, "is no way to pad"),
        ("pad", {"before": [-1, 0, 0]}, "is no margin"),
        ("pad", {"before": [0, 1, 0]}, "is no margin"),
        ("pad", {"mode": 2, "out": [2, 0, 1, 1, 2, *_WORDS[5:]]}, "wider margin"),
        ("pad", {"out": [2, 0, 2, *_WORDS[3:]]}, "other images"),
        ("lut", {"lut": _TABLE[1:]}, "256 elements .* got 255"),
        ("lut", {"lut": torch.zeros(256)}, "of type Byte, got 256 of type Float"),
        ("affine", {"shift_c": torch.ones(3)}, "takes a tensor of 4 elements"),
        ("affine", {"scale_c": torch.ones(4).double()}, "of type Float"),
        ("rows", {"rows": -1}, "impossible sizes"),
        ("rows", {"norm": 3, "eps": 1e-5}, "out-of-range argument"),
        ("rows", {"norm": 1, "eps": float("nan")}, "out-of-range argument"),
        ("rows", {"normed": [5, 0]}, "out-of-range argument"),
        ("rows", {"norm": 1, "eps": 1e-5, "norm_bias": _TABLE}, "of 4 elements of type Float"),
        ("attention", {"heads": 3, "kv_heads": 2}, "do not fit"),
        ("attention", {"scale": float("inf")}, "not finite"),
        ("attention", {"mask": [5, 0], "mask_is_bool": 1, "mask_strides": [0, 0, 0]}, "true or f"),
    ],
)
def test_a_wrong_step_is_one_clear_error(kind: str, change: dict[str, Any], message: str) -> None:
    program = extension.native().Program(0, 1)
    with pytest.raises(ValueError, match=message):
        NativeStep(kind, {**_STEPS.get(kind, {}), **change}).add_to(program)


@pytest.mark.parametrize("value", [object(), "1", (1, 2, 3), [1, 2.0, 3], [1 << 70, 1, 1], [None]])
def test_a_field_of_no_type_is_refused(value: object) -> None:
    program = extension.native().Program(0, 1)
    with pytest.raises((TypeError, OverflowError)):
        NativeStep("max_pool", {**_STEPS["max_pool"], "kernel": value}).add_to(program)


def test_every_field_of_a_step_must_be_there() -> None:
    program = extension.native().Program(0, 1)
    for kind, fields in _STEPS.items():
        for name in fields.keys() - {"out_codes"}:  # without it, no codes are wanted
            rest = {n: value for n, value in fields.items() if n != name}
            with pytest.raises(ValueError, match=f'"{kind}" .* "{name}" is missing'):
                NativeStep(kind, rest).add_to(program)


def test_every_kind_of_step_is_made_by_some_form() -> None:
    """The kinds the extension has: an op's of its name, and those that forms name otherwise."""
    extension.load()
    by_name = {op for op in FORMS if "rows" not in op and "bags" not in op}
    by_name -= {
        "linear",
        "linear_real",
        "cat",
        "join",
        "upsample",
        "recurrent_last",
        "int8_cached_attention",
    }
    others = {"copy", "shuffle", "strided_copy", "nearest", "bilinear", "rows", "lookup"}
    assert set(extension.native().step_kinds()) == by_name | others


@pytest.mark.parametrize("kernel", list(graph_kernels()))
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_multipliers_that_are_not_finite_are_refused(kernel: str, value: float) -> None:
    extension.load()
    good, bad = torch.ones(4), torch.full((4,), value)
    geometry = [1, 1, 1, 1, 1, 1, 0, 0, 0, 1, 1, 1, 1, 0]
    for mult, bias in ((bad, good), (good, bad)):
        with pytest.raises(ValueError, match="not finite"):
            extension.native().pack_graph_conv(
                kernel, torch.ones(4, 4, 1, 1, 1, dtype=torch.int8), mult, bias, None,
                geometry, [0, 0, 0, 255, 0, 0], 0.0,
            )  # fmt: skip


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.to(memory_format=torch.channels_last),
        lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
        lambda x: x.repeat(1, 2, 1, 1)[:, ::2],
        lambda x: x[:1].expand(2, -1, -1, -1),
        lambda x: x.flip(3).flip(3),
    ],
    ids=["channels last", "transposed", "every second channel", "expanded", "flipped"],
)
def test_inputs_of_any_strides(view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    module = compiled(Residual(), *IMAGE)
    x = view(torch.randn(IMAGE))
    assert torch.equal(module(x), module(x.contiguous()))


def test_several_python_threads_share_a_module() -> None:
    module = compiled(Residual(), *IMAGE)
    inputs = [torch.randn(1 + i % 3, *IMAGE[1:]) for i in range(40)]
    expected = [module(x) for x in inputs]
    other = copy.deepcopy(module)  # with no plans yet: threads race to make them
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        actual = list(pool.map(other, inputs))
    assert all(torch.equal(a, e) for a, e in zip(actual, expected, strict=True))


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="one CPU: one thread is all there is")
def test_the_number_of_threads_changes_no_result() -> None:
    module = compiled(Residual(), 8, 4, 24, 20)
    x = torch.randn(8, 4, 24, 20)
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(module(x))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_results_are_the_callers_to_keep() -> None:
    module = compiled(Residual(), *IMAGE)
    x = torch.randn(IMAGE)
    first = module(x)
    kept = first.clone()
    module(torch.randn(IMAGE))
    assert torch.equal(first, kept)


def test_compiling_a_float_model_is_told() -> None:
    with pytest.warns(X86QuantWarning, match="nothing in Linear is int8"):
        x86quant.compile(nn.Linear(8, 4).eval(), (torch.randn(2, 8),))
