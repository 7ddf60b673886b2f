"""Compiled models and int8 layers as modules: changed weights, conversions, copies, tracers."""

from __future__ import annotations

import copy
import gc
import inspect
import io
import multiprocessing
import pickle
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.ao.quantization import get_default_qconfig_mapping
from torch.ao.quantization.quantize_fx import convert_to_reference_fx, prepare_fx

import x86quant
from tests.lowering.test_lowering import stock
from x86quant import extension
from x86quant.compiled import CompiledModule, GuardedModule
from x86quant.dynamic import (
    DynamicGRU,
    DynamicGRUCell,
    DynamicLinear,
    DynamicLSTM,
    DynamicLSTMCell,
    DynamicMultiheadAttention,
    WeightOnlyEmbedding,
    WeightOnlyEmbeddingBag,
    WeightOnlyLinear,
)
from x86quant.errors import InvalidInputError, UnsupportedError

pytestmark = [
    pytest.mark.filterwarnings("ignore:Please use quant_min and quant_max:UserWarning"),
    pytest.mark.filterwarnings("ignore:.torch.jit.(trace|save|load):DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.isinstance.treespec:FutureWarning"),
]

ROOT = Path(__file__).resolve().parents[2]
SHAPE = (2, 3, 8, 8)


class Net(nn.Module):
    def __init__(self, middle: nn.Module) -> None:
        super().__init__()
        self.conv, self.middle, self.head = nn.Conv2d(3, 4, 3), middle, nn.Conv2d(4, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.middle(self.conv(x)))
        return result


def make(middle: nn.Module) -> CompiledModule:
    torch.manual_seed(0)
    x = torch.randn(SHAPE)
    return x86quant.compile(stock(Net(middle), x), (x,))


@pytest.fixture(scope="module")
def whole() -> CompiledModule:
    return make(nn.ReLU())


@pytest.fixture(scope="module")
def parted() -> CompiledModule:
    """A float op in the middle: two segments."""
    return make(nn.Softmax(1))


@pytest.fixture(params=["whole", "parted"])
def module(request: pytest.FixtureRequest) -> CompiledModule:
    built: CompiledModule = request.getfixturevalue(request.param)
    return copy.deepcopy(built)


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(1))


# ------------------------------------------------------------------------ changed weights


def weight_of(module: CompiledModule) -> str:
    names = [n for n, b in module.graph_module.named_buffers() if b.dtype == torch.int8]
    return names[0]


def halved(module: CompiledModule) -> torch.Tensor:
    weight: torch.Tensor = getattr(module.graph_module, weight_of(module))
    return torch.div(weight, 2, rounding_mode="trunc").to(torch.int8)


def load(module: CompiledModule) -> None:
    state = {k: v.clone() for k, v in module.state_dict().items()}
    state[f"graph_module.{weight_of(module)}"] = halved(module)
    module.load_state_dict(state)


def assign(module: CompiledModule) -> None:
    state = dict(module.state_dict())
    state[f"graph_module.{weight_of(module)}"] = halved(module)
    module.load_state_dict(state, assign=True)


def write(module: CompiledModule) -> None:
    getattr(module.graph_module, weight_of(module)).copy_(halved(module))


def write_through_a_view(module: CompiledModule) -> None:
    getattr(module.graph_module, weight_of(module))[:].copy_(halved(module))


def write_in_inference_mode(module: CompiledModule) -> None:
    with torch.inference_mode():
        write(module)


def replace(module: CompiledModule) -> None:
    setattr(module.graph_module, weight_of(module), halved(module))


def replace_in_the_dictionary(module: CompiledModule) -> None:
    module.graph_module._buffers[weight_of(module)] = halved(module)


def replace_the_data(module: CompiledModule) -> None:
    getattr(module.graph_module, weight_of(module)).data = halved(module)


