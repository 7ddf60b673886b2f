"""Tables and the layers that are tied to them hold one tensor of codes, and one of scales."""

from __future__ import annotations

import torch
from torch import nn

from x86quant.dynamic.layers import Int8Linear, WeightOnlyEmbedding

OPERANDS = ("int8_weight", "weight_scale")
_Layer = Int8Linear | WeightOnlyEmbedding


def share_codes(model: nn.Module) -> None:
    """Let layers in ``model`` hold the tensors of the first table that has the same numbers.

    A head that a float model ties to its table is made of the same weight, and so of the same
    codes, unless these were chosen by what it is given.
    """
    tables: list[WeightOnlyEmbedding] = []
    for layer in _tables_first(model).values():
        table = next((x for x in tables if _same(layer, x)), None)
        if table is not None:
            for name in OPERANDS:
                setattr(layer, name, getattr(table, name))
        elif isinstance(layer, WeightOnlyEmbedding):
            tables.append(layer)


def holders_of_others(model: nn.Module) -> list[str]:
    """The paths of layers in ``model`` that hold the tensors of a table before them."""
    seen: set[tuple[int, int]] = set()
    found = []
    for path, layer in _tables_first(model).items():
        ids = (id(layer.int8_weight), id(layer.weight_scale))
        if ids in seen:
            found.append(path)
        elif isinstance(layer, WeightOnlyEmbedding):
            seen.add(ids)
    return found


def _tables_first(model: nn.Module) -> dict[str, _Layer]:
    layers = {path: m for path, m in model.named_modules() if isinstance(m, _Layer)}
    order = sorted(layers, key=lambda path: not isinstance(layers[path], WeightOnlyEmbedding))
    return {path: layers[path] for path in order}


def _same(layer: _Layer, table: _Layer) -> bool:
    pairs = [(getattr(layer, name), getattr(table, name)) for name in OPERANDS]
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)
