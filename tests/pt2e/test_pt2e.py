"""PT2E with torchao: X86Quantizer, and what torchao's own quantizer makes, compiled natively."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import x86quant
from x86quant.compiled import CompiledModule
from x86quant.errors import InvalidInputError
from x86quant.lowering.graph_tools import is_op, op_name

pytest.importorskip("torchao", reason="torchao is not installed: pip install x86quant[pt2e]")

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch's export and torchao


class Block(nn.Module):
    """conv, batch norm, ReLU; and the sum with a ReLU behind it."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1)
        self.bn = nn.BatchNorm2d(channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1, groups=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(x + self.second(F.relu(self.bn(self.first(x)))))


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.block = Block(8)
        self.side = nn.Conv2d(8, 4, 1)
        self.join = nn.Conv2d(12, 12, 1)
        self.head = nn.Linear(12, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.block(F.max_pool2d(F.relu6(self.stem(x)), 2))
        x = F.silu(self.join(torch.cat([x, self.side(x)], 1)))
        x = F.adaptive_avg_pool2d(x, 1)
        return self.head(x.view(x.shape[0], -1))


def _batch(size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(size, 3, 16, 16, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    found = Network().train()
    for seed in range(3):
        found(_batch(8, seed))
    return found.eval().requires_grad_(False)


def _converted(model: nn.Module, quantizer: Any, dynamic: bool = True) -> Any:
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

    sizes = ({0: torch.export.Dim("batch", min=1, max=64)},) if dynamic else None
    exported = torch.export.export(model, (_batch(4),), dynamic_shapes=sizes)
    prepared = prepare_pt2e(exported.module(), quantizer)
    for seed in range(3):
        prepared(_batch(4, seed))
    return convert_pt2e(prepared)


def _inductors() -> Any:
    from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as quantizers

    quantizer = quantizers.X86InductorQuantizer()
    return quantizer.set_global(quantizers.get_default_x86_inductor_quantization_config())


@pytest.fixture(scope="module")
def converted(model: nn.Module) -> Any:
    return _converted(model, x86quant.X86Quantizer())


@pytest.fixture(scope="module")
def inductors(model: nn.Module) -> Any:
    return _converted(model, _inductors())


def _ops(module: CompiledModule) -> list[str]:
    names = [op_name(node) for node in module.graph_module.graph.nodes if is_op(node)]
    return [name for name in names if name not in ("quantize", "dequantize")]


def _sqnr(expected: torch.Tensor, found: torch.Tensor) -> float:
    return float(20 * torch.log10(expected.norm() / (expected - found).norm().clamp(min=1e-12)))


def test_all_of_it_is_int8_and_fused(model: nn.Module, converted: Any) -> None:
    compiled = x86quant.compile(converted, (_batch(4),))
    assert compiled.float_nodes == ()
    assert _ops(compiled) == [
        "conv", "max_pool", "conv", "conv", "conv", "cat", "conv", "adaptive_avg_pool", "linear",
    ]  # fmt: skip
    for size in (4, 1, 7):
        x = _batch(size, 9)
        assert _sqnr(model(x), compiled(x)) > 28
        assert _sqnr(converted(x), compiled(x)) > 30


def test_sizes_stay_free_if_the_example_has_one_row(converted: Any, inductors: Any) -> None:
    for program in (converted, inductors):
        compiled = x86quant.compile(program, (_batch(1),))
        for size in (1, 2, 5, 64):
            x = _batch(size, 9)
            assert _sqnr(program(x), compiled(x)) > 30


def test_a_converted_program_may_be_exported_again(converted: Any) -> None:
    batch = torch.export.Dim("batch", min=1, max=64)
    exported = torch.export.export(converted, (_batch(4),), dynamic_shapes=({0: batch},))
    compiled = x86quant.compile(exported, (_batch(4),))
    assert torch.equal(compiled(_batch(3)), x86quant.compile(converted, (_batch(4),))(_batch(3)))


def test_torchaos_own_annotation_runs_natively(model: nn.Module, inductors: Any) -> None:
    """What it leaves in float behind a layer is float; all products are int8."""
    compiled = x86quant.compile(inductors, (_batch(4),))
    assert _ops(compiled) == [
        "conv", "max_pool", "conv", "conv", "requantize", "conv", "cat", "conv_real",
        "linear_real",
    ]  # fmt: skip
    assert {node.layer for node in compiled.float_nodes} == {"adaptive_avg_pool2d"}
    x = _batch(4, 9)
    assert _sqnr(inductors(x), compiled(x)) > 45
    assert _sqnr(model(x), compiled(x)) > 28


def test_static_programs_keep_their_size(model: nn.Module) -> None:
    program = _converted(model, x86quant.X86Quantizer("minmax"), dynamic=False)
    compiled = x86quant.compile(program, (_batch(4),))
    assert compiled.float_nodes == ()
    assert _sqnr(model(_batch(4, 9)), compiled(_batch(4, 9))) > 28


def test_layers_stay_in_float_by_name(model: nn.Module) -> None:
    program = _converted(model, x86quant.X86Quantizer(float_layers=["block", "head"]))
    compiled = x86quant.compile(program, (_batch(4),))
    layers = {node.layer for node in compiled.float_nodes}
    assert {"block.first", "block.second", "head"} <= layers
    assert _ops(compiled).count("conv") == 3


def test_concatenations_and_pools_share_ranges(converted: Any) -> None:
    aten, ops = torch.ops.aten, torch.ops.quantized_decomposed
    quantize = ops.quantize_per_tensor.default

    def qparams(node: Any) -> Any:
        dequantize = node if node.target is not quantize else None
        return tuple((dequantize or node).args[1:3])

    for target in (aten.cat.default, aten.max_pool2d.default):
        (node,) = (n for n in converted.graph.nodes if n.target is target)
        inputs = node.args[0] if target is aten.cat.default else node.args[:1]
        (user,) = node.users
        assert user.target is quantize
        assert {qparams(x) for x in inputs} == {qparams(user)}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"observer": "kl"}, "observer must be 'histogram' or 'minmax'"),
        ({"float_layers": "head"}, "must be a list of paths"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        x86quant.X86Quantizer(**options)


def test_layers_that_are_not_there_are_refused(model: nn.Module) -> None:
    with pytest.raises(InvalidInputError, match="no layer is called 'haed'; did you mean head"):
        _converted(model, x86quant.X86Quantizer(float_layers=["haed"]))


class Views(nn.Module):
    """Views, splits, sums with constants, products, writes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.avg_pool2d(self.conv(x).relu_(), 2)
        one, other = torch.split(x, 4, 1)
        x = torch.cat([other, one * 2], 1) * torch.sigmoid(x)
        x = x.flatten(2).transpose(1, 2)
        return F.gelu(self.linear(x) + 1.0).mean(1)


def test_other_ops_are_annotated_as_they_are_lowered() -> None:
    torch.manual_seed(0)
    model = Views().eval().requires_grad_(False)
    program = _converted(model, x86quant.X86Quantizer())
    compiled = x86quant.compile(program, (_batch(4),))
    assert {"conv", "linear", "mul", "cat", "avg_pool"} <= set(_ops(compiled))
    assert all("mean" in node.op for node in compiled.float_nodes), compiled.float_nodes
    for size in (4, 3):
        assert _sqnr(model(_batch(size, 9)), compiled(_batch(size, 9))) > 25
