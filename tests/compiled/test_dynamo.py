"""torch.compile(backend="x86quant"), exported programs, PT2E."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.ao.quantization import get_default_qconfig_mapping
from torch.ao.quantization.quantize_fx import _convert_to_reference_decomposed_fx, prepare_fx

import x86quant
from tests.artifact_models import stock
from x86quant.compiled import CompiledModule, dynamo
from x86quant.errors import UnsupportedError, X86QuantWarning
from x86quant.lowering.graph_tools import is_op, op_name

# torch's own export uses what torch deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:.isinstance.treespec:FutureWarning")


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.depthwise = nn.Conv2d(8, 8, 3, groups=8)
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.depthwise(F.relu(self.conv(x))))
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


class Around(nn.Module):
    """A compiled model between float layers."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.after = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(self.inner(x * 2))


@pytest.fixture(scope="module")
def x() -> torch.Tensor:
    return torch.randn(2, 3, 10, 10, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def compiled(x: torch.Tensor) -> CompiledModule:
    torch.manual_seed(0)
    return x86quant.compile(stock(Small(), x), (x,))


@pytest.fixture(scope="module")
def decomposed(x: torch.Tensor) -> nn.Module:
    """``Small`` with the ops that PT2E writes, made without torchao."""
    torch.manual_seed(0)
    prepared = prepare_fx(Small().eval(), get_default_qconfig_mapping("onednn"), (x,))
    prepared(x)
    return _convert_to_reference_decomposed_fx(prepared)


@pytest.fixture(autouse=True)
def fresh_dynamo() -> None:
    torch._dynamo.reset()
    dynamo._told.clear()


def lowered_ops(module: CompiledModule) -> list[str]:
    names = [op_name(node) for node in module.graph_module.graph.nodes if is_op(node)]
    return [name for name in names if "quantize" not in name]


# --- the backend -----------------------------------------------------------------------------


def test_backend_is_found_by_name() -> None:
    assert "x86quant" in torch._dynamo.list_backends()


def test_backend_runs_compiled_model_natively(compiled: CompiledModule, x: torch.Tensor) -> None:
    model = Around(compiled).eval()
    fast = torch.compile(model, backend="x86quant", fullgraph=True)
    with torch.no_grad():
        with pytest.warns(X86QuantWarning, match="1 layer stays in float.*: after;"):
            found = fast(x)
        assert torch.equal(found, model(x))
        assert torch.equal(fast(x[:1]), model(x[:1]))
    report = x86quant.assert_int8(fast, x, allow=["aten::linear"])
    assert [op.op for op in report.int8] == ["conv", "conv", "linear"]
    assert len(report.allowed) == 1


def test_backend_lowers_decomposed_ops(decomposed: nn.Module, x: torch.Tensor) -> None:
    exported = torch.export.export(decomposed, (x,)).module()
    fast = torch.compile(exported, backend="x86quant", fullgraph=True)
    with torch.no_grad():
        expected, found = decomposed(x), fast(x)
    assert float((found - expected).abs().max()) <= 2 * step_of_output(decomposed)
    assert len(x86quant.assert_int8(fast, x).int8) == 3


def test_backend_leaves_float_graphs_alone(x: torch.Tensor) -> None:
    model = Small().eval()
    fast = torch.compile(model, backend="x86quant")
    message = "3 layers stay in float.*: conv, depthwise, head; .*x86quant.quantize"
    with torch.no_grad():
        with pytest.warns(X86QuantWarning, match=message):
            found = fast(x)
        assert torch.equal(found, model(x))
        assert torch.equal(fast(x[:1]), model(x[:1]))  # compiled again, and nothing is said


class Halting(nn.Module):
    """Two int8 layers with something between them that Dynamo cannot follow."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.second(x * float(x.shape[0]))


def test_backend_runs_what_is_between_graph_breaks() -> None:
    torch.manual_seed(0)
    model = x86quant.to_dynamic(Halting().eval())
    fast = torch.compile(model, backend="x86quant")
    with torch.no_grad():
        for rows in (4, 1, 7):
            x = torch.randn(rows, 8)
            assert torch.equal(fast(x), model(x))


def test_backend_sees_changed_weights(compiled: CompiledModule, x: torch.Tensor) -> None:
    changed = copy.deepcopy(compiled)
    fast = torch.compile(changed, backend="x86quant")
    with torch.no_grad():
        before = fast(x)
        changed.graph_module.head_bias = torch.full((4,), 3.0)
        assert torch.equal(fast(x), changed.graph_module(x))
    assert not torch.equal(fast(x), before)


def test_stock_model_falls_to_the_stock_engine(x: torch.Tensor) -> None:
    converted = stock(Small(), x)
    fast = torch.compile(converted, backend="x86quant")
    with torch.no_grad():
        assert torch.equal(fast(x), converted(x))


# --- exported programs -----------------------------------------------------------------------


def step_of_output(decomposed: nn.Module) -> float:
    """The scale of the last quantization."""
    scales = [
        node.args[1]
        for node in decomposed.graph.nodes
        if "quantized_decomposed.quantize_per_tensor" in str(node.target)
    ]
    last: Any = scales[-1]
    return float(last if isinstance(last, float) else getattr(decomposed, last.target))


@pytest.mark.parametrize("form", ["graph module", "exported program"])
def test_decomposed_model_compiles(form: str, decomposed: nn.Module, x: torch.Tensor) -> None:
    model = decomposed if form == "graph module" else torch.export.export(decomposed, (x,))
    compiled = x86quant.compile(model, (x,))
    assert lowered_ops(compiled) == ["conv", "conv", "adaptive_avg_pool", "linear"]
    assert not compiled.float_nodes
    expected = decomposed(x)
    assert float((compiled(x) - expected).abs().max()) <= 2 * step_of_output(decomposed)


def test_backend_sees_writes_to_the_weights_of_pt2e(decomposed: nn.Module, x: torch.Tensor) -> None:
    model = torch.export.export(copy.deepcopy(decomposed), (x,)).module()
    fast = torch.compile(model, backend="x86quant", fullgraph=True)
    with torch.no_grad():
        for name in ("conv.0.weight", "head.weight_scale", "head.bias"):
            before = fast(x)
            dict((*model.named_parameters(), *model.named_buffers()))[name].mul_(0.5)
            found = fast(x)
            assert not torch.equal(found, before), name
            assert float((found - model(x)).abs().max()) <= 2 * step_of_output(decomposed)


def test_weights_stay_the_same_codes(decomposed: nn.Module, x: torch.Tensor) -> None:
    compiled = x86quant.compile(decomposed, (x,))
    gm = compiled.graph_module
    node = next(node for node in gm.graph.nodes if is_op(node, "conv"))
    codes = getattr(gm, node.kwargs["weight"].target)
    scales = getattr(gm, node.kwargs["weight_scales"].target)
    real = codes * scales.reshape(-1, 1, 1, 1)
    weight = decomposed.conv[0].weight.detach()
    assert float((real - weight).abs().max()) <= float(scales.max()) / 2 * 1.001


def test_seven_bit_activations_keep_their_range() -> None:
    """Codes that end before their type does: values beyond them are clipped as before."""

    class SevenBits(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            ops = torch.ops.quantized_decomposed
            codes = ops.quantize_per_tensor(x, 0.1, 10, 0, 127, torch.uint8)
            y = F.relu(ops.dequantize_per_tensor(codes, 0.1, 10, 0, 127, torch.uint8))
            codes = ops.quantize_per_tensor(y, 0.1, 0, 0, 127, torch.uint8)
            return ops.dequantize_per_tensor(codes, 0.1, 0, 0, 127, torch.uint8)

    x = torch.linspace(-3, 30, 200).reshape(2, 100)
    exported = torch.export.export(SevenBits(), (x,))
    found = x86quant.compile(exported, (x,))(x)
    assert torch.allclose(found, SevenBits()(x), atol=1e-6)
    assert float(found.max()) == pytest.approx(11.7)


def test_inputs_by_name_are_refused(x: torch.Tensor) -> None:
    exported = torch.export.export(Small().eval(), (), {"x": x})
    with pytest.raises(UnsupportedError, match="positional tensors"):
        x86quant.compile(exported, (x,))


def test_pt2e_with_torchao(x: torch.Tensor) -> None:
    """The whole workflow of torchao."""
    pytest.importorskip("torchao", reason="torchao is not installed: pip install x86quant[pt2e]")
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
    from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as quantizers

    torch.manual_seed(0)
    model = Small().eval()
    quantizer = quantizers.X86InductorQuantizer()
    quantizer.set_global(quantizers.get_default_x86_inductor_quantization_config())
    prepared = prepare_pt2e(torch.export.export(model, (x,)).module(), quantizer)
    prepared(x)
    converted = convert_pt2e(prepared)
    compiled = x86quant.compile(converted, (x,))
    assert lowered_ops(compiled)[0] == "conv"
    # What torchao's quantizer leaves in float behind a layer keeps that layer in float.
    assert {node.layer for node in compiled.float_nodes} >= {"depthwise"}
    with torch.no_grad():
        expected = converted(x)
        difference = (compiled(x) - expected).abs().max()
    assert float(difference) <= 0.02 * float(expected.abs().max())