def turn_the_data(module: CompiledModule) -> None:
    """The same memory, read in another order."""
    weight = getattr(module.graph_module, weight_of(module))
    before = weight.shape
    weight.data = weight.data.transpose(-1, -2)
    assert weight.shape == before


def swap_tensors(module: CompiledModule) -> None:
    torch.utils.swap_tensors(getattr(module.graph_module, weight_of(module)), halved(module))


def write_by_apply(module: CompiledModule) -> None:
    def visit(m: nn.Module) -> None:
        for name, buffer in m.named_buffers(recurse=False):
            if name == weight_of(module):
                buffer.copy_(halved(module))

    module.apply(visit)


@pytest.mark.parametrize(
    "change",
    [load, assign, write, write_through_a_view, write_in_inference_mode, replace,
     replace_in_the_dictionary, replace_the_data, turn_the_data, swap_tensors, write_by_apply],
)  # fmt: skip
def test_changed_weights_run(
    change: Callable[[CompiledModule], None], module: CompiledModule, x: torch.Tensor
) -> None:
    before = module(x)
    assert torch.equal(module(x), before)
    with torch.no_grad():
        change(module)
    assert not torch.equal(module(x), before)
    assert torch.equal(module(x), module.graph_module(x))


def test_a_state_dict_of_a_parent_is_loaded(module: CompiledModule, x: torch.Tensor) -> None:
    model = nn.Sequential(module, nn.Flatten())
    before = model(x)
    state = {k: v.clone() for k, v in model.state_dict().items()}
    state[f"0.graph_module.{weight_of(module)}"] = halved(module)
    model.load_state_dict(state)
    assert not torch.equal(model(x), before)
    assert torch.equal(model(x), module.graph_module(x).flatten(1))


def test_a_swap_for_one_call_holds_for_that_call(module: CompiledModule, x: torch.Tensor) -> None:
    before = module(x)
    other = {f"graph_module.{weight_of(module)}": halved(module)}
    swapped = torch.func.functional_call(module, other, (x,))
    assert not torch.equal(swapped, before)
    assert torch.equal(module(x), before)


def test_a_module_that_refers_to_itself_is_freed(whole: CompiledModule, x: torch.Tensor) -> None:
    module = copy.deepcopy(whole)
    module(x)
    getattr(module.graph_module, weight_of(module)).owner = module  # through what is watched
    module(x)
    gone = weakref.ref(module)
    del module
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("wrong", [(), ([{}],), ((1,),), (({},), 2)])
def test_a_watch_takes_dictionaries(wrong: tuple[Any, ...]) -> None:
    with pytest.raises(TypeError):
        extension.fast().Watch(*wrong)


def test_a_module_made_in_inference_mode_follows_too(x: torch.Tensor) -> None:
    with torch.inference_mode():
        module = make(nn.ReLU())
        before = module(x)
        write(module)
        assert not torch.equal(module(x), before)
    assert torch.equal(module(x), module.graph_module(x))


def test_a_weight_at_the_address_of_a_freed_one_is_seen() -> None:
    torch.manual_seed(0)
    layer = DynamicLinear.from_float(nn.Linear(256, 256))
    x = torch.randn(3, 256)
    for value in range(1, 9):
        layer(x)
        layer.int8_weight = None  # type: ignore[assignment]  # an allocator may hand the same memory out again
        layer.int8_weight = torch.full((256, 256), value, dtype=torch.int8)
        expected = torch.ops.x86quant.linear_dynamic(
            x, layer.int8_weight, layer.weight_scale, layer.bias, None
        )
        assert torch.allclose(layer(x), expected, atol=1e-2), value


def test_a_layer_made_in_inference_mode_follows_too() -> None:
    with torch.inference_mode():
        layer = LAYERS["dynamic"]()
        x = torch.randn(3, 8)
        before = layer(x)
        layer.int8_weight.zero_()
        assert not torch.equal(layer(x), before)
        assert torch.allclose(layer(x), layer.bias.expand(3, -1))


