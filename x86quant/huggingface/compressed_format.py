"""The settings of compressed-tensors files: which of its many formats can be read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from x86quant.errors import InvalidInputError, UnsupportedError

METHOD = "compressed-tensors"
#: Formats that store one int8 code a weight.
_INT8_FORMATS = (None, "int-quantized", "naive-quantized")


#: Codes of 4 or 8 bits, several in a word of 32.
_PACKED = "pack-quantized"


def checked(settings: Mapping[str, Any]) -> str:
    """The name in ``checkpoint_formats.FORMATS`` of files with these ``settings``.

    They mean int8 weights by channel and int8 activations by token; or packed weights of 4 or 8
    bits by group or channel, and activations as they are.

    Raises:
        InvalidInputError: they are not of compressed-tensors.
        UnsupportedError: they are of another format; says which and what is missing.
    """
    method = settings.get("quant_method")
    if method != METHOD:
        raise InvalidInputError(
            f"these are settings of {method!r}, where those of {METHOD!r} are expected"
        )
    for key, what in (
        ("kv_cache_scheme", "a quantized cache of keys and values"),
        ("transform_config", "transforms of weights and activations"),
    ):
        if settings.get(key):
            raise _refusal(f"its {key} asks for {what}")
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
        found.add(stored == _PACKED)
        if stored == _PACKED:
            _check_packed(name, group)
            continue
        if stored not in _INT8_FORMATS:
            raise _refusal(f"{name} is stored as {stored!r}, which needs another unpacking")
        _check_numbers(f"{name}.weights", group.get("weights"), "channel", dynamic=False)
        _check_numbers(
            f"{name}.input_activations", group.get("input_activations"), "token", dynamic=True
        )
        if group.get("output_activations"):
            raise _refusal(f"{name} asks for quantized output_activations")
    if len(found) > 1:
        raise _refusal("some of its layers are packed and others are not")
    return "compressed-tensors-packed" if True in found else METHOD


def _check_packed(name: str, group: Mapping[str, Any]) -> None:
    """Check the settings of packed weights against what there is."""
    for other in ("input_activations", "output_activations"):
        if group.get(other):
            raise _refusal(f"{name} asks for packed weights and quantized {other}")
    weights = group.get("weights")
    if not isinstance(weights, Mapping):
        raise _refusal(f"{name} has packed weights without their settings")
    bits, kind = weights.get("num_bits"), weights.get("type", "int")
    if bits not in (4, 8) or kind != "int":
        raise _refusal(f"{name}.weights are {kind}{bits}, for which there are no kernels")
    if weights.get("strategy") not in ("group", "channel"):
        raise _refusal(f"{name}.weights have a scale by {weights.get('strategy')!r}")


def _check_numbers(name: str, numbers: Any, strategy: str, *, dynamic: bool) -> None:
    """Check the settings of weights or activations against what there is."""
    if not isinstance(numbers, Mapping):
        raise _refusal(f"{name} is {numbers!r}, and quantizing both sides is needed")
    bits, kind = numbers.get("num_bits", 8), numbers.get("type", "int")
    if (bits, kind) != (8, "int"):
        raise _refusal(f"{name} are {kind}{bits}, for which there are no kernels")
    if not numbers.get("symmetric", True):
        raise _refusal(f"{name} are asymmetric, for which there are no kernels")
    found = numbers.get("strategy")
    if found != strategy:
        raise _refusal(f"{name} have a scale by {found!r}, where kernels have one by {strategy!r}")
    if numbers.get("dynamic", False) is not dynamic:
        now = "dynamic" if dynamic else "static"
        raise _refusal(f"{name} are not {now}, for which there are no kernels")
    if numbers.get("actorder") in ("group", True):
        raise _refusal(f"{name} are reordered in groups (actorder), which kernels do not undo")


def _refusal(what: str) -> UnsupportedError:
    return UnsupportedError(
        f"this {METHOD} checkpoint cannot be read: {what}; what can be read is W8A8 int8, with "
        "symmetric weights by channel and dynamic activations by token, and weights of 4 or 8 "
        "bits alone, packed, by group or channel"
    )
