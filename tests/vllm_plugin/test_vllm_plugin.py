"""The plugin for vLLM against vLLM's own base classes and lists where vLLM is installed.

vLLM's wheels for CPUs are not on PyPI and its wheel for GPUs needs many packages, so that it is not
among the test's dependencies: without it stand-ins of these classes are used, with the signatures
of vLLM 0.33.0 (``vllm/model_executor/kernels/linear``).
"""

from __future__ import annotations

import enum
import importlib.metadata
import importlib.util
import logging
import sys
import types
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import x86quant  # noqa: F401
from x86quant.vllm_plugin import register

_BASE = "vllm.model_executor.kernels.linear"


def _stand_ins() -> dict[str, types.ModuleType]:
    class PlatformEnum(enum.Enum):
        CPU = enum.auto()
        CUDA = enum.auto()

    class Int8ScaledMMLinearKernel:
        def __init__(self, c: Any, layer_param_names: Any) -> None:
            assert self.can_implement(c)[0]
            assert self.is_supported()[0]
            self.config, self.layer_param_names = c, layer_param_names

    class MPLinearKernel:
        def __init__(self, c: Any, w_q: str, w_s: str, w_zp: str | None = None) -> None:
            assert self.can_implement(c)[0]
            self.config, self.w_q_name, self.w_s_name, self.w_zp_name = c, w_q, w_s, w_zp

        def _get_weight_params(self, layer: nn.Module) -> Any:
            return getattr(layer, self.w_q_name), getattr(layer, self.w_s_name), None

    @dataclass
    class Int8ScaledMMLinearLayerConfig:
        is_static_input_scheme: bool
        is_channelwise: bool
        input_symmetric: bool
        is_fused_module: bool = False

    @dataclass
    class MPLinearLayerConfig:
        full_weight_shape: tuple[int, int]
        partition_weight_shape: tuple[int, int]
        weight_type: Any
        act_type: torch.dtype
        group_size: int
        zero_points: bool

    def module(name: str, **names: Any) -> types.ModuleType:
        found = types.ModuleType(name)
        vars(found).update(names, __path__=[])
        return found

    lists = {PlatformEnum.CPU: [object], PlatformEnum.CUDA: [object]}
    linear = module(
        _BASE, _POSSIBLE_INT8_KERNELS=lists, _POSSIBLE_KERNELS={k: [*v] for k, v in lists.items()}
    )
    platform = types.SimpleNamespace(is_cpu=lambda: True)
    parts = [
        *map(module, ("vllm", "vllm.model_executor", "vllm.model_executor.kernels")),
        linear,
        module(f"{_BASE}.mixed_precision"),
        module(
            f"{_BASE}.mixed_precision.MPLinearKernel",
            MPLinearKernel=MPLinearKernel,
            MPLinearLayerConfig=MPLinearLayerConfig,
        ),
        module(f"{_BASE}.scaled_mm"),
        module(
            f"{_BASE}.scaled_mm.ScaledMMLinearKernel",
            Int8ScaledMMLinearKernel=Int8ScaledMMLinearKernel,
            Int8ScaledMMLinearLayerConfig=Int8ScaledMMLinearLayerConfig,
        ),
        module("vllm.platforms", PlatformEnum=PlatformEnum, current_platform=platform),
        module(
            "vllm.scalar_type",
            scalar_types=types.SimpleNamespace(int4="int4", uint4b8="uint4b8"),
        ),
    ]
    for part in parts:
        parent, _, name = part.__name__.rpartition(".")
        if parent:
            setattr(next(p for p in parts if p.__name__ == parent), name, part)
    return {part.__name__: part for part in parts}


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module with our kernels, behind the plugin's own entry."""
    if importlib.util.find_spec("vllm") is None:
        for name, module in _stand_ins().items():
            monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.setattr("x86quant.tested_versions.version", lambda _: "0.33.0")
    platforms = importlib.import_module("vllm.platforms")
    monkeypatch.setattr(platforms.current_platform, "is_cpu", lambda: True)
    monkeypatch.delitem(sys.modules, "x86quant.vllm_plugin.kernels", raising=False)
    register()
    register()  # vLLM may load plugins again
    return importlib.import_module("x86quant.vllm_plugin.kernels")


def layer_of(bias: bool = True, **tensors: torch.Tensor) -> Any:
    layer = nn.Module()
    for name, tensor in tensors.items():
        layer.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
    layer.register_parameter(
        "bias", nn.Parameter(torch.randn(48).bfloat16(), requires_grad=False) if bias else None
    )
    return layer


def config(kernels: Any, **changes: Any) -> Any:
    given = {"is_static_input_scheme": False, "is_channelwise": True, "input_symmetric": True}
    return kernels.Int8ScaledMMLinearLayerConfig(**{**given, **changes})


def config4(kernels: Any, **changes: Any) -> Any:
    given = {
        "full_weight_shape": (64, 48), "partition_weight_shape": (64, 48), "group_size": 32,
        "weight_type": kernels.scalar_types.int4, "act_type": torch.bfloat16, "zero_points": False,
    }  # fmt: skip
    return kernels.MPLinearLayerConfig(**{**given, **changes})


NAMES = ("weight", "weight_scale", "input_scale", "input_zero_point", "azp_adj")