def test_unchanged_weights_are_packed_once(module: CompiledModule, x: torch.Tensor) -> None:
    module(x)
    runtime = module.runtime
    for call in range(3):
        module(torch.randn(1 + call, *SHAPE[1:]))
    assert module.runtime is runtime


def test_the_back_end_of_torch_compile_sees_writes(whole: CompiledModule, x: torch.Tensor) -> None:
    """Ops one by one, as an exported program has them; weights are inputs of the graph."""
    torch._dynamo.reset()
    graph = copy.deepcopy(whole.graph_module)
    fast = torch.compile(graph, backend="x86quant")
    with torch.no_grad():
        assert torch.equal(fast(x), graph(x))
        weight = getattr(graph, weight_of(whole))
        weight.copy_(halved(whole))
        assert torch.equal(fast(x), graph(x))
        weight.data = torch.zeros_like(weight)
        assert torch.equal(fast(x), graph(x))


# ------------------------------------------------------------------------ conversions


FLOAT_TYPES = {
    "half": (lambda m: m.half(), torch.float16),
    "bfloat16": (lambda m: m.bfloat16(), torch.bfloat16),
    "to bfloat16": (lambda m: m.to(torch.bfloat16), torch.bfloat16),
    "double": (lambda m: m.double(), torch.float64),
    "type": (lambda m: m.type(torch.float16), torch.float16),
    "there and back": (lambda m: m.half().float(), torch.float32),
    "kept by cpu": (lambda m: m.half().cpu(), torch.float16),
}


@pytest.mark.parametrize("how", FLOAT_TYPES)
def test_another_floating_type_is_what_goes_in_and_out(
    how: str, module: CompiledModule, x: torch.Tensor
) -> None:
    convert, dtype = FLOAT_TYPES[how]
    converted = convert(copy.deepcopy(module))
    out = converted(x.to(dtype))
    assert out.dtype == dtype
    assert torch.equal(out, module(x.to(dtype).float()).to(dtype))


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "dynamic": lambda: DynamicLinear.from_float(nn.Linear(8, 5)),
    "weight only": lambda: WeightOnlyLinear.from_float(nn.Linear(8, 5)),
}


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("how", FLOAT_TYPES)
def test_dynamic_layers_take_another_floating_type(how: str, layer: str, x: torch.Tensor) -> None:
    convert, dtype = FLOAT_TYPES[how]
    plain = LAYERS[layer]()
    converted = convert(copy.deepcopy(plain))
    assert converted.int8_weight.dtype == torch.int8
    assert converted.weight.dtype == dtype, "code around it casts to this"
    out = converted(x.to(dtype))
    assert out.dtype == dtype
    assert torch.equal(out, plain(x.to(dtype).float()).to(dtype))


