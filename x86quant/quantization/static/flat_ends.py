"""Where an activation is flat: values beyond need no codes before it.

A hard swish is zero below -3, however far below, and a table reads its input as codes. To spend
them on what the table tells apart is worth a bit or two of the layer in front.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn
from torch.fx import Node
from torch.fx.node import map_arg

from x86quant.lowering.normalize import UNARY, normalized_node

#: Where functions are looked at: at the largest values of networks, closely, and where they do
#: what they are for.
_BEYOND, _FAR, _NEAR = 1e4, 64.0, 8.0
_POINTS = 16385
#: What differs by less than this share of what a function gives near zero is one value.
_FLAT = 2.0**-12


def useful_range(
    source: Node, steps: Collection[Node], last: Node, modules: Mapping[str, nn.Module]
) -> tuple[float, float] | None:
    """Between which values of ``source`` the function ``last`` of it, made of ``steps``, changes.

    None if it does everywhere, or is no function of one number.
    """
    x = torch.linspace(-_FAR, _FAR, _POINTS, dtype=torch.float32, device="cpu")
    x = torch.cat([x.new_tensor([-_BEYOND]), x, x.new_tensor([_BEYOND])])
    try:
        with torch.no_grad():
            y = _run(source, steps, last, modules, x)
    except Exception:  # a step that takes no row of numbers
        return None
    if not isinstance(y, torch.Tensor) or y.shape != x.shape or not bool(y.isfinite().all()):
        return None
    near = y[x.abs() <= _NEAR]
    tolerance = _FLAT * float(near.max() - near.min())
    low = int(_length_of_start((y - y[0]).abs() <= tolerance))
    high = int(_length_of_start((y - y[-1]).abs().flip(0) <= tolerance))
    if low + high >= len(x):
        return None  # it is the same everywhere
    # What changes slowly is flat for a while wherever one begins to look.
    least, most = float(x[low - 1]), float(x[-high])
    least = least if least >= -_FAR / 2 else -math.inf
    most = most if most <= _FAR / 2 else math.inf
    return None if least == -math.inf and most == math.inf else (least, most)


def _length_of_start(holds: torch.Tensor) -> int:
    """How many of the first all hold."""
    return len(holds) if bool(holds.all()) else int(holds.to(torch.uint8).argmin())


def _run(
    source: Node,
    steps: Collection[Node],
    last: Node,
    modules: Mapping[str, nn.Module],
    x: torch.Tensor,
) -> Any:
    values: dict[Node, Any] = {source: x}
    for node in last.graph.nodes:
        if node not in steps:
            continue
        args = map_arg(node.args, values.__getitem__)
        kwargs = map_arg(node.kwargs, values.__getitem__)
        if node.op == "call_function":
            values[node] = node.target(*args, **kwargs)
        elif node.op == "call_method":
            values[node] = getattr(args[0], str(node.target))(*args[1:], **kwargs)
        else:
            values[node] = modules[str(node.target)](*args, **kwargs)
    return values[last]


def is_unary(node: Node, modules: Mapping[str, nn.Module]) -> bool:
    """Whether ``node`` computes each value of one tensor by itself."""
    module = modules.get(str(node.target)) if node.op == "call_module" else None
    call = normalized_node(node, module) if node.op.startswith("call_") else None
    return call is not None and call[0] in UNARY and len(node.all_input_nodes) == 1
