"""A unified x86 int8 quantization backend for PyTorch.

    import torch, x86quant

    x86quant.enable()
    torch.backends.quantized.engine = "x86"
    # prepare_fx, calibrate, convert_fx as ever: every layer runs on the kernel the rules choose
    print(x86quant.explain(model))

Names are imported when first used, so that ``import x86quant`` costs next to nothing.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

from x86quant.errors import CpuError as _CpuError
from x86quant.hardware.isa import apply_isa_cap
from x86quant.version import __version__ as __version__

if TYPE_CHECKING:
    from x86quant.artifacts import load, save
    from x86quant.compiled import CompiledModule, compile
    from x86quant.cpp_library import cpp_paths
    from x86quant.dynamic import (
        DotInteraction,
        DynamicGRU,
        DynamicGRUCell,
        DynamicLinear,
        DynamicLSTM,
        DynamicLSTMCell,
        DynamicMultiheadAttention,
        EmbeddingBags,
        RowwiseEmbedding,
        WeightOnlyEmbedding,
        WeightOnlyEmbeddingBag,
        WeightOnlyLinear,
        from_table_batched,
        to_dynamic,
    )
    from x86quant.errors import (
        ArtifactError,
        CpuError,
        CpuTooOldError,
        ExtensionError,
        FloatOpsError,
        InvalidInputError,
        RuleError,
        UnsupportedError,
        X86QuantError,
        X86QuantWarning,
    )
    from x86quant.explaining.explanation import (
        CompiledExplanation,
        Explanation,
        LayerChoice,
        explain,
        explain_pack,
    )
    from x86quant.explaining.int8_proof import ComputeReport, assert_int8, compute_ops
    from x86quant.explaining.rerouting import reroute
    from x86quant.hardware.cpu import Cpu, cpu
    from x86quant.huggingface import Int8Cache as Int8Cache
    from x86quant.huggingface import X86QuantConfig as X86QuantConfig
    from x86quant.onnx_models import from_onnx
    from x86quant.onnx_models.exporting import export_onnx
    from x86quant.profiling import Profile, profile
    from x86quant.pt2e import X86Quantizer as X86Quantizer
    from x86quant.quantization import convert_qat, prepare_qat, quantize, sensitivity
    from x86quant.reporting import report
    from x86quant.routing.choice import Choice
    from x86quant.routing.in_force import current_rules, override, use_rules
    from x86quant.routing.router import choose
    from x86quant.serving import export_program
    from x86quant.spec import OpSpec
    from x86quant.stock.hook import disable, enable, is_enabled
    from x86quant.stock.qconfig import (
        get_backend_config,
        get_default_dynamic_qconfig_mapping,
        get_default_qat_qconfig_mapping,
        get_default_qconfig_mapping,
    )
    from x86quant.tables.table import Rule, RuleTable
    from x86quant.tables.table_reader import read_table

# X86QUANT_ISA must cap oneDNN, FBGEMM and ATen before any of them looks at the CPU.
try:
    apply_isa_cap()
except _CpuError as error:
    # The command imports this before any of its own code runs, and ends in one line.
    if os.path.basename(sys.argv[0]) == "x86quant" or "x86quant.cli" in sys.orig_argv:
        print(f"x86quant: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    raise

_HOME = {
    "routing.in_force": ("current_rules", "override", "use_rules"),
    "artifacts": ("load", "save"),
    "compiled": ("CompiledModule", "compile"),
    "hardware.cpu": ("Cpu", "cpu"),
    "dynamic": (
        "DynamicGRU",
        "DynamicGRUCell",
        "DynamicLinear",
        "DynamicLSTM",
        "DynamicLSTMCell",
        "DynamicMultiheadAttention",
        "DotInteraction",
        "EmbeddingBags",
        "RowwiseEmbedding",
        "WeightOnlyEmbedding",
        "from_table_batched",
        "WeightOnlyEmbeddingBag",
        "WeightOnlyLinear",
        "to_dynamic",
    ),
    "errors": (
        "ArtifactError",
        "CpuError",
        "CpuTooOldError",
        "ExtensionError",
        "FloatOpsError",
        "InvalidInputError",
        "RuleError",
        "UnsupportedError",
        "X86QuantError",
        "X86QuantWarning",
    ),
    "explaining.explanation": (
        "CompiledExplanation",
        "Explanation",
        "LayerChoice",
        "explain",
        "explain_pack",
    ),
    "explaining.int8_proof": ("ComputeReport", "assert_int8", "compute_ops"),
    "onnx_models": ("from_onnx",),
    "onnx_models.exporting": ("export_onnx",),
    "profiling": ("Profile", "profile"),
    "stock.qconfig": (
        "get_backend_config",
        "get_default_dynamic_qconfig_mapping",
        "get_default_qat_qconfig_mapping",
        "get_default_qconfig_mapping",
    ),
    "quantization": ("convert_qat", "prepare_qat", "quantize", "sensitivity"),
    "reporting": ("report",),
    "explaining.rerouting": ("reroute",),
    "routing.choice": ("Choice",),
    "routing.router": ("choose",),
    "tables.table": ("Rule", "RuleTable"),
    "tables.table_reader": ("read_table",),
    "cpp_library": ("cpp_paths",),
    "serving": ("export_program",),
    "spec": ("OpSpec",),
    "stock.hook": ("disable", "enable", "is_enabled"),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}
#: Need packages that ``import x86quant`` does not: ``from x86quant import *`` leaves them out.
_EXTRAS = {"Int8Cache": "huggingface", "X86QuantConfig": "huggingface", "X86Quantizer": "pt2e"}

__all__ = [
    "ArtifactError",
    "Choice",
    "CompiledExplanation",
    "CompiledModule",
    "ComputeReport",
    "Cpu",
    "CpuError",
    "CpuTooOldError",
    "DotInteraction",
    "DynamicGRU",
    "DynamicGRUCell",
    "DynamicLSTM",
    "DynamicLSTMCell",
    "DynamicLinear",
    "DynamicMultiheadAttention",
    "EmbeddingBags",
    "Explanation",
    "ExtensionError",
    "FloatOpsError",
    "InvalidInputError",
    "LayerChoice",
    "OpSpec",
    "Profile",
    "RowwiseEmbedding",
    "Rule",
    "RuleError",
    "RuleTable",
    "UnsupportedError",
    "WeightOnlyEmbedding",
    "WeightOnlyEmbeddingBag",
    "WeightOnlyLinear",
    "X86QuantError",
    "X86QuantWarning",
    "assert_int8",
    "choose",
    "compile",
    "compute_ops",
    "convert_qat",
    "cpp_paths",
    "cpu",
    "current_rules",
    "disable",
    "enable",
    "explain",
    "explain_pack",
    "export_onnx",
    "export_program",
    "from_onnx",
    "from_table_batched",
    "get_backend_config",
    "get_default_dynamic_qconfig_mapping",
    "get_default_qat_qconfig_mapping",
    "get_default_qconfig_mapping",
    "is_enabled",
    "load",
    "override",
    "prepare_qat",
    "profile",
    "quantize",
    "read_table",
    "report",
    "reroute",
    "save",
    "sensitivity",
    "to_dynamic",
    "use_rules",
]


def __getattr__(name: str) -> Any:
    home = _MODULE_OF.get(name) or _EXTRAS.get(name)
    if home is None:
        raise AttributeError(f"module 'x86quant' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"x86quant.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_EXTRAS})