class Sums(nn.Module):
    """Bags of what rows of floats round to, so that it is called as the other layers are."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = WeightOnlyEmbeddingBag.from_float(nn.EmbeddingBag(9, 5, mode="sum"))
        self.table = WeightOnlyEmbedding.from_float(nn.Embedding(9, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ids = x[:, 0, 0].float().abs().round().long() % 9
        summed: torch.Tensor = self.bag(ids) + self.table(ids).sum(1)
        return summed


class First(nn.Module):
    """The first result of a module that takes a few tensors."""

    def __init__(self, module: nn.Module, *more: torch.Tensor, times: int = 1) -> None:
        super().__init__()
        self.module, self.more, self.times = module, more, times

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x[:, 0]
        found = self.module(*[rows] * self.times, *(m.to(x.dtype) for m in self.more))
        return found[0] if isinstance(found, tuple) else found


def mixed_layers() -> dict[str, nn.Module]:
    torch.manual_seed(0)
    states = torch.randn(1, 8, 4)
    return {
        "attention": First(
            DynamicMultiheadAttention.from_float(nn.MultiheadAttention(8, 2)), times=3
        ),
        "LSTM": First(DynamicLSTM.from_float(nn.LSTM(8, 4))),
        "GRU": First(DynamicGRU.from_float(nn.GRU(8, 4)), states),
        "LSTM cell": First(_rows(DynamicLSTMCell.from_float(nn.LSTMCell(8, 4)))),
        "GRU cell": First(_rows(DynamicGRUCell.from_float(nn.GRUCell(8, 4)))),
        "tables": Sums(),
    }


def _rows(cell: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Flatten(0, 1), cell)


def test_one_sequence_stays_one_in_another_type(x: torch.Tensor) -> None:
    attention = DynamicMultiheadAttention.from_float(nn.MultiheadAttention(8, 2)).half()
    rows = x[:, 0].half()
    attention(rows, rows, rows)
    assert attention.separate_parts == ()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", mixed_layers())
def test_other_int8_layers_take_another_floating_type(
    name: str, dtype: torch.dtype, x: torch.Tensor
) -> None:
    layer = mixed_layers()[name]
    x = x.to(dtype)  # the same numbers for both
    expected = layer(x.float())
    out = layer.to(dtype)(x)
    assert out.dtype == dtype
    assert torch.allclose(out.float(), expected, atol=0.05)
    with pytest.raises(InvalidInputError, match="cannot be moved to meta"):
        layer.to("meta")


@pytest.mark.parametrize("how", ["half", "bfloat16", "double"])
def test_a_model_of_float_and_int8_parts_converts(
    how: str, module: CompiledModule, x: torch.Tensor
) -> None:
    convert, dtype = FLOAT_TYPES[how]
    model = nn.Sequential(nn.Conv2d(3, 3, 1), module, LAYERS["dynamic"]().requires_grad_())
    model[2] = DynamicLinear.from_float(nn.Linear(6, 4))
    assert convert(model)(x.to(dtype)).dtype == dtype


REFUSED = {
    "meta": (lambda m: m.to("meta"), "CPU only and cannot be moved to meta"),
    "emptied on meta": (lambda m: m.to_empty(device="meta"), "cannot be moved to meta"),
    "cuda": (lambda m: m.cuda(), "runs on the CPU only"),
    "integers": (lambda m: m.type(torch.int32), "use a floating type"),
    "complex": (lambda m: m.type(torch.complex64), "use a floating type"),
}


@pytest.mark.parametrize("what", ["module", *LAYERS])
@pytest.mark.parametrize("how", REFUSED)
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_what_cannot_be_done_is_refused_at_once(
    how: str, what: str, whole: CompiledModule, x: torch.Tensor
) -> None:
    convert, why = REFUSED[how]
    module = copy.deepcopy(whole) if what == "module" else LAYERS[what]()
    before = module(x)
    with pytest.raises(InvalidInputError, match=why) as caught:
        convert(module)
    assert "\n" not in str(caught.value)
    assert torch.equal(module(x), before), "nothing has changed"


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.cpu(),
        lambda m: m.float(),
        lambda m: m.to("cpu"),
        lambda m: m.to(memory_format=torch.channels_last),
        lambda m: m.train(),
        lambda m: m.requires_grad_(),
        lambda m: m.share_memory(),
        lambda m: m.zero_grad() or m,
    ],
)
def test_what_changes_nothing_changes_nothing(
    change: Callable[[Any], Any], module: CompiledModule, x: torch.Tensor
) -> None:
    before = module(x)
    changed = change(module)
    assert torch.equal(changed(x), before)
    assert not changed.training


# ------------------------------------------------------------------------ arguments


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 4, 1), nn.Conv2d(3, 4, 1)

    def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.a(left) + self.b(right)
        return result


def test_inputs_by_name(x: torch.Tensor) -> None:
    torch.manual_seed(0)
    y = torch.randn(SHAPE)
    prepared = prepare_fx(Two().eval(), get_default_qconfig_mapping("x86"), (x, y))
    prepared(x, y)
    module = x86quant.compile(convert_to_reference_fx(prepared), (x, y))
    expected = module(x, y)
    assert torch.equal(module(right=y, left=x), expected)
    assert torch.equal(module(x, right=y), expected)
    assert str(inspect.signature(module)) == "(left, right)"
    for positional, named, why in (
        ((x,), {}, "takes 2 inputs"),
        ((), {"right": y}, "'left' is missing"),
        ((x, y), {"left": x}, "'left' was given twice"),
        ((x,), {"right": y, "scale": 2}, "'scale' is none of them"),
    ):
        with pytest.raises(InvalidInputError, match=why):
            module(*positional, **named)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda x: x.to_sparse(), "must be dense"),
        (lambda x: x.to(torch.complex64), "must be torch.float32, got torch.complex64"),
        (lambda x: x.to(torch.float16), "must be torch.float32, got torch.float16"),
        (lambda x: x.to("meta"), "x86quant runs on the CPU"),
        (lambda x: x[0], "must have rank 4"),
        (lambda x: x.numpy(), "must be a tensor"),
        (lambda x: x[:, :2], "expected 3 input channels"),
    ],
)
def test_wrong_inputs_are_refused_in_a_sentence(
    change: Callable[[torch.Tensor], Any], why: str, module: CompiledModule, x: torch.Tensor
) -> None:
    module(x)
    with pytest.raises(InvalidInputError, match=why):
        module(change(x))


def test_an_empty_batch_gives_an_empty_result(module: CompiledModule, x: torch.Tensor) -> None:
    assert module(x[:0]).shape == (0, 2, 6, 6)


def test_an_encoder_takes_an_empty_batch() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    model = x86quant.to_dynamic(nn.TransformerEncoder(layer, 1, enable_nested_tensor=False))
    with torch.no_grad():
        assert model(torch.randn(0, 3, 8)).shape == (0, 3, 8)


def test_a_gradient_is_refused_where_it_is_asked_for(
    module: CompiledModule, x: torch.Tensor
) -> None:
    out = module(x.requires_grad_())
    assert torch.equal(out, module(x.detach()))
    with pytest.raises(UnsupportedError, match="no gradient flows through"):
        out.sum().backward()
    assert not module(x.detach()).requires_grad


class Around(nn.Module):
    """A sum that would carry a part of the gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.conv(x) + x.cumsum(0)
        return result


