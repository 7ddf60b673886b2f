"""Which kernel looks up the bags of one embedding table, by the rules."""

from __future__ import annotations

from typing import Any

import torch

from x86quant.kernels import lookup_kernels
from x86quant.routing.in_force import routing_in_force
from x86quant.routing.routes import Routes
from x86quant.spec import OpSpec, lookup_spec


def lookup_routes(spec: OpSpec) -> Routes:
    """The kernel for every number of bags.

    Raises:
        UnsupportedError: an override names a kernel that cannot look up this table.
    """
    return routing_in_force(lookup_kernels()).route(spec)


def pack_embedding(weight: torch.Tensor) -> Any:
    """The packed table that a stock module holds, with lookups by the rules.

    Args:
        weight: quantized, a row each embedding, as ``quantized::embedding_bag_prepack`` takes it.
    """
    bits = {torch.quint8: 8, torch.quint4x2: 4}.get(weight.dtype, 2)
    routes = lookup_routes(
        lookup_spec(
            max(1, weight.shape[0]), weight.shape[1], bits, "sum", stock_rows=True, caller="stock"
        )
    )
    return torch.ops.x86quant.pack_embedding(
        weight, [*routes.row_limits[:-1], 2**62], list(routes.kernels), routes.to_json()
    )
