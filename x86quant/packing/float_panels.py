"""Weights of float products as the native loops read them (``kernels/native/float_products.h``)."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812

#: Output features whose weights lie side by side.
PANEL = 16


def float_panels(
    weight: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights (out, in) as [panel, in, PANEL] and biases of whole panels, filled up with 0."""
    outputs, features = weight.shape
    more = -outputs % PANEL
    rows = F.pad(weight, (0, 0, 0, more)).reshape(-1, PANEL, features)
    biases = weight.new_zeros(outputs) if bias is None else bias
    return rows.transpose(1, 2).contiguous(), F.pad(biases, (0, more))