def test_no_part_of_a_gradient_is_passed_on(x: torch.Tensor) -> None:
    module = x86quant.compile(stock(Around(), x), (x,))
    with pytest.raises(UnsupportedError, match="no gradient flows through"):
        module(x.requires_grad_()).sum().backward()
    assert x.grad is None


def test_autocast_changes_no_result(module: CompiledModule, x: torch.Tensor) -> None:
    expected = module(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(module(x), expected)
        assert torch.equal(module(x.bfloat16()), module(x.bfloat16().float()))


def test_dynamic_layers_take_what_autocast_makes(x: torch.Tensor) -> None:
    model = nn.Sequential(nn.Linear(8, 8), LAYERS["dynamic"](), nn.Linear(5, 3))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert torch.isfinite(model(x)).all()


# ------------------------------------------------------------------------ copies and workers


def saved(module: CompiledModule) -> Any:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), saved]
)
def test_copies_give_the_same(
    copied: Callable[[CompiledModule], Any], module: CompiledModule, x: torch.Tensor
) -> None:
    expected = module.half()(x.half())
    other = copied(module)
    assert torch.equal(other(x.half()), expected)
    assert inspect.signature(other) == inspect.signature(module)


class Rows(torch.utils.data.Dataset[torch.Tensor]):
    """A data set that runs the model, as preprocessing in workers may."""

    def __init__(self, module: CompiledModule, x: torch.Tensor) -> None:
        self.module, self.x = module, x

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> torch.Tensor:
        result: torch.Tensor = self.module(self.x[index : index + 1])[0]
        return result


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_workers_run_it(method: str, whole: CompiledModule, x: torch.Tensor) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # a team of OpenMP threads does not survive a fork
    try:
        module = copy.deepcopy(whole)
        expected = module(x)
        loader = torch.utils.data.DataLoader(
            Rows(module, x), 2, num_workers=1,
            multiprocessing_context=multiprocessing.get_context(method),
        )  # fmt: skip
        assert torch.equal(torch.cat(list(loader)), expected)
    finally:
        torch.set_num_threads(before)