def plain(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """What a layer of these real weights computes, in float."""
    out = x.float() @ weight.t()
    return out if bias is None else out + bias.float()


def test_ours_come_first_and_once(kernels: Any) -> None:
    for known, ours in (
        (kernels.kernels._POSSIBLE_INT8_KERNELS, kernels.X86QuantInt8LinearKernel),
        (kernels.kernels._POSSIBLE_KERNELS, kernels.X86QuantInt4LinearKernel),
    ):
        on_cpu = known[kernels.PlatformEnum.CPU]
        assert on_cpu[0] is ours
        assert on_cpu.count(ours) == 1
        assert len(on_cpu) > 1
        assert ours not in known[kernels.PlatformEnum.CUDA]


@torch.no_grad()
@pytest.mark.parametrize("scales", ["rows", "one", "parts"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_w8a8(kernels: Any, dtype: torch.dtype, scales: str) -> None:
    torch.manual_seed(0)
    codes = torch.randint(-128, 128, (48, 64), dtype=torch.int8)
    scale = {"rows": torch.rand(48, 1), "one": torch.rand(1), "parts": torch.rand(2)}[scales] / 500
    layer = layer_of(weight=codes.clone(), weight_scale=scale)
    layer.logical_widths = [32, 16]
    kernel = kernels.X86QuantInt8LinearKernel(config(kernels), NAMES)
    kernel.process_weights_after_loading(layer)
    assert torch.equal(layer.weight, codes)
    rows = scale.flatten().repeat_interleave(torch.tensor([32, 16])) if scales == "parts" else scale
    real = codes * rows.reshape(-1, 1)
    for shape in ((1, 64), (2, 3, 64), (40, 64)):
        x = torch.randn(shape).to(dtype)
        found = kernel.apply_weights(layer, x, layer.bias)
        assert found.dtype == dtype
        assert found.shape == (*shape[:-1], 48)
        # Exact but for the codes of the input, and for one rounding of the result.
        exact = torch.ops.x86quant.linear_dynamic(x.float(), codes, rows.expand(48, 1).flatten()
            if scales != "parts" else rows, layer.bias.float())  # fmt: skip
        assert torch.equal(found, exact.to(dtype))
        off = plain(x, real, layer.bias) - found.float()
        assert float(off.norm() / found.float().norm()) < 0.02
        without = kernel.apply_weights(layer, x, None)
        assert torch.allclose(without.float(), exact - layer.bias.float(), atol=0.05)


@torch.no_grad()
def test_w4a8(kernels: Any) -> None:
    torch.manual_seed(0)
    codes = torch.randint(-8, 8, (48, 64), dtype=torch.int8)
    scale = (torch.rand(48, 2) / 50).bfloat16()
    layer = layer_of(bias=False, weight_packed=codes.clone(), weight_scale=scale)
    kernel = kernels.X86QuantInt4LinearKernel(config4(kernels), "weight_packed", "weight_scale")
    kernel.process_weights_after_loading(layer)
    real = codes * scale.float().repeat_interleave(32, 1)
    x = torch.randn(5, 64).bfloat16()
    found = kernel.apply_weights(layer, x)
    assert found.dtype == torch.bfloat16
    off = plain(x, real, None) - found.float()
    assert float(off.norm() / found.float().norm()) < 0.02
    bias = torch.randn(48).bfloat16()
    assert torch.allclose(kernel.apply_weights(layer, x, bias), found + bias, atol=0.02)


@torch.no_grad()
def test_it_compiles_as_vllm_compiles(kernels: Any) -> None:
    layer = layer_of(
        weight=torch.randint(-128, 128, (48, 64), dtype=torch.int8),
        weight_scale=torch.rand(48, 1) / 500,
    )
    layer.logical_widths = [48]
    kernel = kernels.X86QuantInt8LinearKernel(config(kernels), NAMES)
    kernel.process_weights_after_loading(layer)
    x = torch.randn(3, 64).bfloat16()
    call = torch.compile(lambda x: kernel.apply_weights(layer, x, layer.bias), fullgraph=True)
    assert torch.equal(call(x), kernel.apply_weights(layer, x, layer.bias))


def test_other_layers_are_left_to_vllm(kernels: Any) -> None:
    can, why = kernels.X86QuantInt8LinearKernel.can_implement(
        config(kernels, is_static_input_scheme=True)
    )
    assert not can
    assert "range of each row" in why
    for change, said in (
        ({"weight_type": kernels.scalar_types.uint4b8}, "Unsupported quant type"),
        ({"zero_points": True}, "zero points"),
        ({"group_size": 12}, r"multiple of 8 that divides"),
    ):
        can, why = kernels.X86QuantInt4LinearKernel.can_implement(config4(kernels, **change))
        assert not can
        assert said in why


@pytest.mark.parametrize("installed", ["0.34.0", "0.3.3", None])
def test_other_versions_keep_their_kernels(
    installed: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def version(_: str) -> str:
        if installed is None:
            raise importlib.metadata.PackageNotFoundError("vllm")
        return installed

    monkeypatch.setattr("x86quant.tested_versions.version", version)
    monkeypatch.delitem(sys.modules, "x86quant.vllm_plugin.kernels", raising=False)
    with caplog.at_level(logging.WARNING, "x86quant.vllm_plugin"):
        register()
    assert "vLLM's own kernels stay in place" in caplog.text
    assert (
        installed is None or f"tested with vllm 0.33, and {installed} is installed" in caplog.text
    )
    assert "x86quant.vllm_plugin.kernels" not in sys.modules
