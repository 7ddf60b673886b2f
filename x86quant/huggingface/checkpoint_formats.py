"""Whose files quantized weights come from: what a layer's tensors are called, how they are read."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from x86quant.errors import InvalidInputError, UnsupportedError
from x86quant.huggingface import compressed_format, torchao_format
from x86quant.huggingface.group_formats import (
    GroupWeights,
    Reader,
    Tensors,
    check_scales,
    from_awq,
    from_compressed_bytes,
    from_compressed_tensors,
    from_gptq,
)

OURS = "x86quant"
#: What a float layer calls its weight. Our files hold one number by this name for each int8 layer:
#: transformers that knows nothing of this package then ends with "size mismatch", where it would
#: otherwise take the layer for one without weights, and make some at random.
FLOAT_WEIGHT = "weight"
#: Of our files: the input feature that meets each column of a weight.
ORDER = "order"


@dataclasses.dataclass(frozen=True, slots=True)
class CheckpointFormat:
    """How a file holds a quantized linear.

    Attributes:
        codes: the tensor that tells a quantized layer from others.
        beside: what else it has.
        sometimes: what some layers have.
        read: makes our codes and scales of these tensors.
        check: raises at files that hold something which cannot be read.
        tables: whether embedding tables may be in codes, too.
    """

    codes: str
    beside: tuple[str, ...]
    read: Reader
    sometimes: tuple[str, ...] = ()
    check: Callable[[Sequence[str]], None] | None = None
    tables: bool = False

    @property
    def needed(self) -> tuple[str, ...]:
        """What every layer has."""
        return (self.codes, *self.beside)

    @property
    def names(self) -> tuple[str, ...]:
        """All tensors of a layer."""
        return (*self.needed, *self.sometimes)


def _ours(tensors: Tensors, features: int) -> GroupWeights:
    order = tensors.get(ORDER)
    if order is not None and not torch.equal(order.sort().values, torch.arange(features)):
        raise InvalidInputError(
            f"its {ORDER} does not name each of {features} input features once: the file is damaged"
        )
    return GroupWeights(tensors["int8_weight"], tensors["weight_scale"], order)


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
    OURS: CheckpointFormat("int8_weight", ("weight_scale",), _ours, (ORDER,), tables=True),
    compressed_format.METHOD: CheckpointFormat(
        "weight",
        ("weight_scale",),
        from_compressed_bytes,
        ("weight_zero_point", "weight_g_idx"),
    ),
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
    torchao_format.METHOD: CheckpointFormat(
        torchao_format.CODES,
        (torchao_format.SCALES,),
        torchao_format.read,
        (torchao_format.ZEROS,),
        torchao_format.check_files,
        tables=True,
    ),
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
    if method == torchao_format.METHOD:
        return torchao_format.METHOD  # what the tensors are is said beside them
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
        "auto-round, torchao and bitsandbytes (8 bits) can"
    )


#: What AutoRound's own names for the packing of its tensors are in ``FORMATS``.
_AUTO_ROUND = {
    "auto": "gptq",
    "auto_round:auto_gptq": "gptq",
    "auto_round:gptq": "gptq",
    "auto_round": "gptq_v2",
    "auto_round:gptqmodel": "gptq_v2",
    "auto_round:auto_awq": "awq",
    "auto_round:awq": "awq",
}


def _gptq(settings: Mapping[str, Any], method: str) -> str:
    _check_bits(settings, method, (4, 8))
    if method == "auto-round":
        kind = str(settings.get("data_type", "int"))
        if not kind.startswith("int"):
            raise UnsupportedError(f"its weights are {kind}, for which there are no kernels")
        packing = str(settings.get("packing_format", "auto"))
        if packing not in _AUTO_ROUND:
            raise UnsupportedError(f"its packing_format {packing!r} is not known")
        return _AUTO_ROUND[packing]
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
