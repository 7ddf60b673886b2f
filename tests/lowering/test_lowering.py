"""Whole small models, from stock conversion to the compiled module."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.ao.nn.quantized as nnq
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.ao.quantization import QConfigMapping, get_default_qconfig_mapping
from torch.ao.quantization.quantize_fx import (
    convert_fx,
    convert_to_reference_fx,
    prepare_fx,
)

import x86quant
from tests.stock_tensors import engine
from x86quant.compiled import CompiledModule, compile
from x86quant.errors import InvalidInputError, UnsupportedError
from x86quant.lowering import LayerCheck, lower, verify
from x86quant.lowering.graph_tools import is_op, op_name
from x86quant.lowering.rounded import rounded

# Stock PyTorch warns of its own default observers.
pytestmark = pytest.mark.filterwarnings("ignore:Please use quant_min and quant_max:UserWarning")

IMAGE = (2, 4, 10, 9)


@pytest.fixture(autouse=True)
def stock_engine() -> Iterator[None]:
    """Pack with oneDNN, and leave the global engine as it was."""
    before = torch.backends.quantized.engine
    torch.backends.quantized.engine = "onednn"
    torch.manual_seed(0)
    yield
    torch.backends.quantized.engine = before


def stock(
    model: nn.Module,
    x: torch.Tensor,
    convert: Callable[..., nn.Module] = convert_fx,
    mapping: QConfigMapping | None = None,
) -> nn.Module:
    prepared = prepare_fx(
        copy.deepcopy(model).eval(), mapping or get_default_qconfig_mapping("x86"), (x,)
    )
    with torch.no_grad():
        prepared(x)
        prepared(x * 0.7)
        return convert(prepared)


def op_names(module: CompiledModule) -> set[str]:
    return {op_name(node) for node in module.graph_module.graph.nodes if is_op(node)}


class Residual(nn.Module):
    """Strided shortcut, squeeze-excite, shuffle, concatenation, upsampling: one of each."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.left = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.right = nn.Conv2d(8, 8, 1)
        self.squeeze = nn.Conv2d(8, 8, 1)
        self.norm = nn.BatchNorm2d(16)
        self.head = nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        x = F.relu(self.left(x) + self.right(x), inplace=True)
        x = x * torch.sigmoid(self.squeeze(F.adaptive_avg_pool2d(x, 1)))
        x = torch.cat([x, F.hardswish(self.left(x))], dim=1)
        n, c, h, w = x.shape
        x = x.view(n, 2, c // 2, h, w).transpose(1, 2).contiguous().view(n, c, h, w)
        x = F.relu(self.norm(x))
        x = F.interpolate(F.max_pool2d(x, 2), scale_factor=2)
        return self.head(F.dropout(x.mean([2, 3]), training=self.training))


class Convolutions(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layers(x)
        return y


class Functional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 4, 3, 3) * 0.2)
        self.bias = nn.Parameter(torch.randn(6))
        self.matrix = nn.Parameter(torch.randn(3, 6) * 0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(F.conv2d(x, self.weight, self.bias, (2, 2), (1, 1), (1, 1), 1))
        return F.linear(F.adaptive_avg_pool2d(y, 1).flatten(1), self.matrix)


class FunctionalNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(7, 6)
        self.weight, self.bias = nn.Parameter(torch.rand(6)), nn.Parameter(torch.rand(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(self.linear(x), (6,), self.weight, self.bias, 1e-5)


def activations() -> list[nn.Module]:
    return [
        nn.ReLU6(), nn.Hardswish(), nn.Hardsigmoid(), nn.Sigmoid(), nn.SiLU(), nn.GELU(),
        nn.Tanh(), nn.ELU(), nn.LeakyReLU(0.1),
    ]  # fmt: skip


# (model, input shape, our ops besides quantize and dequantize, kinds of op left in float)
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], set[str], set[str]]] = {
    "residual": (
        Residual,
        IMAGE,
        {"conv", "mul", "affine", "upsample", "max_pool", "adaptive_avg_pool", "cat", "linear"},
        set(),
    ),
    "functional": (Functional, IMAGE, {"conv", "adaptive_avg_pool", "linear"}, set()),
    "conv1d": (
        lambda: Convolutions(nn.Conv1d(4, 6, 3, 2, 1), nn.ReLU(), nn.Conv1d(6, 4, 5)),
        (2, 4, 17),
        {"conv"},
        set(),
    ),
    "conv3d": (
        lambda: Convolutions(nn.Conv3d(3, 4, 3, padding=1), nn.ReLU(), nn.AvgPool3d(2)),
        (1, 3, 4, 6, 6),
        {"conv", "avg_pool"},
        set(),
    ),
    "dilated and grouped": (
        lambda: Convolutions(nn.Conv2d(4, 8, 3, padding=2, dilation=2, groups=2), nn.Hardtanh()),
        IMAGE,
        {"conv"},
        set(),
    ),
    "mlp": (
        lambda: Convolutions(nn.Linear(7, 9), nn.GELU(), nn.Linear(9, 3), nn.LayerNorm(3)),
        (2, 5, 7),
        {"linear", "layer_norm"},
        set(),
    ),
    "functional norm": (
        FunctionalNorm,
        (2, 5, 7),
        {"linear", "layer_norm"},
        set(),
    ),
    "group norm": (
        lambda: Convolutions(nn.Conv2d(4, 4, 1), nn.GroupNorm(2, 4), nn.Conv2d(4, 4, 1)),
        IMAGE,
        {"conv", "group_norm"},
        set(),
    ),
    "softmax": (
        lambda: Convolutions(nn.Linear(7, 9), nn.Softmax(-1), nn.Linear(9, 3)),
        (2, 7),
        {"linear"},
        {"softmax", "Softmax"},
    ),
}


