"""Counting what really ran."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import x86quant
from tests.artifact_models import mixed, stock
from tests.stock_tensors import engine
from x86quant.compiled import CompiledModule
from x86quant.errors import FloatOpsError, InvalidInputError
from x86quant.explaining.int8_proof import _arithmetic


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(F.relu(self.conv(x)).mean((2, 3)))


@pytest.fixture(scope="module")
def x() -> torch.Tensor:
    return torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def converted(x: torch.Tensor) -> nn.Module:
    torch.manual_seed(0)
    return stock(Small(), x)


@pytest.fixture(scope="module")
def compiled(converted: nn.Module, x: torch.Tensor) -> CompiledModule:
    return x86quant.compile(converted, (x,))


def ops(report: x86quant.ComputeReport) -> list[tuple[str, str]]:
    return [(op.op, op.layer) for op in report.int8]


def test_native_segments_say_their_steps(compiled: CompiledModule, x: torch.Tensor) -> None:
    report = x86quant.assert_int8(compiled, (x,))
    assert ops(report) == [("conv", "conv"), ("linear", "head")]
    assert all(op.detail for op in report.int8)
    assert not report.allowed


def test_float_layer_between_segments_is_named() -> None:
    model, x = mixed()
    with pytest.raises(FloatOpsError, match=r"aten::mm in recurrent .*allow"):
        x86quant.assert_int8(model, x)
    report = x86quant.assert_int8(model, x, allow=["recurrent"])
    assert {op.layer for op in report.allowed} == {"recurrent"}
    assert len(report.int8) == 3
    with pytest.raises(FloatOpsError, match="addmm"):
        x86quant.assert_int8(model, x, allow=["aten::mm"])
    assert x86quant.assert_int8(model, x, allow=["aten::*mm"]).allowed == report.allowed


@pytest.mark.parametrize("name", ["onednn", "fbgemm"])
def test_stock_engine(name: str, converted: nn.Module, x: torch.Tensor) -> None:
    with engine(name):
        report = x86quant.assert_int8(converted, x)
    assert ops(report) == [("quantized::conv2d_relu", "conv"), ("quantized::linear", "head")]


def test_float_model_fails(x: torch.Tensor) -> None:
    with pytest.raises(FloatOpsError, match=r"aten::convolution in conv .*; aten::addmm in head"):
        x86quant.assert_int8(Small(), x)


def test_nothing_to_see_is_no_proof(x: torch.Tensor) -> None:
    with pytest.raises(FloatOpsError, match="no convolution or matrix product was seen"):
        x86quant.assert_int8(nn.ReLU(), x)


def test_reference_form_is_float(x: torch.Tensor) -> None:
    """A reference-quantized model looks quantized, and multiplies in float."""
    from torch.ao.quantization import get_default_qconfig_mapping
    from torch.ao.quantization.quantize_fx import convert_to_reference_fx, prepare_fx

    prepared = prepare_fx(Small().eval(), get_default_qconfig_mapping("onednn"), (x,))
    prepared(x)
    report = x86quant.compute_ops(convert_to_reference_fx(prepared), x)
    assert not report.int8
    assert [op.layer for op in report.floats] == ["conv.0", "head"]


def test_integer_products_are_no_float_fallback() -> None:
    class Indices(nn.Module):
        def forward(self, a: torch.Tensor) -> torch.Tensor:
            return a @ a

    assert not x86quant.compute_ops(Indices(), torch.ones(2, 2, dtype=torch.int64)).floats


def test_exported(compiled: CompiledModule, x: torch.Tensor) -> None:
    exported = torch.export.export(compiled, (x,))
    for model in (exported, exported.module()):
        names = [name for name, _ in ops(x86quant.assert_int8(model, x))]
        assert names == ["x86quant::conv", "x86quant::linear"]


def test_loaded(compiled: CompiledModule, x: torch.Tensor, tmp_path: Path) -> None:
    x86quant.save(compiled, tmp_path / "a")
    report = x86quant.assert_int8(x86quant.load(tmp_path / "a"), x)
    assert ops(report) == [("conv", "conv"), ("linear", "head")]


def test_torch_compile_with_inductor(converted: nn.Module, x: torch.Tensor) -> None:
    report = x86quant.assert_int8(torch.compile(converted), x)
    assert [op for op, _ in ops(report)] == ["quantized::conv2d_relu", "quantized::linear"]


def test_torch_compile_of_float_fails(x: torch.Tensor) -> None:
    compiled = torch.compile(nn.Sequential(nn.Linear(8, 8)), backend="aot_eager")
    with pytest.raises(FloatOpsError, match="aten::"):
        x86quant.assert_int8(compiled, x)


def test_watching_ends(compiled: CompiledModule, x: torch.Tensor) -> None:
    from x86quant.runtime.segment import OBSERVERS

    class Fails(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            compiled(x)
            raise RuntimeError("after a segment")

    with pytest.raises(RuntimeError, match="after a segment"):
        x86quant.compute_ops(Fails(), x)
    assert not OBSERVERS


def test_allow_is_a_list(compiled: CompiledModule, x: torch.Tensor) -> None:
    with pytest.raises(InvalidInputError, match=r"\['head'\]"):
        x86quant.assert_int8(compiled, x, allow="head")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("aten::convolution", False),
        ("aten::conv1d", False),
        ("aten::mkldnn_convolution", False),
        ("aten::addmm", False),
        ("aten::baddbmm", False),
        ("aten::bmm", False),
        ("aten::linear", False),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", False),
        ("mkldnn::_linear_pointwise", False),
        ("mkl::_mkl_linear", False),
        ("aoti_torch_cpu_addmm_out", False),
        ("aoti_torch_cpu_mkldnn__convolution_pointwise", False),
        ("x86quant::linear_weight_only", False),
        ("aoti_torch_cpu__qconv_pointwise_tensor", True),
        ("onednn::qconv_pointwise", True),
        ("onednn::qlinear_pointwise", True),
        ("quantized::conv2d_relu", True),
        ("quantized::linear_dynamic", True),
        ("x86quant::conv", True),
        ("x86quant::linear_dynamic", True),
        ("onednn::qlinear_prepack", None),
        ("quantized::conv2d_prepack", None),
        ("quantized::conv2d_unpack", None),
        ("aten::relu", None),
        ("aten::max_pool2d", None),
        ("aten::mean", None),
        ("aoti_torch_cpu_mean_out", None),
        ("quantized::add", None),
    ],
)
def test_arithmetic_of_operators(name: str, expected: bool | None) -> None:
    assert _arithmetic(name) is expected


class OneLinear(nn.Module):
    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        self.linear = linear
        self.register_buffer("weight", torch.randint(-127, 128, (4, 8), dtype=torch.int8))
        self.register_buffer("scales", torch.rand(4) + 0.1)

    def forward(self, x: torch.Tensor) -> Any:
        codes = torch.ops.x86quant.quantize(x, 0.1, 128)
        y = torch.ops.x86quant.linear(codes, self.weight, self.scales, None, 0.1, 128, 0.5, 128)
        return self.linear(torch.ops.x86quant.dequantize(y, 0.5, 128))


# torch's own loader uses what torch deprecates.
@pytest.mark.filterwarnings("ignore:.isinstance.treespec:FutureWarning")
def test_aot_inductor_package(tmp_path: Path) -> None:
    """A product that stays in float, called past the dispatcher, is seen."""
    import x86quant.ops

    x = torch.randn(3, 8)
    exported = torch.export.export(OneLinear(nn.Linear(4, 4)).eval(), (x,))
    path = torch._inductor.aoti_compile_and_package(
        exported,
        package_path=str(tmp_path / "model.pt2"),
        inductor_configs={"cpp.enable_kernel_profile": True},
    )
    package = torch._inductor.aoti_load_package(path)
    with pytest.raises(FloatOpsError, match="addmm"):
        x86quant.assert_int8(package, (x,))
    report = x86quant.assert_int8(package, (x,), allow=["*addmm*"])
    assert [op.op for op in report.int8] == ["x86quant::linear"]


def test_report_prints_and_pickles(compiled: CompiledModule, x: torch.Tensor) -> None:
    report = x86quant.compute_ops(compiled, x)
    assert "2 convolutions and matrix products in int8, 0 in float" in str(report)
    assert pickle.loads(pickle.dumps(report)) == report
