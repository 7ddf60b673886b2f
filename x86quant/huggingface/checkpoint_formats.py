"""Whose files quantized weights come from: what a layer's tensors are called, how they are read."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from x86quant.errors import InvalidInputError, UnsupportedError
from x86quant.huggingface import compressed_format
from x86quant.huggingface.group_formats import (
    GroupWeights,
    Reader,
    Tensors,
    check_scales,
    from_awq,
    from_compressed_tensors,
    from_gptq,
)

OURS = "x86quant"
#: What a float layer calls its weight. Our files hold one number by this name for each int8 layer:
#: transformers that knows nothing of this package then ends with "size mismatch", where it would
#: otherwise take the layer for one without weights, and make some at random.
FLOAT_WEIGHT = "weight"


@dataclasses.dataclass(frozen=True, slots=True)
class CheckpointFormat:
    """How a file holds a quantized linear.

    Attributes:
        codes: the tensor that tells a quantized layer from others.
        beside: what else it has.
        sometimes: what some layers have.
        read: makes our codes and scales of these tensors.
    """

    codes: str
    beside: tuple[str, ...]
    read: Reader
    sometimes: tuple[str, ...] = ()

    @property
    def needed(self) -> tuple[str, ...]:
        """What every layer has."""
        return (self.codes, *self.beside)

    @property
    def names(self) -> tuple[str, ...]:
        """All tensors of a layer."""
        return (*self.needed, *self.sometimes)


def _ours(tensors: Tensors, features: int) -> GroupWeights:
    return GroupWeights(tensors["int8_weight"], tensors["weight_scale"])


def _by_channel(tensors: Tensors, features: int) -> GroupWeights:
    return GroupWeights(tensors["weight"], tensors["weight_scale"].flatten().float())


def _bitsandbytes(tensors: Tensors, features: int) -> GroupWeights:
    """LLM.int8: codes of which 127 stand for the largest weight of an output feature."""
    form = tensors.get("weight_format")
    if form is not None and bool(form.any()):
        raise UnsupportedError(
            f"its weight_format is {int(form)}, tiles of a GPU; what can be read are rows (0): "
            "save it again with a newer bitsandbytes"
        )
    largest = tensors["SCB"].flatten().float()
    check_scales(largest, may_be_zero=True)
    return GroupWeights(tensors["weight"], largest / 127)


_GPTQ = ("qzeros", "scales")
_ACT_ORDER = ("g_idx",)

FORMATS: Mapping[str, CheckpointFormat] = {
    OURS: CheckpointFormat("int8_weight", ("weight_scale",), _ours),
    compressed_format.METHOD: CheckpointFormat("weight", ("weight_scale",), _by_channel),
    "compressed-tensors-packed": CheckpointFormat(
        "weight_packed",
        ("weight_scale",),
        from_compressed_tensors,
        ("weight_zero_point", "weight_g_idx", "weight_shape"),
    ),
    "gptq": CheckpointFormat("qweight", _GPTQ, from_gptq, _ACT_ORDER),
    "gptq_v2": CheckpointFormat(
        "qweight", _GPTQ, functools.partial(from_gptq, first_zero=0), _ACT_ORDER
    ),
    "awq": CheckpointFormat("qweight", _GPTQ, from_awq),
    "bitsandbytes": CheckpointFormat("weight", ("SCB",), _bitsandbytes, ("weight_format",)),
}


def format_of(settings: Mapping[str, Any]) -> str:
    """The name in ``FORMATS`` of files with these ``quantization_config`` settings.

    Raises:
        InvalidInputError: the method is none that is known.
        UnsupportedError: the method is known, and not this form of it; says what is missing.
    """
    method = settings.get("quant_method")
    if method == compressed_format.METHOD:
        return compressed_format.checked(settings)
    if method in ("gptq", "auto-round"):
        return _gptq(settings, method)
    if method == "awq":
        _check_bits(settings, method, (4,))
        version = str(settings.get("version", "gemm")).lower()
        if version != "gemm":
            raise UnsupportedError(f'its version is {version!r}; what can be read is "gemm"')
        return "awq"
    if method == "bitsandbytes":
        if settings.get("load_in_4bit") or settings.get("_load_in_4bit"):
            kind = settings.get("bnb_4bit_quant_type", "fp4")
            raise UnsupportedError(
                f"it holds 4 bits of bitsandbytes ({kind}), places in a table whose steps are not "
                "even: load the float model with X86QuantConfig(weight_bits=4)"
            )
        return "bitsandbytes"
    raise InvalidInputError(
        f"files by the method {method!r} cannot be read; those by compressed-tensors, gptq, awq, "
        "auto-round and bitsandbytes (8 bits) can"
    )


def _gptq(settings: Mapping[str, Any], method: str) -> str:
    _check_bits(settings, method, (4, 8))
    if method == "auto-round":
        packing = str(settings.get("packing_format", "auto_round:auto_gptq"))
        if packing.endswith("auto_awq"):
            return "awq"
        if not packing.endswith("gptq"):
            raise UnsupportedError(f"its packing_format {packing!r} is not known")
    version = str(settings.get("checkpoint_format") or "gptq")
    if version not in ("gptq", "gptq_v2"):
        raise UnsupportedError(
            f"its checkpoint_format is {version!r}; what can be read is gptq and gptq_v2"
        )
    return version


def _check_bits(settings: Mapping[str, Any], method: str, known: tuple[int, ...]) -> None:
    bits = settings.get("bits", settings.get("w_bit", 4))
    if bits not in known:
        raise UnsupportedError(
            f"its {method} weights have {bits} bits; what can be read are "
            f"{' and '.join(map(str, known))}"
        )
    if settings.get("modules_in_block_to_quantize") is None and settings.get("dynamic"):
        raise UnsupportedError(f"its {method} settings differ from layer to layer (dynamic)")
