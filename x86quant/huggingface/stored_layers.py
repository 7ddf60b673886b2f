"""Which layers of a checkpoint are quantized, and how: what its files hold decides."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from safetensors import safe_open
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from x86quant.errors import InvalidInputError, UnsupportedError
from x86quant.huggingface.checkpoint_formats import FLOAT_WEIGHT, CheckpointFormat
from x86quant.huggingface.expert_parts import merges_experts


def stored_layers(
    model: Any,
    layers: Mapping[str, object],
    files: Sequence[str] | None,
    stored: CheckpointFormat,
    conversions: Sequence[object],
) -> dict[str, dict[str, torch.Tensor]]:
    """The paths of those of ``layers`` whose codes are in ``files``; their tensors without data.

    Names in files are changed as transformers will change them, which knows other names of layers
    and the prefix of the base model, by these ``conversions``.

    Raises:
        InvalidInputError: there are no such files, or no codes in them.
        UnsupportedError: a layer is stored in a form that is not the model's.
    """
    if not files or not all(str(file).endswith(".safetensors") for file in files):
        raise InvalidInputError("an int8 model can be loaded from a folder of safetensors only")
    if stored.check is not None:
        stored.check(files)
    suffix = f".{stored.codes}"
    known = {path + suffix: True for path in layers}
    renamings = [x for x in conversions if isinstance(x, WeightRenaming)]
    converters = [
        x for x in conversions if isinstance(x, WeightConverter) and not merges_experts(x)
    ]
    found: dict[str, dict[str, torch.Tensor]] = {}
    tensors = _tensors(files, stored.names)
    codes = [k for k, x in tensors.items() if k.endswith(suffix) and x.dtype in _OF_CODES]
    for key in codes:
        name, converter = rename_source_key(
            key, renamings, converters, model.base_model_prefix, known
        )
        if converter is not None:
            raise UnsupportedError(
                f"{key} is stored in int8 as one tensor that {type(model).__name__} splits or "
                "merges, which can be done in float only"
            )
        if name not in known and ".experts." in key:
            raise UnsupportedError(
                f"{key} is of an expert, and not by a name or of a form that is known of experts "
                f"of {type(model).__name__}: load the float model with X86QuantConfig"
            )
        if name in known:
            layer = key.removesuffix(suffix)
            beside = {other: tensors.get(f"{layer}.{other}") for other in stored.names}
            present = {other: x for other, x in beside.items() if x is not None}
            for other in stored.needed:  # what is missing is said when the others are there
                present.setdefault(other, torch.empty(0, dtype=torch.float32, device="meta"))
            found[name.removesuffix(suffix)] = present
    if layers and not found:
        kinds = "no int8 weights at all" if not codes else f"others, such as {codes[0]}"
        raise InvalidInputError(
            f"the checkpoint has no int8 weights for {type(model).__name__}: it holds {kinds}"
        )
    return found


def marked_layers(
    model: Any, paths: Collection[str], files: Sequence[str], conversions: Sequence[object]
) -> set[str]:
    """Those of ``paths`` that were int8 in the model of these ``files`` of ours."""
    renamings = [x for x in conversions if isinstance(x, WeightRenaming)]
    known = {f"{path}.{FLOAT_WEIGHT}": True for path in paths}
    found = set()
    for key, tensor in _tensors(files, (FLOAT_WEIGHT,)).items():
        if tensor.dtype == torch.int8 and tensor.shape == (1,):
            name, _ = rename_source_key(key, renamings, [], model.base_model_prefix, known)
            found.add(name.removesuffix(f".{FLOAT_WEIGHT}"))
    return found & set(paths)


def half_tables(
    model: Any, paths: Collection[str], files: Sequence[str], conversions: Sequence[object]
) -> dict[str, torch.Tensor]:
    """Those of ``paths``, of tables, that have 16 bits in ``files``; their weights without data."""
    renamings = [x for x in conversions if isinstance(x, WeightRenaming)]
    known = {f"{path}.{FLOAT_WEIGHT}": True for path in paths}
    found = {}
    for key, tensor in _tensors(files, (FLOAT_WEIGHT,)).items():
        if tensor.dtype in (torch.float16, torch.bfloat16):
            name, _ = rename_source_key(key, renamings, [], model.base_model_prefix, known)
            if name in known:
                found[name.removesuffix(f".{FLOAT_WEIGHT}")] = tensor
    return found


#: By what safetensors calls them.
_TYPES = {
    "I8": torch.int8, "U8": torch.uint8, "I32": torch.int32, "I64": torch.int64,
    "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32,
}  # fmt: skip
_OF_CODES = (torch.int8, torch.uint8, torch.int32)


def _tensors(files: Iterable[str], names: Collection[str]) -> dict[str, torch.Tensor]:
    """The tensors in ``files`` whose last names are among ``names``, without data."""
    found: dict[str, torch.Tensor] = {}
    for file in files:
        with safe_open(file, framework="pt") as stored:
            for key in stored.keys():  # noqa: SIM118
                if key.rpartition(".")[2] not in names:
                    continue
                part = stored.get_slice(key)
                if (dtype := _TYPES.get(part.get_dtype())) is not None:
                    found[key] = torch.empty(part.get_shape(), dtype=dtype, device="meta")
    return found
