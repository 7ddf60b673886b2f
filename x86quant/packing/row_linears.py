"""Packed weights of products of row codes: made once, found again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from x86quant import extension
from x86quant.packing.linear_dynamic import extension_loads, remembered

#: Of a linear: int8 weight [N, K], a scale an output feature, bias.
Weights = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
#: For each product of a pack what a pack of the same weights has returned among its ``blobs``.
Known = Sequence[torch.Tensor | None]


def row_linear(weights: Weights, activation: str | None, known: Known = (None,)) -> Any | None:
    """The packed ``weights``; None where there are none, or nothing compiled to read them."""
    if weights[0].numel() == 0 or not extension_loads():
        return None
    return remembered(
        "row_linear",
        weights,
        activation,
        lambda: extension.native().pack_row_linear(*weights, activation, *known),
    )


def gated_rows(
    gate: Weights, up: Weights, activation: str, known: Known = (None, None)
) -> Any | None:
    """The packed weights of both products of a gated layer; None as for ``row_linear``."""
    if gate[0].numel() == 0 or not extension_loads():
        return None
    return remembered(
        "gated_rows",
        (*gate, *up),
        activation,
        lambda: extension.native().pack_gated_rows(*gate, *up, activation, *known),
    )
