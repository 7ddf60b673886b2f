"""Which layers of a checkpoint are int8: what its files hold decides."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from safetensors import safe_open
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from x86quant.errors import InvalidInputError, UnsupportedError

#: What the codes of a layer are called, by whose files they are in.
_CODES = {"x86quant": "int8_weight", "compressed-tensors": "weight"}


def stored_layers(
    model: Any,
    layers: Mapping[str, object],
    files: Sequence[str] | None,
    checkpoint: str,
) -> set[str]:
    """The paths of those of ``layers`` whose int8 codes are in ``files``.

    Names in files are changed as transformers will change them, which knows other names of layers
    and the prefix of the base model.

    Raises:
        InvalidInputError: there are no such files, or no codes in them.
        UnsupportedError: a layer is stored in a form that is not the model's.
    """
    if not files or not all(str(file).endswith(".safetensors") for file in files):
        raise InvalidInputError("an int8 model can be loaded from a folder of safetensors only")
    suffix = f".{_CODES[checkpoint]}"
    known = {path + suffix: True for path in layers}
    conversions = get_model_conversion_mapping(model)
    renamings = [x for x in conversions if isinstance(x, WeightRenaming)]
    converters = [x for x in conversions if isinstance(x, WeightConverter)]
    found: set[str] = set()
    codes = [key for key in _int8_tensors(files) if key.endswith(suffix)]
    for key in codes:
        name, converter = rename_source_key(
            key, renamings, converters, model.base_model_prefix, known
        )
        if converter is not None:
            raise UnsupportedError(
                f"{key} is stored in int8 as one tensor that {type(model).__name__} splits or "
                "merges, which can be done in float only"
            )
        if name in known:
            found.add(name.removesuffix(suffix))
    if layers and not found:
        kinds = "no int8 weights at all" if not codes else f"others, such as {codes[0]}"
        raise InvalidInputError(
            f"the checkpoint has no int8 weights for {type(model).__name__}: it holds {kinds}"
        )
    return found


def _int8_tensors(files: Iterable[str]) -> Iterator[str]:
    for file in files:
        with safe_open(file, framework="pt") as stored:
            for key in stored.keys():  # noqa: SIM118
                if stored.get_slice(key).get_dtype() == "I8":
                    yield key
