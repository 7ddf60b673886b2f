"""Front end: how a graph of our own says what is int8, on plain float tensors.

``quantize`` and the reader of exported models write these; ``from_fx`` reads them. Whatever stands
between them is float code, so such a graph runs as it is, and needs no quantized tensors of torch.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn

from x86quant.lowering.graph_tools import op
from x86quant.ops.recurrence import empty_states_and_last


class Int8Weight(NamedTuple):
    """A weight as codes and scales.

    Attributes:
        codes: int8, in the weight's own shape.
        scales: one for each index of ``axis``, or one for all.
        axis: the dimension of output channels.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    axis: int

    def real(self) -> torch.Tensor:
        """The float weight that the codes stand for."""
        found: torch.Tensor = op("dequantize_weight")(self.codes, self.scales, self.axis)
        return found


def rounded(x: torch.Tensor, scale: float, zero_point: int) -> torch.Tensor:
    """The values of ``x`` as uint8 codes can say them, in the order in which ``x`` lies.

    The op for images lays them out anew, and the float code that follows may view its input.
    """
    strides = torch.empty_like(x, device="meta").stride()
    order = sorted(range(x.dim()), key=strides.__getitem__, reverse=True)
    lying = x.permute(order)
    codes = op("quantize")(lying.reshape(-1), out_scale=scale, out_zp=zero_point)
    real: torch.Tensor = op("dequantize")(codes, x_scale=scale, x_zp=zero_point)
    return real.view(lying.shape).permute(sorted(range(x.dim()), key=order.__getitem__))


def rounded_weight(codes: torch.Tensor, scales: torch.Tensor, axis: int) -> torch.Tensor:
    """The weight of a function such as ``F.linear``; codes and scales are constants."""
    return Int8Weight(codes, scales, axis).real()


class RoundedLayer(nn.Module):
    """A convolution or linear whose weight is int8."""

    def __init__(
        self,
        layer: nn.Module,
        weight: Int8Weight,
        bias: torch.Tensor | None,
        real: torch.Tensor | None = None,
    ) -> None:
        """``layer`` with other parameters; ``real`` is what ``weight`` stands for, if known."""
        super().__init__()
        self.weight = weight
        self.layer = copy.copy(layer)
        real = weight.real() if real is None else real.detach()
        self.layer._parameters = {  # the copy's own
            "weight": nn.Parameter(real, requires_grad=False),
            "bias": None if bias is None else nn.Parameter(bias.detach(), requires_grad=False),
        }

    def with_bias(self, bias: torch.Tensor) -> RoundedLayer:
        """The same with another bias."""
        return RoundedLayer(self.layer, self.weight, bias, self.layer.weight)  # type: ignore[arg-type]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The layer's float result for ``x``."""
        found: torch.Tensor = self.layer(x)
        return found


class RoundedRecurrent(nn.Module):
    """One layer of an LSTM or a GRU with int8 weights, and states that codes say between steps.

    Attributes:
        weights: of the input and of the state, a pair for each direction.
        biases: one for each of them.
        kind, batch_first: as ``torch.ops.x86quant.recurrent`` takes them.
        x_qparams, h_qparams: scale and zero point of the codes of the input and of the states.
        returns_last: whether it returns the last cells or states, too.
    """

    def __init__(
        self,
        weights: list[Int8Weight],
        biases: list[torch.Tensor],
        kind: str,
        batch_first: bool,
        x_qparams: tuple[float, int],
        h_qparams: tuple[float, int],
        returns_last: bool = False,
    ) -> None:
        super().__init__()
        self.weights, self.biases = weights, biases
        self.kind, self.batch_first = kind, batch_first
        self.x_qparams, self.h_qparams = x_qparams, h_qparams
        self.returns_last = returns_last

    def arguments(self) -> dict[str, object]:
        """Those of the operator that are no tensors."""
        (x_scale, x_zp), (h_scale, h_zp) = self.x_qparams, self.h_qparams
        return {
            "kind": self.kind,
            "batch_first": self.batch_first,
            "x_scale": x_scale,
            "x_zp": x_zp,
            "out_scale": h_scale,
            "out_zp": h_zp,
        }

    def forward(
        self, x: torch.Tensor, h: torch.Tensor | None = None, c: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """The states at all steps, as their codes say them; perhaps the last cells or states."""
        (x_scale, x_zp), (h_scale, h_zp) = self.x_qparams, self.h_qparams
        found, last = op("recurrent_last")(
            op("quantize")(x, out_scale=x_scale, out_zp=x_zp),
            [weight.codes for weight in self.weights],
            [weight.scales for weight in self.weights],
            self.biases,
            **self.arguments(),
            h=h,
            c=c,
        )
        real: torch.Tensor = op("dequantize")(found, x_scale=h_scale, x_zp=h_zp)
        return (real, last) if self.returns_last else real

    def zeros(self, x: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Of the sizes that are returned for ``x``: to compute step by step in torch takes long."""
        codes = [weight.codes for weight in self.weights]
        real, last = (t.zero_() for t in empty_states_and_last(x, codes, self.batch_first))
        return (real, last) if self.returns_last else real


class FusedLayer(nn.Sequential):
    """A layer and the activation behind it, between which nothing is rounded."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The activation's result, in place of the layer's where nobody else has seen that."""
        layer, *activations = self
        y: torch.Tensor = layer(x)
        if not layer._forward_hooks:
            return self.behind(y)
        for activation in activations:
            y = activation(y)
        return y

    def behind(self, y: torch.Tensor) -> torch.Tensor:
        """What the activation makes of ``y``, a product that nobody else has seen."""
        _, *activations = self
        for activation in activations:
            y = activated(y, activation)
        return y


#: What is computed in place.
_IN_PLACE: dict[type[nn.Module], Callable[[torch.Tensor], torch.Tensor]] = {
    nn.ReLU: torch.relu_,
    nn.ReLU6: functools.partial(torch.clamp_, min=0.0, max=6.0),
}


def activated(y: torch.Tensor, activation: nn.Module) -> torch.Tensor:
    """What ``activation`` makes of ``y``, a product that nobody else has seen."""
    hooked = activation._forward_hooks or activation._forward_pre_hooks
    quick = None if hooked or y.requires_grad else _IN_PLACE.get(type(activation))
    found: torch.Tensor = (quick or activation)(y)
    return found
