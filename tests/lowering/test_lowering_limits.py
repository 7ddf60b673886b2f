"""What has no int8 form, or writes in place: the torch op in that place, with the same result."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.ao.quantization.quantize_fx import convert_to_reference_fx, prepare_fx
from torch.fx import GraphModule

from x86quant.compiled import CompiledModule, compile
from x86quant.errors import UnsupportedError
from x86quant.lowering import lower
from x86quant.lowering.mutation import InPlaceTracer
from x86quant.stock.qconfig import get_backend_config, get_default_qconfig_mapping

pytestmark = [
    pytest.mark.filterwarnings("ignore:Please use quant_min and quant_max:UserWarning"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning"),
]

STEP = 0.03


class OnCodes(nn.Module):
    """A function between two quantized tensors, as stock conversion writes it."""

    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.function = function
        self.register_buffer("scalar", torch.tensor([[0.5]]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        real = torch.quantize_per_tensor(x, STEP, 120, torch.quint8).dequantize()
        y = self.function(self, real)
        return torch.quantize_per_tensor(y, STEP, 120, torch.quint8).dequantize()


def compiled(
    function: Callable[..., Any], *shapes: tuple[int, ...]
) -> tuple[CompiledModule, float]:
    """The compiled form, and how many steps it is off at most, on inputs of each shape."""
    torch.manual_seed(0)
    gm = GraphModule(model := OnCodes(function), InPlaceTracer().trace(model)).eval()
    fast = compile(gm, (torch.randn(shapes[0]),))
    apart = 0.0
    for shape in shapes:
        x = torch.randn(shape)
        with torch.no_grad():
            expected, actual = gm(x), fast(x)
        assert actual.shape == expected.shape
        apart = max(apart, float((actual - expected).abs().max()) / STEP)
    return fast, apart


def six(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = x.permute(0, 2, 1, 4, 3, 6, 5)[..., ::2]
    return y + y.transpose(1, 2)[:, :, :, :, :, :, :]


SHAPE = (2, 4, 6, 6)
CASES: dict[str, tuple[Callable[..., torch.Tensor], tuple[tuple[int, ...], ...]]] = {
    "clamp to infinity": (lambda m, x: x.clamp(0, float("inf")), (SHAPE,)),
    "clamp of crossed bounds": (lambda m, x: x.clamp(0.5, -0.5), (SHAPE,)),
    "index by a list": (lambda m, x: x[:, [1, 0, 2, 3]], (SHAPE,)),
    "index by a tensor": (lambda m, x: x[torch.tensor([1, 0])], (SHAPE,)),
    "no dimensions": (lambda m, x: x[0, 0, 0, 0] * 2, (SHAPE,)),
    "many dimensions": (six, ((2, 2, 2, 2, 2, 2, 4),)),
    "sizes at run time": (lambda m, x: F.avg_pool2d(x, x.shape[2:]), (SHAPE, (2, 4, 5, 7))),
    "view of bits": (lambda m, x: x.view(torch.int32).view(torch.float32), (SHAPE,)),
    "as_strided": (lambda m, x: x.as_strided((2, 4, 6), (144, 36, 1)), (SHAPE,)),
    "one constant, other lengths": (lambda m, x: x * m.scalar, ((2, 5, 8), (2, 7, 8))),
    "resized as another": (
        lambda m, x: F.interpolate(F.max_pool2d(x, 2), size=x.shape[-2:]),
        (SHAPE, (2, 4, 8, 10)),
    ),
    "a number first": (lambda m, x: 2 * x + (1 - x), (SHAPE,)),
    "alpha": (lambda m, x: torch.ops.aten.add.Tensor(x, x, alpha=2), (SHAPE,)),
    "divisor": (lambda m, x: F.avg_pool2d(x, 2, divisor_override=3), (SHAPE,)),
    "strides": (lambda m, x: x[:, ::2, 1::2] + x[:, 1::2, ::2], (SHAPE,)),
    "input by keyword": (lambda m, x: torch.flatten(input=x, start_dim=1), (SHAPE,)),
}


@pytest.mark.parametrize("name", CASES)
def test_what_torch_takes_compiles_and_means_the_same(name: str) -> None:
    function, shapes = CASES[name]
    _, apart = compiled(function, *shapes)
    assert apart <= 1.001


def clamped(m: Any, x: torch.Tensor) -> torch.Tensor:
    x = x * 2
    x.clamp_(-0.5, 0.5)
    return x


def sliced(m: Any, x: torch.Tensor) -> torch.Tensor:
    x = x + 1
    x[:, :2].mul_(0.0)
    return x * 1.5


def item_set(m: Any, x: torch.Tensor) -> torch.Tensor:
    x = x + 1
    x[:, 1] = 0.25
    return x * 1.5


def renamed(m: Any, x: torch.Tensor) -> torch.Tensor:
    x = x + 0.5
    y = x
    x += 1
    return y * 0.5


@pytest.mark.parametrize("function", [clamped, sliced, item_set, renamed], ids=lambda f: f.__name__)
def test_no_write_in_place_is_dropped(function: Callable[..., torch.Tensor]) -> None:
    _, apart = compiled(function, SHAPE, (3, 4, 6, 6))
    assert apart <= 2.001  # one step more: the sum before is not rounded


class TooLong(nn.Module):
    """All weights at their largest: the sum leaves int32 when all codes are 255."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(67000, 1, bias=False)
        nn.init.constant_(self.linear.weight, 0.01)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(x)
        return y


