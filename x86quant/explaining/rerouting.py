"""``reroute(model)``: choose kernels again for a model that is already packed.

No stock format records which kernel a layer was packed for: ``deepcopy``, ``torch.load`` and
``torch.jit.load`` pack again in C++, by the stock rules. This restores the router's choices,
and it is how a model packed under one rule table moves to another.
"""

from __future__ import annotations

from typing import Any

import torch

from x86quant import extension
from x86quant.compiled.compiled_parts import compiled_parts
from x86quant.dynamic import (
    DynamicLinear,
    DynamicMultiheadAttention,
    DynamicRecurrent,
    WeightOnlyEmbeddingBag,
)
from x86quant.explaining.explanation import cell_parts
from x86quant.packing.embedding_tables import pack_embedding
from x86quant.packing.routed import ConvGeometry, pack_conv, pack_linear
from x86quant.stock.hook import saturation_policy
from x86quant.stock.pack_sites import PackSite, pack_sites


def reroute(model: torch.nn.Module) -> torch.nn.Module:
    """Pack every int8 layer of ``model`` again, in place, by the rules now in force.

    Works under any engine and whether or not routing is enabled. The linears of ``to_dynamic`` and
    compiled models, whole or parts, pack again at their next call. Returns ``model``.
    """
    extension.load()
    for site in list(pack_sites(model)):
        site.replace(_repack(site))
    for module in model.modules():
        if isinstance(module, DynamicLinear | DynamicRecurrent | WeightOnlyEmbeddingBag):
            module.pack_again()
        elif isinstance(module, DynamicMultiheadAttention):
            for part in module.separate_parts:
                part.pack_again()
    for _, graph in compiled_parts(model):
        graph.plan_again()
    return model


def _repack(site: PackSite) -> Any:
    if site.kind == "linear":
        return _repack_linear(site.pack, site.layer)
    if site.kind == "embedding":
        return pack_embedding(torch.ops.quantized.embedding_bag_unpack(site.pack))
    if site.kind == "cell":
        return _repack_cell(site.pack, site.layer)
    return _repack_conv(site)


def _repack_linear(pack: Any, layer: str) -> Any:
    weight, bias = torch.ops.quantized.linear_unpack(pack)
    return pack_linear(weight, bias, layer=layer, saturation=saturation_policy())


def _repack_cell(pack: Any, layer: str) -> Any:
    packed_ih, packed_hh, bias_ih, bias_hh, reduce_range = cell_parts(pack)
    return torch.ops.quantized.make_quantized_cell_params_dynamic(
        _repack_linear(packed_ih, f"{layer}.ih"),
        _repack_linear(packed_hh, f"{layer}.hh"),
        bias_ih,
        bias_hh,
        reduce_range,
    )


def _repack_conv(site: PackSite) -> Any:
    pack, ops = site.pack, torch.ops.quantized
    # The plain and the transposed op families read the same packed object.
    unpack, at = (
        (ops.conv2d_unpack, "conv2d") if site.kind == "conv2d" else (ops.conv3d_unpack, "conv3d")
    )
    weight, bias = unpack(pack)

    def read(field: str) -> Any:
        return getattr(ops, f"{at}_{field}")(pack)

    geometry = ConvGeometry(
        tuple(read("stride")),
        tuple(read("padding")),
        tuple(read("dilation")),
        read("groups"),
        bool(read("transpose")),
        tuple(read("output_padding")),
    )
    if "1d" in site.class_name:  # packed as a conv2d of height 1; only its module tells
        weight = weight.squeeze(2)
        geometry = ConvGeometry(
            geometry.stride[1:],
            geometry.padding[1:],
            geometry.dilation[1:],
            geometry.groups,
            geometry.transposed,
            geometry.output_padding[1:],
        )
    return pack_conv(weight, bias, geometry, layer=site.layer, saturation=saturation_policy())