def compare(
    model: nn.Module, x: torch.Tensor, convert: Callable[..., nn.Module]
) -> tuple[CompiledModule, list[LayerCheck], nn.Module]:
    converted = stock(model, x, convert)
    lowering = lower(converted, (x,))
    return (
        CompiledModule(lowering.graph_module, lowering.reports, lowering.float_nodes),
        verify(lowering.graph_module, converted, (x,)),
        converted,
    )


@pytest.mark.parametrize("convert", [convert_fx, convert_to_reference_fx])
@pytest.mark.parametrize("name", MODELS)
def test_every_layer_is_within_one_step_of_the_stock_model(
    name: str, convert: Callable[..., nn.Module]
) -> None:
    build, shape, expected, in_float = MODELS[name]
    compiled, checks, _ = compare(build(), torch.randn(shape), convert)
    assert op_names(compiled) - {"quantize", "dequantize", "requantize"} == expected
    assert {node.op.split(".")[0] for node in compiled.float_nodes} <= in_float | {"dequantize"}
    assert checks
    assert [str(check) for check in checks if check.beyond] == []
    assert max(check.saturated for check in checks) < 0.05


@pytest.mark.parametrize("activation", activations(), ids=lambda a: type(a).__name__)
@pytest.mark.parametrize("convert", [convert_fx, convert_to_reference_fx])
def test_every_activation_is_fused_into_its_convolution(
    activation: nn.Module, convert: Callable[..., nn.Module]
) -> None:
    mapping = get_default_qconfig_mapping("x86")
    model = Convolutions(nn.Conv2d(4, 8, 3), activation, nn.Conv2d(8, 4, 1))
    x = torch.randn(IMAGE)
    # Some of these activations use all 8 bits whatever the mapping says, and without VNNI the
    # stock packs overflow then: routed ones do not.
    with engine("x86"), x86quant.enable():
        converted = stock(model, x, convert, mapping)
    lowering = lower(converted, (x,))
    kinds = [op_name(n) for n in lowering.graph_module.graph.nodes if is_op(n)]
    assert kinds == ["quantize", "conv", "conv", "dequantize"]
    assert not lowering.float_nodes
    assert not [c for c in verify(lowering.graph_module, converted, (x,)) if c.beyond]


