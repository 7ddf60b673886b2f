"""From a quantized weight to a routed pack: check it, describe it, choose, pack.

Everything that packs for the stock engine, the prepack overrides and ``reroute``, comes
through ``pack_linear`` and ``pack_conv``.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import torch

from x86quant import extension
from x86quant.errors import InvalidInputError
from x86quant.kernels import all_kernels
from x86quant.kernels.saturation import weight_facts
from x86quant.routing.in_force import routing_in_force
from x86quant.routing.routes import Routes
from x86quant.spec import OpSpec, WeightFacts

Saturation = Literal["exact", "7bit"]


@dataclasses.dataclass(frozen=True)
class ConvGeometry:
    """Everything about a convolution but its weights; tuples have one entry a dimension."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int = 1
    transposed: bool = False
    output_padding: tuple[int, ...] = ()

    def with_height_one(self) -> ConvGeometry:
        """The 2d geometry that a 1d convolution runs as."""
        return ConvGeometry(
            (1, *self.stride),
            (0, *self.padding),
            (1, *self.dilation),
            self.groups,
            self.transposed,
            (0, *self.output_padding),
        )


def pack_linear(
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    layer: str | None = None,
    saturation: Saturation = "exact",
) -> Any:
    """Pack a ``(out, in)`` qint8 weight for the kernels the rules choose."""
    extension.need_stock()
    spec = linear_spec(weight, bias, layer)
    return torch.ops.x86quant.pack_linear(weight, bias, *_routing(spec, saturation, layer))


def pack_conv(
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    geometry: ConvGeometry,
    *,
    layer: str | None = None,
    saturation: Saturation = "exact",
) -> Any:
    """Pack a qint8 convolution weight (3d for conv1d to 5d for conv3d)."""
    extension.need_stock()
    spec = conv_spec(weight, bias, geometry, layer)
    routing = _routing(spec, saturation, layer)
    if spec.dims == 1:
        weight = weight.unsqueeze(2)
        geometry = geometry.with_height_one()
    pack = torch.ops.x86quant.pack_conv3d if spec.dims == 3 else torch.ops.x86quant.pack_conv2d
    return pack(
        weight,
        bias,
        geometry.stride,
        geometry.padding,
        geometry.output_padding,
        geometry.dilation,
        geometry.groups,
        geometry.transposed,
        *routing,
    )


def linear_spec(weight: torch.Tensor, bias: torch.Tensor | None, layer: str | None) -> OpSpec:
    """Describe a linear from its weight."""
    _check_weight(weight, 2, "linear", layer)
    return OpSpec(
        op="linear",
        in_channels=weight.shape[1],
        out_channels=weight.shape[0],
        per_channel=weight.qscheme() == torch.per_channel_affine,
        bias=bias is not None,
        threads=torch.get_num_threads(),
        caller="stock",
        weights=_facts(weight),
    )


def conv_spec(
    weight: torch.Tensor, bias: torch.Tensor | None, geometry: ConvGeometry, layer: str | None
) -> OpSpec:
    """Describe a convolution from its weight and geometry."""
    dims = len(geometry.stride)
    op = f"conv{dims}d"
    _check_weight(weight, dims + 2, op, layer)
    output_padding = geometry.output_padding or (0,) * dims
    first, second = weight.shape[:2]
    groups = geometry.groups
    return OpSpec(
        op=op,  # type: ignore[arg-type]
        in_channels=first if geometry.transposed else second * groups,
        out_channels=second * groups if geometry.transposed else first,
        groups=groups,
        kernel=tuple(weight.shape[2:]),
        stride=geometry.stride,
        padding=geometry.padding,
        dilation=geometry.dilation,
        output_padding=output_padding,
        transposed=geometry.transposed,
        per_channel=weight.qscheme() == torch.per_channel_affine,
        bias=bias is not None,
        threads=torch.get_num_threads(),
        caller="stock",
        weights=_facts(weight, groups, geometry.transposed),
    )


def _facts(weight: torch.Tensor, groups: int = 1, transposed: bool = False) -> WeightFacts:
    zero_points = (
        weight.q_per_channel_zero_points()
        if weight.qscheme() == torch.per_channel_affine
        else torch.tensor(weight.q_zero_point(), dtype=torch.int64)
    )
    facts: WeightFacts = weight_facts(
        weight.int_repr(),
        groups=groups,
        transposed=transposed,
        symmetric=not bool(zero_points.any()),
    )
    return facts


def _check_weight(weight: torch.Tensor, dim: int, op: str, layer: str | None) -> None:
    where = f"{layer} ({op})" if layer else op
    if weight.dtype != torch.qint8:
        raise InvalidInputError(
            f"{where}: the weight has dtype {weight.dtype}, expected torch.qint8. Quantize it "
            "with a qconfig whose weight observer has dtype=torch.qint8, such as "
            "x86quant.get_default_qconfig_mapping()."
        )
    if weight.dim() != dim:
        raise InvalidInputError(
            f"{where}: the weight has shape {tuple(weight.shape)}, expected {dim} dimensions."
        )
    scales = (
        weight.q_per_channel_scales()
        if weight.qscheme() == torch.per_channel_affine
        else torch.tensor([weight.q_scale()], dtype=torch.float32)
    )
    bad = (~torch.isfinite(scales) | (scales <= 0)).nonzero().flatten().tolist()
    if bad:
        raise InvalidInputError(
            f"{where}: the weight scale of output channel {bad[0]} is {scales[bad[0]].item()} "
            f"({len(bad)} of {len(scales)} channels are not finite and positive). The float "
            "weight holds NaN or infinity, or its observer saw none: check the float model."
        )


def _routing(spec: OpSpec, saturation: Saturation, layer: str | None) -> tuple[Any, ...]:
    """How the weights run, as the packs in C++ take it."""
    routes, activation_max = _choose_routes(spec, saturation)
    kernels = all_kernels()
    return (
        routes.row_limits,
        [kernels[choice.kernel].engine for choice in routes.choices],
        routes.situations,
        routes.detour_numbers,
        routes.to_json(),
        f"layer {layer} ({spec})" if layer else str(spec),
        activation_max,
    )


def _choose_routes(spec: OpSpec, saturation: Saturation) -> tuple[Routes, int]:
    """The choices, and the largest activation code they are exact for."""
    routing = routing_in_force(all_kernels())
    wide = routing.route(spec)
    if saturation == "7bit":
        narrow = routing.route(spec.replace(activation_max=127))
        if narrow.kernels != wide.kernels:
            return narrow, 127
    return wide, 255
