"""``x * sigmoid(c * x)`` behind a linear, such as CLIP's activation, becomes SiLU.

It is ``silu(c * x) / c``: the linear is scaled by c, and what reads it by a c-th.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from x86quant.lowering.graph_tools import (
    add_constant,
    constant,
    finish,
    is_op,
    nodes_of,
    set_kwargs,
)
from x86quant.lowering.row_passes._values import call, is_float32, same_sizes, value_of

aten = torch.ops.aten


def run(gm: GraphModule) -> int:
    """Apply the pass to ``gm``; returns the number of activations."""
    changed = 0
    for linear in nodes_of(gm, "linear_dynamic"):
        found = _gated(linear)
        if found is None or linear.kwargs["activation"] is not None:
            continue
        result, factor = found
        if not _scaled(gm, linear, ("weight_scale", "bias"), factor):
            continue
        set_kwargs(linear, activation="silu")
        _divide(gm, linear, result, factor)
        changed += 1
    return finish(gm, changed)


def _gated(x: Node) -> tuple[Node, float] | None:
    """``x * sigmoid(c * x)``, which alone reads ``x``, and c."""
    for result in x.users:
        if result.target is not aten.mul.Tensor or not same_sizes(x, result):
            continue
        a, b = result.args[:2]
        sigmoid = b if a is x else a
        if not isinstance(sigmoid, Node) or sigmoid.target is not aten.sigmoid.default:
            continue
        inner, factor = sigmoid.args[0], 1.0
        reader = sigmoid
        if inner is not x and isinstance(inner, Node) and inner.target is aten.mul.Tensor:
            number = inner.args[1]
            if inner.args[0] is not x or not isinstance(number, int | float) or number <= 0:
                continue
            reader, inner, factor = inner, x, float(number)
        alone = set(x.users) == {result, reader} and set(sigmoid.users) == {result}
        if inner is x and alone and len(reader.users) == 1 and is_float32(x, result):
            return result, factor
    return None


def _scaled(gm: GraphModule, linear: Node, names: tuple[str, ...], factor: float) -> bool:
    """Multiply arguments of ``linear`` by ``factor``, if all of them are constants."""
    given = {name: linear.kwargs[name] for name in names if linear.kwargs[name] is not None}
    tensors = {name: constant(gm, value) for name, value in given.items()}
    if any(tensor is None for tensor in tensors.values()):
        return False
    if factor == 1.0:
        return True
    with gm.graph.inserting_before(linear):
        for name, tensor in tensors.items():
            assert tensor is not None
            hint = f"{given[name].target}_scaled"  # type: ignore[union-attr]
            set_kwargs(linear, **{name: add_constant(gm, gm.graph, hint, tensor * factor)})
    return True


def _divide(gm: GraphModule, linear: Node, result: Node, factor: float) -> None:
    """Let ``linear`` divided by ``factor`` stand for ``result``."""
    for user in list(result.users):
        reads = is_op(user, "linear_dynamic") and user.kwargs["x"] is result
        if reads and _scaled(gm, user, ("weight_scale",), 1 / factor):
            set_kwargs(user, x=linear)
    if not result.users or factor == 1.0:
        result.replace_all_uses_with(linear)
        return
    with gm.graph.inserting_before(result):
        value = value_of(result)
        divided = call(gm.graph, aten.mul.Tensor, value, linear, 1 / factor)
    result.replace_all_uses_with(divided)
