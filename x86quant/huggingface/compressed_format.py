"""The settings of compressed-tensors files: which of its many formats can be read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from x86quant.errors import InvalidInputError, UnsupportedError

METHOD = "compressed-tensors"
#: Formats that store a byte for each weight, whatever its bits.
_BYTES = (None, "int-quantized", "naive-quantized")
#: Codes of 4 or 8 bits, several in a word of 32.
_PACKED = "pack-quantized"
_STRATEGIES = ("group", "channel", "tensor")


def checked(settings: Mapping[str, Any]) -> str:
    """The name in ``checkpoint_formats.FORMATS`` of files with these ``settings``.

    They mean weights of 4 or 8 bits by group, channel or tensor, with or without zero points, a
    byte each or packed; and activations as they are, or int8 by token.

    Raises:
        InvalidInputError: they are not of compressed-tensors.
        UnsupportedError: they are of another format; says which and what is missing.
    """
    method = settings.get("quant_method")
    if method != METHOD:
        raise InvalidInputError(
            f"these are settings of {method!r}, where those of {METHOD!r} are expected"
        )
    if settings.get("transform_config"):
        raise _refusal("its transform_config asks for transforms of weights and activations")
    sparsity = settings.get("sparsity_config") or {}
    if sparsity.get("format", "dense") != "dense":
        raise _refusal(f"its weights are stored as {sparsity['format']!r}, which needs unpacking")
    groups = settings.get("config_groups") or {}
    if not isinstance(groups, Mapping) or not groups:
        raise InvalidInputError(f"these settings of {METHOD} have no config_groups")
    found = set()
    for name, group in groups.items():
        if not isinstance(group, Mapping):
            raise _refusal(f"its {name} is the preset {group!r} without its settings")
        stored = group.get("format") or settings.get("format")
        if stored != _PACKED and stored not in _BYTES:
            raise _refusal(f"{name} is stored as {stored!r}, which needs another unpacking")
        found.add(stored == _PACKED)
        _check_weights(f"{name}.weights", group.get("weights"))
        if group.get("input_activations"):
            _check_inputs(f"{name}.input_activations", group["input_activations"])
        if group.get("output_activations"):
            raise _refusal(f"{name} asks for quantized output_activations")
    if len(found) > 1:
        raise _refusal("some of its layers are packed and others are not")
    return f"{METHOD}-packed" if True in found else METHOD


def cache_note(settings: Mapping[str, Any]) -> str | None:
    """What is done in place of the cache that these settings ask for; None if they ask for none."""
    scheme = settings.get("kv_cache_scheme")
    if not scheme:
        return None
    asked = "one of another type"
    if isinstance(scheme, Mapping):
        asked = f"{scheme.get('type', 'int')}{scheme.get('num_bits', 8)}"
        asked += f" with a scale by {scheme.get('strategy') or 'tensor'}"
    return (
        f"the checkpoint asks for a cache of keys and values in {asked}, chosen beforehand: the "
        "cache is what generate is given, float by default; past_key_values=x86quant.Int8Cache("
        "model.config) keeps 8 bits, with a scale for each token and head in place of those stored"
    )


def _check_weights(name: str, numbers: Any) -> None:
    if not isinstance(numbers, Mapping):
        raise _refusal(f"{name} is {numbers!r}, where settings are expected")
    bits, kind = numbers.get("num_bits", 8), numbers.get("type", "int")
    if bits not in (4, 8) or kind != "int":
        raise _refusal(f"{name} are {kind}{bits}, for which there are no kernels")
    if numbers.get("strategy") not in _STRATEGIES:
        raise _refusal(f"{name} have a scale by {numbers.get('strategy')!r}")
    if numbers.get("dynamic", False):
        raise _refusal(f"{name} are not static, for which there are no kernels")


def _check_inputs(name: str, numbers: Any) -> None:
    """Check settings of activations: ours are int8 by token, with a range that need not be even."""
    if not isinstance(numbers, Mapping):
        raise _refusal(f"{name} is {numbers!r}, where settings are expected")
    bits, kind = numbers.get("num_bits", 8), numbers.get("type", "int")
    if (bits, kind) != (8, "int"):
        raise _refusal(f"{name} are {kind}{bits}, for which there are no kernels")
    if numbers.get("strategy") != "token":
        raise _refusal(
            f"{name} have a scale by {numbers.get('strategy')!r}, where kernels have one by 'token'"
        )
    if numbers.get("dynamic", False) is not True:
        raise _refusal(f"{name} are not dynamic, for which there are no kernels")


def _refusal(what: str) -> UnsupportedError:
    return UnsupportedError(
        f"this {METHOD} checkpoint cannot be read: {what}; what can be read are weights of 4 or 8 "
        "bits by group, channel or tensor, with float activations or int8 ones by token (W4A16, "
        "W8A16, W4A8, W8A8)"
    )
