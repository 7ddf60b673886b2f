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
    from x86quant.artifacts import load as load
    from x86quant.artifacts import save as save
    from x86quant.compiled import CompiledModule as CompiledModule
    from x86quant.compiled import compile as compile
    from x86quant.cpp_library import cpp_paths as cpp_paths
    from x86quant.dynamic import DotInteraction as DotInteraction
    from x86quant.dynamic import DynamicGRU as DynamicGRU
    from x86quant.dynamic import DynamicGRUCell as DynamicGRUCell
    from x86quant.dynamic import DynamicLinear as DynamicLinear
    from x86quant.dynamic import DynamicLSTM as DynamicLSTM
    from x86quant.dynamic import DynamicLSTMCell as DynamicLSTMCell
    from x86quant.dynamic import DynamicMultiheadAttention as DynamicMultiheadAttention
    from x86quant.dynamic import EmbeddingBags as EmbeddingBags
    from x86quant.dynamic import RowwiseEmbedding as RowwiseEmbedding
    from x86quant.dynamic import WeightOnlyEmbedding as WeightOnlyEmbedding
    from x86quant.dynamic import WeightOnlyEmbeddingBag as WeightOnlyEmbeddingBag
    from x86quant.dynamic import WeightOnlyLinear as WeightOnlyLinear
    from x86quant.dynamic import from_table_batched as from_table_batched
    from x86quant.dynamic import to_dynamic as to_dynamic
    from x86quant.errors import ArtifactError as ArtifactError
    from x86quant.errors import CpuError as CpuError
    from x86quant.errors import CpuTooOldError as CpuTooOldError
    from x86quant.errors import ExtensionError as ExtensionError
    from x86quant.errors import FloatOpsError as FloatOpsError
    from x86quant.errors import InvalidInputError as InvalidInputError
    from x86quant.errors import RuleError as RuleError
    from x86quant.errors import UnsupportedError as UnsupportedError
    from x86quant.errors import X86QuantError as X86QuantError
    from x86quant.errors import X86QuantWarning as X86QuantWarning
    from x86quant.explaining.explanation import CompiledExplanation as CompiledExplanation
    from x86quant.explaining.explanation import Explanation as Explanation
    from x86quant.explaining.explanation import LayerChoice as LayerChoice
    from x86quant.explaining.explanation import explain as explain
    from x86quant.explaining.explanation import explain_pack as explain_pack
    from x86quant.explaining.int8_proof import ComputeReport as ComputeReport
    from x86quant.explaining.int8_proof import assert_int8 as assert_int8
    from x86quant.explaining.int8_proof import compute_ops as compute_ops
    from x86quant.explaining.rerouting import reroute as reroute
    from x86quant.hardware.cpu import Cpu as Cpu
    from x86quant.hardware.cpu import cpu as cpu
    from x86quant.huggingface import Int8Cache as Int8Cache
    from x86quant.huggingface import X86QuantConfig as X86QuantConfig
    from x86quant.onnx_models import from_onnx as from_onnx
    from x86quant.onnx_models.writing_onnx import export_onnx as export_onnx
    from x86quant.profiling import Profile as Profile
    from x86quant.profiling import profile as profile
    from x86quant.pt2e import X86Quantizer as X86Quantizer
    from x86quant.quantization import convert_qat as convert_qat
    from x86quant.quantization import prepare_qat as prepare_qat
    from x86quant.quantization import quantize as quantize
    from x86quant.quantization import sensitivity as sensitivity
    from x86quant.reporting import report as report
    from x86quant.routing.in_force import current_rules as current_rules
    from x86quant.routing.in_force import override as override
    from x86quant.routing.in_force import use_rules as use_rules
    from x86quant.routing.router import choose as choose
    from x86quant.routing.routes import Choice as Choice
    from x86quant.serving import export_program as export_program
    from x86quant.spec import OpSpec as OpSpec
    from x86quant.stock.hook import disable as disable
    from x86quant.stock.hook import enable as enable
    from x86quant.stock.hook import is_enabled as is_enabled
    from x86quant.stock.qconfig import get_backend_config as get_backend_config
    from x86quant.stock.qconfig import (
        get_default_dynamic_qconfig_mapping as get_default_dynamic_qconfig_mapping,
    )
    from x86quant.stock.qconfig import (
        get_default_qat_qconfig_mapping as get_default_qat_qconfig_mapping,
    )
    from x86quant.stock.qconfig import get_default_qconfig_mapping as get_default_qconfig_mapping
    from x86quant.tables.table import Rule as Rule
    from x86quant.tables.table import RuleTable as RuleTable
    from x86quant.tables.table_reader import read_table as read_table

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
    "onnx_models.writing_onnx": ("export_onnx",),
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
    "routing.routes": ("Choice",),
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
#: Modules of such packages that are called by their own names, as ``x86quant.torchao``.
_FRONT_DOORS = ("huggingface", "ray", "torchao")

__all__ = sorted(_MODULE_OF)  # for checkers, the imports above say the same


def __getattr__(name: str) -> Any:
    if name in _FRONT_DOORS:
        return importlib.import_module(f"x86quant.{name}")
    home = _MODULE_OF.get(name) or _EXTRAS.get(name)
    if home is None:
        raise AttributeError(f"module 'x86quant' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"x86quant.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_EXTRAS})
