"""Compiled models and int8 layers as modules: changed weights, conversions, inputs."""

from __future__ import annotations

import copy
import gc
import inspect
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.ao.quantization import get_default_qconfig_mapping
from torch.ao.quantization.quantize_fx import convert_to_reference_fx, prepare_fx

import x86quant
from tests.compiled.small_modules import (
    FLOAT_TYPES,
    REFUSED,
    SHAPE,
    halved,
    make,
    module,
    parted,
    weight_of,
    whole,
    write,
    x,
)
from tests.lowering.test_lowering import stock
from x86quant import extension
from x86quant.compiled import CompiledModule
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

__all__ = ["module", "parted", "whole", "x"]

pytestmark = [
    pytest.mark.filterwarnings("ignore:Please use quant_min and quant_max:UserWarning"),
    pytest.mark.filterwarnings("ignore:.torch.jit.(trace|save|load):DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.isinstance.treespec:FutureWarning"),
]


def load(module: CompiledModule) -> None:
    state = {k: v.clone() for k, v in module.state_dict().items()}
    state[f"graph_module.{weight_of(module)}"] = halved(module)
    module.load_state_dict(state)


def assign(module: CompiledModule) -> None:
    state = dict(module.state_dict())
    state[f"graph_module.{weight_of(module)}"] = halved(module)
    module.load_state_dict(state, assign=True)


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
