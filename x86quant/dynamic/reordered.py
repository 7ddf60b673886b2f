"""A linear whose weight has its input features in another order: that of GPTQ's act-order."""

from __future__ import annotations

import torch
from torch import nn

from x86quant.dynamic.layers import Int8Linear


class ReorderedLinear(nn.Module):
    """``linear`` of the features of an input in another order.

    GPTQ's act-order gives features to groups by how much they count, so those of a group do not lie
    side by side. Here the weight's do, and each input is rearranged to meet it.

    Attributes:
        linear: a linear by a weight whose columns are in the order of its groups.
        order: int64 [in_features], the input feature that meets each column.
    """

    def __init__(self, linear: Int8Linear, order: torch.Tensor) -> None:
        super().__init__()
        self.linear = linear
        self.order: torch.Tensor
        self.register_buffer("order", order)
        self.eval()

    @property
    def weight(self) -> torch.Tensor:
        """The float weight that the codes stand for, its features in their own order."""
        return self.linear.weight[:, torch.argsort(self.order)]

    @property
    def in_features(self) -> int:
        """Size of an input row."""
        return self.linear.in_features

    @property
    def out_features(self) -> int:
        """Size of an output row."""
        return self.linear.out_features

    @property
    def bias(self) -> torch.Tensor | None:
        """The bias of ``linear``."""
        return self.linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` [..., in_features] to [..., out_features]."""
        out: torch.Tensor = self.linear(x.index_select(-1, self.order))
        return out
