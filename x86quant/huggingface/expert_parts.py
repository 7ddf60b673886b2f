"""Experts in codes as others' files hold them: linears of their own for gate, up and down.

transformers merges such linears, in float, into one tensor for all experts of a layer; which ones,
and in what order, its converters say. Here they stay apart until their codes are there, below the
module of experts by the names that files have (``experts.3.gate_proj``), and then become the
linears that :mod:`x86quant.dynamic.experts` computes with.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter

from x86quant.dynamic import ReorderedLinear
from x86quant.dynamic.experts import (
    LINEARS,
    drop_tensors,
    expert_tensors,
    expert_weights,
    is_experts,
    take_linears,
    why_float_experts,
)
from x86quant.dynamic.group_weights import joined
from x86quant.dynamic.layers import Int8Linear
from x86quant.errors import UnsupportedError

_SOURCE = re.compile(r"\.\*\.(\w+)\.weight\$?")
_PART = re.compile(r"(.*)\.(\d+)\.(\w+)")


def expert_parts(model: nn.Module, conversions: Iterable[Any]) -> dict[str, nn.Linear]:
    """Linears without memory that files may have for experts of ``model``, by path."""
    merging = [x for x in conversions if merges_experts(x)]
    found: dict[str, nn.Linear] = {}
    for path, module in model.named_modules():
        if not is_experts(module) or why_float_experts(module) or module.has_bias:
            continue
        for tensor, names in _names(path, module, merging).items():
            weights = expert_weights(module, tensor, module.get_parameter(tensor))
            for i, weight in enumerate(weights):
                rows = len(weight) // len(names)
                for name in names:
                    linear = nn.Linear(weight.shape[1], rows, bias=False, device="meta")
                    found[f"{path}.{i}.{name}"] = linear
    return found


def merges_experts(conversion: Any) -> bool:
    """Whether this converter of transformers' makes one tensor of linears of experts."""
    if not isinstance(conversion, WeightConverter) or len(conversion.target_patterns) != 1:
        return False
    kinds = [(type(x), getattr(x, "dim", None)) for x in conversion.operations]
    sources = conversion.source_patterns
    expected = [(MergeModulelist, 0), (Concatenate, 1)][: 1 if len(sources) == 1 else 2]
    return kinds == expected and all(_SOURCE.search(source) for source in sources)


def open_parts(model: nn.Module, paths: Iterable[str]) -> None:
    """Let there be empty modules at those of ``paths`` that :func:`expert_parts` has given.

    Raises:
        UnsupportedError: of the experts of a layer some linears are not among ``paths``.
    """
    by_module: dict[str, set[tuple[str, str]]] = {}
    for path in paths:
        found = _PART.fullmatch(path)
        if found is not None and is_experts(_at(model, found[1])):
            by_module.setdefault(found[1], set()).add((found[2], found[3]))
    for path, parts in by_module.items():
        experts: Any = model.get_submodule(path)
        names = {name for _, name in parts}
        for i in range(experts.num_experts):
            for name in sorted(names):
                if (str(i), name) not in parts:
                    raise UnsupportedError(
                        f"{path}.{i}.{name} is not in codes, where others of these experts are: "
                        "load the float model with X86QuantConfig"
                    )
            experts._modules[str(i)] = nn.ModuleDict({name: nn.Identity() for name in names})
        drop_tensors(experts)


def join_parts(model: nn.Module, conversions: Sequence[Any]) -> None:
    """Make the linears of experts of the parts in ``model``, which are int8 linears by now."""
    merging = [x for x in conversions if merges_experts(x)]
    for path, module in model.named_modules():
        if not is_experts(module) or "0" not in module._modules:
            continue
        experts: Any = module
        parts = [experts._modules.pop(str(i)) for i in range(experts.num_experts)]
        for tensor, names in _names(path, experts, merging, list(parts[0])).items():
            made = [_one(path, [part[name] for name in names]) for part in parts]
            take_linears(experts, tensor, nn.ModuleList(made))


def _one(path: str, parts: Sequence[Any]) -> nn.Module:
    """The linear whose output features are those of all ``parts``, one part after the other."""
    orders = [x.order if isinstance(x, ReorderedLinear) else None for x in parts]
    linears: list[Int8Linear] = [x.linear if isinstance(x, ReorderedLinear) else x for x in parts]
    if len(parts) == 1:
        return parts[0]  # type: ignore[no-any-return]
    first = orders[0]
    same = all(
        x is None if first is None else x is not None and torch.equal(x, first) for x in orders
    )
    if not same:
        raise UnsupportedError(
            f"{path}: linears of one expert have their features in different orders (act-order): "
            "load the float model with X86QuantConfig"
        )
    linear = type(linears[0])(*joined([(x.int8_weight, x.weight_scale) for x in linears]))
    return linear if first is None else ReorderedLinear(linear, first)


def _names(
    path: str, experts: nn.Module, merging: Iterable[Any], there: Sequence[str] | None = None
) -> dict[str, list[str]]:
    """What files call the linears that each float tensor of ``experts`` is made of, in order."""
    found: dict[str, list[str]] = {}
    for tensor in LINEARS if there is not None else expert_tensors(experts):
        for converter in merging:
            if not f"{path}.{tensor}".endswith(converter.target_patterns[0].lstrip(".")):
                continue
            sources = (_SOURCE.search(source) for source in converter.source_patterns)
            names = [source[1] for source in sources if source is not None]
            if there is None or all(name in there for name in names):
                found.setdefault(tensor, names)
    return found


def _at(model: nn.Module, path: str) -> nn.Module:
    try:
        return model.get_submodule(path)
    except AttributeError:
        return nn.Identity()