FORKED = """
import multiprocessing, sys, torch, x86quant
from tests.compiled.test_module_behaviour import make, nn
module = make(nn.ReLU())
torch.set_num_threads(2)
x = torch.randn(8, 3, 64, 64)
expected = module(x)
def child():
    sys.exit(0 if torch.equal(module(x), expected) else 3)
process = multiprocessing.get_context("fork").Process(target=child)
process.start()
process.join(60)
if process.exitcode is None:
    process.kill()
    sys.exit("the child hangs")
sys.exit(process.exitcode)
"""


def test_a_process_forked_after_a_threaded_run_does_not_hang() -> None:
    subprocess.run([sys.executable, "-W", "ignore", "-c", FORKED], check=True, cwd=ROOT)


# ------------------------------------------------------------------------ tracers


SHAPES = [SHAPE, (1, 3, 8, 8), (3, 3, 11, 9)]


def test_a_traced_module_is_right_at_every_shape(module: CompiledModule, x: torch.Tensor) -> None:
    module(x)
    traced = torch.jit.trace(module, (x,))
    file = io.BytesIO()
    torch.jit.save(traced, file)
    file.seek(0)
    for form in (traced, torch.jit.load(file)):
        for shape in SHAPES:
            other = torch.randn(shape)
            assert torch.equal(form(other), module(other))


def test_torch_compile_calls_the_native_program(module: CompiledModule, x: torch.Tensor) -> None:
    torch._dynamo.reset()
    fast = torch.compile(module, backend="aot_eager", fullgraph=True)
    report = x86quant.compute_ops(fast, (x,))
    assert [op.detail for op in report.int8] == [
        op.detail for op in x86quant.compute_ops(module, (x,)).int8
    ]
    for shape in SHAPES:
        other = torch.randn(shape)
        assert torch.equal(fast(other), module(other))
    with torch.no_grad():
        write(module)
    assert torch.equal(fast(x), module.graph_module(x))


def test_torch_compile_of_one_module_never_runs_another(
    whole: CompiledModule, x: torch.Tensor
) -> None:
    torch._dynamo.reset()
    one, other = copy.deepcopy(whole), copy.deepcopy(whole)
    write(other)
    for module in (one, other):
        fast = torch.compile(module, backend="aot_eager")
        assert torch.equal(fast(x), module(x))


def test_an_exported_program_needs_nothing_of_the_module(
    whole: CompiledModule, x: torch.Tensor
) -> None:
    module = copy.deepcopy(whole)
    batch = torch.export.Dim("batch", min=1, max=64)
    program = torch.export.export(module, (x,), dynamic_shapes=(({0: batch},),))
    assert not any("run_compiled" in str(node.target) for node in program.graph.nodes)
    expected = [module(x), module(x[:1])]
    del module
    assert torch.equal(program.module()(x), expected[0])
    assert torch.equal(program.module()(x[:1]), expected[1])


def test_a_transform_is_refused(whole: CompiledModule, x: torch.Tensor) -> None:
    """Tensors of vmap have no memory of their own to read."""
    module = copy.deepcopy(whole)
    module(x[:1])
    with pytest.raises(InvalidInputError, match="vmap"):
        torch.vmap(lambda one: module(one[None])[0])(x)


# ------------------------------------------------------------------------ with a guard