def converted(model: nn.Module, x: torch.Tensor) -> nn.Module:
    backend = get_backend_config()
    prepared = prepare_fx(
        copy.deepcopy(model).eval(),
        get_default_qconfig_mapping(observer="minmax"),
        (x,),
        backend_config=backend,
    )
    with torch.no_grad():
        prepared(x)
    found: nn.Module = convert_to_reference_fx(prepared, backend_config=backend)
    return found


def test_a_sum_too_long_for_int32_runs_in_torch() -> None:
    x = torch.rand(2, 67000)
    stock = converted(TooLong(), x)
    fast = compile(stock, (x,))
    (node,) = fast.float_nodes
    assert "no kernel can run" in node.reason
    with torch.no_grad():
        torch.testing.assert_close(
            fast(x), stock(x), rtol=0, atol=1.1 * float(stock(x).max()) / 255
        )


def test_torchscript_is_refused_in_a_sentence() -> None:
    file = io.BytesIO()
    torch.jit.save(torch.jit.script(nn.Sequential(nn.Linear(4, 4))), file)
    file.seek(0)
    with pytest.raises(UnsupportedError, match="TorchScript"):
        compile(torch.jit.load(file), (torch.randn(2, 4),))


class Gated(nn.Module):
    """Sigmoid behind a chunk, tanh behind a slice: both of a convolution's output."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = self.conv(x).chunk(2, 1)
        return torch.cat([a * torch.sigmoid(b), torch.tanh(a[:, :2])], 1)


def test_a_sigmoid_behind_a_view_leaves_its_input_the_range_it_has() -> None:
    torch.manual_seed(0)
    model, x = Gated().eval(), torch.randn(4, 4, 10, 10) * 3
    with torch.no_grad():
        expected, actual = model(x), compile(converted(model, x), (x,))(x)
    assert float(20 * torch.log10(expected.norm() / (expected - actual).norm())) > 30


class Table(nn.Module):
    """An embedding of many rows, called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(1000, 8)
        self.linear = nn.Linear(8, 4)

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(self.table(index) + self.table(index))
        return y


def test_the_rows_of_an_embedding_are_rounded_once() -> None:
    torch.manual_seed(0)
    index = torch.randint(0, 998, (3, 5))
    stock = converted(Table(), index)
    lowered = lower(stock, (index,)).graph_module
    assert not any(isinstance(m, nn.Embedding) for m in lowered.modules())
    assert sum(x.shape == (1000, 8) for x in lowered.buffers()) == 1
    with torch.no_grad():
        torch.testing.assert_close(lowered(index), stock(index), rtol=0, atol=0.03)


def test_reals_have_no_scale_of_codes() -> None:
    """A saved graph is checked for it."""
    gm = GraphModule(
        model := OnCodes(lambda m, x: torch.cumsum(x.unbind(1)[0], 1)), InPlaceTracer().trace(model)
    )
    lowered = lower(gm.eval(), (torch.randn(2, 3, 4),)).graph_module
    for node in lowered.graph.nodes:
        if str(node.target) == "x86quant.dequantize.default":
            assert "qparams" not in node.meta


def test_ranges_of_each_call_are_refused() -> None:
    class Dynamic(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.quantize_per_tensor_dynamic(x, torch.quint8, False).dequantize()

    with pytest.raises(UnsupportedError, match="at each call"):
        compile(Dynamic(), (torch.randn(2, 4),))
