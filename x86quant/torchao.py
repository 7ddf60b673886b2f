"""Our int8 layers under torchao's own ``quantize_``.

    from torchao.quantization import quantize_

    quantize_(model, x86quant.torchao.Int8Config())

Importing this module imports torchao and tells it of the configuration. A model that torchao has
quantized itself becomes one of ours by ``x86quant.to_dynamic``, which needs no import.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

from torch import nn

from x86quant.dynamic import INT8_LAYERS, check_bits, to_dynamic, why_float
from x86quant.errors import X86QuantWarning
from x86quant.tested_versions import TORCHAO, check_tested

try:
    from torchao.core.config import AOBaseConfig
    from torchao.quantization import register_quantize_module_handler
except ImportError as error:
    raise ImportError(
        "x86quant.torchao needs the package torchao: pip install 'x86quant[pt2e]'"
    ) from error

check_tested("torchao", TORCHAO, "x86quant.torchao")


@dataclass
class Int8Config(AOBaseConfig):  # type: ignore[misc]
    """Layers that ``filter_fn`` of ``quantize_`` picks become those of ``x86quant.to_dynamic``.

    Linears by default; embeddings, attentions and recurrent layers if ``filter_fn`` picks them.
    One that has no int8 form stays in float, with a warning.

    Attributes:
        weight_bits: of a linear's or an embedding's weight: 8, or 4 with a scale for each group of
            32 input features.
        weight_only: keep inputs in float, instead of quantizing each row as it comes.
    """

    weight_bits: int = 8
    weight_only: bool = False
    version: int = 1

    def __post_init__(self) -> None:
        check_bits(self.weight_bits)


@register_quantize_module_handler(Int8Config)  # type: ignore[untyped-decorator]
def _to_int8(module: nn.Module, config: Int8Config) -> nn.Module:
    """``module`` in int8: the same object, so that it is int8 wherever in a model it stands."""
    found = to_dynamic(
        module,
        weight_only=config.weight_only,
        weight_bits=config.weight_bits,
        embeddings=isinstance(module, nn.Embedding | nn.EmbeddingBag),
        inplace=True,
    )
    if found is not module:
        # quantize_ would put it in one place of the model, and nowhere if it is all of the model.
        module.__class__ = type(found)
        vars(module).clear()
        module.__setstate__(vars(found))  # type: ignore[no-untyped-call]
    elif not any(isinstance(layer, INT8_LAYERS) for layer in module.modules()):
        kind = type(module).__name__
        why = why_float(module) or f"x86quant.to_dynamic has no form of {kind} for {config}"
        warnings.warn(f"a {kind} stays in float: {why}", X86QuantWarning, stacklevel=2)
    return module