class Branches(Net):
    def __init__(self) -> None:
        super().__init__(nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return y * 2 if x.shape[2] > 10 else y


@pytest.fixture(scope="module")
def built_guarded() -> GuardedModule:
    torch.manual_seed(0)
    batches = [torch.randn(4, 3, 8, 8) for _ in range(4)]
    found = x86quant.quantize(Branches().eval(), batches, progress=False, speed_check=False)
    assert isinstance(found, GuardedModule)
    return found


@pytest.fixture
def guarded(built_guarded: GuardedModule) -> GuardedModule:
    return copy.deepcopy(built_guarded)


@pytest.fixture(params=[(2, 3, 8, 8), (2, 3, 12, 12)], ids=["inside", "outside"])
def given(request: pytest.FixtureRequest) -> torch.Tensor:
    return torch.randn(request.param, generator=torch.Generator().manual_seed(1))


outside_is_warned = pytest.mark.filterwarnings("ignore:a call runs in float")


@outside_is_warned
@pytest.mark.parametrize("how", FLOAT_TYPES)
def test_a_guarded_model_takes_another_floating_type(
    how: str, guarded: GuardedModule, given: torch.Tensor
) -> None:
    convert, dtype = FLOAT_TYPES[how]
    converted = convert(copy.deepcopy(guarded))
    out = converted(given.to(dtype))
    assert out.dtype == dtype
    assert torch.equal(out, guarded(given.to(dtype).float()).to(dtype))
    assert converted.outside == guarded.outside


@pytest.mark.parametrize("how", REFUSED)
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_guarded_model_refuses_what_cannot_be_done(how: str, guarded: GuardedModule) -> None:
    convert, why = REFUSED[how]
    with pytest.raises(InvalidInputError, match=why):
        convert(guarded)


@outside_is_warned
def test_copies_of_a_guarded_model(guarded: GuardedModule, given: torch.Tensor) -> None:
    expected = guarded(given)
    for other in (copy.deepcopy(guarded), pickle.loads(pickle.dumps(guarded)), saved(guarded)):
        assert torch.equal(other(given), expected)
    assert torch.equal(guarded.train()(given), expected)
    assert not guarded.training


@outside_is_warned
def test_torch_compile_keeps_the_guard(guarded: GuardedModule, given: torch.Tensor) -> None:
    torch._dynamo.reset()
    fast = torch.compile(guarded, backend="aot_eager")
    with torch.no_grad():
        for x in (given, torch.randn(1, 3, 8, 8), torch.randn(1, 3, 12, 12), given):
            assert torch.equal(fast(x), guarded(x))


def test_jit_trace_of_a_guarded_model_is_refused(guarded: GuardedModule, x: torch.Tensor) -> None:
    with pytest.raises(UnsupportedError, match="checks at every call"):
        torch.jit.trace(guarded, (x,))


def test_a_guarded_model_follows_its_weights(guarded: GuardedModule, x: torch.Tensor) -> None:
    compiled = guarded.compiled
    assert isinstance(compiled, CompiledModule)
    before = guarded(x)
    with torch.no_grad():
        write(compiled)
    assert not torch.equal(guarded(x), before)
    assert torch.equal(guarded(x), compiled.graph_module(x)[0])


@outside_is_warned
def test_the_float_model_does_not_answer_for_changed_weights(guarded: GuardedModule) -> None:
    outside = torch.randn(2, 3, 12, 12)
    expected = guarded(outside)
    state = {name: tensor.clone() for name, tensor in guarded.state_dict().items()}
    guarded.load_state_dict(state)  # the same numbers
    assert torch.equal(guarded(outside), expected)
    compiled = guarded.compiled
    assert isinstance(compiled, CompiledModule)
    with torch.no_grad():
        write(compiled)
    for module in (guarded, copy.deepcopy(guarded), pickle.loads(pickle.dumps(guarded))):
        with pytest.raises(InvalidInputError, match="int8 ones were changed"):
            module(outside)
    guarded.load_state_dict(state)
    assert torch.equal(guarded(outside), expected)