def test_other_paddings_pad_first_and_convolve_in_int8() -> None:
    model = Convolutions(nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect"), nn.ReLU())
    x = torch.randn(IMAGE)
    converted = stock(model, x)
    lowering = lower(converted, (x,))
    assert not lowering.float_nodes
    kinds = [op_name(n) for n in lowering.graph_module.graph.nodes if is_op(n)]
    assert kinds == ["quantize", "pad", "conv", "dequantize"]
    assert not [c for c in verify(lowering.graph_module, converted, (x,)) if c.beyond]


@pytest.mark.filterwarnings("ignore:PReLU's weight observer:UserWarning")
def test_prelu_is_right_where_the_stock_kernel_is_not() -> None:
    """The stock kernel scales positive values too."""
    model, x = Convolutions(nn.Conv2d(4, 8, 3), nn.PReLU()).eval(), torch.randn(IMAGE)
    compiled = compile(stock(model, x), (x,))
    assert op_names(compiled) == {"quantize", "conv", "dequantize"}
    with torch.no_grad():
        assert float((compiled(x) - model(x)).abs().max()) < 0.1


def test_verify_notices_a_wrong_layer() -> None:
    x = torch.randn(IMAGE)
    converted = stock(Convolutions(nn.Conv2d(4, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 1)), x)
    lowering = lower(converted, (x,))
    first = next(n for n in lowering.graph_module.graph.nodes if is_op(n, "conv"))
    first.kwargs = {**first.kwargs, "x_zp": first.kwargs["x_zp"] + 9}
    lowering.graph_module.recompile()
    wrong = [c.layer for c in verify(lowering.graph_module, converted, (x,)) if c.beyond]
    assert wrong == ["layers.0"], "and only that one: what follows sees the reference's values"


def test_transposed_convolutions_with_groups() -> None:
    model = Convolutions(nn.ConvTranspose2d(4, 6, 3, 2, 1, output_padding=1, groups=2), nn.ReLU())
    x = torch.randn(IMAGE)
    torch.backends.quantized.engine = "fbgemm"  # oneDNN takes no output padding
    # The default mapping's per-channel weights are not for transposed convolutions.
    mapping = QConfigMapping().set_global(torch.ao.quantization.default_qconfig)
    converted = stock(model, x, convert_fx, mapping)
    lowering = lower(converted, (x,))
    node = next(n for n in lowering.graph_module.graph.nodes if is_op(n, "conv"))
    scales = lowering.graph_module.get_buffer(str(node.kwargs["weight_scales"]))
    assert scales.shape == (6,)
    assert not [c for c in verify(lowering.graph_module, converted, (x,)) if c.beyond]


def test_eager_mode_models_are_traced() -> None:
    class Eager(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.quant = torch.ao.quantization.QuantStub()
            self.conv, self.sum = nn.Conv2d(4, 4, 3, padding=1), nnq.FloatFunctional()
            self.dequant = torch.ao.quantization.DeQuantStub()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.quant(x)
            y: torch.Tensor = self.dequant(self.sum.add_relu(self.conv(x), x))
            return y

    model, x = Eager().eval(), torch.randn(IMAGE)
    model.qconfig = torch.ao.quantization.get_default_qconfig("x86")
    prepared = torch.ao.quantization.prepare(model)
    prepared(x)
    converted = torch.ao.quantization.convert(prepared)
    compiled = compile(converted, (x,))
    assert op_names(compiled) == {"quantize", "conv", "dequantize"}
    scale = converted.sum.scale
    assert float((compiled(x) - converted(x)).abs().max()) <= scale * 1.001


def test_an_in_place_op_changes_what_later_readers_see() -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.relu = nn.Conv2d(4, 4, 1), nn.ReLU(inplace=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = F.hardswish(self.conv(x))
            z = self.relu(y)
            return torch.cat([y, z], 1)  # y is z by now

    x = torch.randn(IMAGE)
    converted = stock(InPlace(), x)
    assert torch.equal(compile(converted, (x,))(x), converted(x))


def test_what_stays_in_float_is_named_with_its_reason() -> None:
    x = torch.randn(2, 7)
    compiled = compile(stock(MODELS["softmax"][0](), x), (x,))
    (node,) = (n for n in compiled.float_nodes if n.op == "softmax")
    assert node.layer == "layers.1"
    assert "no int8 op" in str(node)


def test_a_float_layer_in_a_quantized_model_just_runs() -> None:
    model = Convolutions(nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 1))
    mapping = get_default_qconfig_mapping("x86").set_module_name("layers.1", None)
    x = torch.randn(IMAGE)
    converted = stock(model, x, convert_fx, mapping)
    compiled = compile(converted, (x,))
    assert [node.layer for node in compiled.float_nodes] == ["layers.1"]
    assert float((compiled(x) - converted(x)).abs().max()) < 0.05


@pytest.mark.filterwarnings("ignore:To copy construct from a tensor:UserWarning")
def test_dynamic_linears_become_ours_and_other_dynamic_modules_run_as_they_are() -> None:
    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.lstm = nn.Embedding(10, 8), nn.LSTM(8, 8)
            self.head = nn.Linear(8, 3)

        def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            states, _ = self.lstm(self.embed(tokens))
            values, places = torch.topk(self.head(states), 2)
            return values, places

    tokens = torch.randint(0, 10, (4, 2))
    mapping = QConfigMapping().set_global(torch.ao.quantization.default_dynamic_qconfig)
    mapping.set_object_type(nn.Embedding, None)
    converted = convert_fx(prepare_fx(Tagger().eval(), mapping, (tokens,)))
    compiled = compile(converted, (tokens,))
    assert [node.op for node in compiled.float_nodes] == ["Embedding", "LSTM", "topk"]
    # The stock linear quantizes all rows by one range, to 7 bits.
    assert torch.allclose(compiled(tokens)[0], converted(tokens)[0], atol=0.02)


def test_several_inputs_and_structured_outputs() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(4, 4, 1)

        def forward(self, a: torch.Tensor, b: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"sum": self.conv(a) + self.conv(b), "b": b}

    x = torch.randn(IMAGE)
    prepared = prepare_fx(Two().eval(), get_default_qconfig_mapping("x86"), (x, x))
    prepared(x, -x)
    converted = convert_fx(prepared)
    out = compile(converted, (x, -x))(x, -x)
    assert out.keys() == {"sum", "b"}
    assert torch.allclose(out["sum"], converted(x, -x)["sum"], atol=0.1)


@pytest.fixture
def compiled() -> CompiledModule:
    torch.manual_seed(0)
    x = torch.randn(IMAGE)
    return compile(stock(Residual(), x), (x,))


def test_other_shapes_and_layouts_run(compiled: CompiledModule) -> None:
    x = torch.randn(3, 4, 12, 8)
    expected = compiled(x)
    assert expected.shape == (3, 5)
    assert torch.equal(compiled(x.to(memory_format=torch.channels_last)), expected)
    assert torch.equal(compiled(x.transpose(2, 3).contiguous().transpose(2, 3)), expected)
    assert torch.equal(compiled(x[:1]), expected[:1])
    assert compiled(x[:0]).shape == (0, 5)


def test_nan_gives_a_finite_answer(compiled: CompiledModule) -> None:
    assert compiled(torch.full(IMAGE, float("nan"))).isfinite().all()


def test_export_of_the_compiled_module(compiled: CompiledModule) -> None:
    x = torch.randn(IMAGE)
    auto = torch.export.Dim.AUTO
    exported = torch.export.export(compiled, (x,), dynamic_shapes=(({0: auto, 2: auto, 3: auto},),))
    other = torch.randn(3, 4, 12, 8)
    assert torch.equal(exported.module()(other), compiled(other))


def test_copies_and_saved_files_give_the_same_results(compiled: CompiledModule) -> None:
    x = torch.randn(IMAGE)
    file = io.BytesIO()
    torch.save(compiled, file)
    file.seek(0)
    for other in (copy.deepcopy(compiled), torch.load(file, weights_only=False)):
        assert torch.equal(other(x), compiled(x))


def test_compiling_leaves_the_stock_model_alone() -> None:
    x = torch.randn(IMAGE)
    converted = stock(Residual(), x)
    before, code = converted(x), converted.code
    compile(converted, (x,))
    assert converted.code == code
    assert torch.equal(converted(x), before)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ((torch.randn(4, 10, 9),), "rank 4"),
        ((torch.randn(IMAGE, dtype=torch.float64),), "must be torch.float32, got torch.float64"),
        ((torch.randn(2, 3, 10, 9),), "expected 4 input channels"),
        (([1.0],), "must be a tensor"),
        ((), "takes 1 inputs"),
        ((torch.randn(IMAGE), torch.randn(IMAGE)), "takes 1 inputs"),
        ((torch.randn(IMAGE, device="meta"),), "runs on the CPU"),
    ],
)
def test_bad_input_is_refused(
    compiled: CompiledModule, inputs: tuple[object, ...], message: str
) -> None:
    with pytest.raises(InvalidInputError, match=message):
        compiled(*inputs)


def test_bad_models_and_examples_are_refused() -> None:
    class Branches(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if x.sum() > 0 else -x

    x = torch.randn(IMAGE)
    with pytest.raises(UnsupportedError, match=r"Branches cannot be traced.*torch\.fx\.wrap"):
        compile(Branches(), (x,))
    with pytest.raises(InvalidInputError, match=r"write \(x,\)"):
        compile(nn.Identity(), x)


@pytest.mark.parametrize(
    "x",
    [
        torch.randn(2, 3, 4, 5),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(2, 3, 4, 5).permute(3, 0, 2, 1),
        torch.randn(2, 3, 4, 5)[:, :, ::2],
        torch.randn(2, 1, 4, 1).expand(2, 3, 4, 5),
        torch.randn(0, 3),
        torch.tensor(1.5),
    ],
    ids=lambda x: f"{tuple(x.shape)} {x.stride()}",
)
def test_rounding_keeps_the_layout(x: torch.Tensor) -> None:
    found = rounded(x, 0.05, 100)
    assert found.stride() == torch.empty_like(x).stride()
    expected = ((x / 0.05).round() + 100).clamp(0, 255).sub(100) * 0.05
    torch.testing.assert_close(found, expected)
