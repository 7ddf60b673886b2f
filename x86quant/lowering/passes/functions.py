"""Functions of one quantized tensor, sums, products and affine maps."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from x86quant.lowering.graph_tools import (
    add_constant,
    constant,
    dequantized,
    emit,
    finish,
    inherit,
    nodes_of,
    op,
    qparams_of,
    replace,
    scale_and_zp,
    set_output,
    why,
)
from x86quant.lowering.normalize import JOINS, UNARY
from x86quant.lowering.passes._epilogue import Lowered, lower
from x86quant.lowering.passes.products import batch_norm_affine

aten = torch.ops.aten


def lower_affine(gm: GraphModule) -> int:
    """Batch norm, and a sum or product with a constant vector, become ``x86quant.affine``.

    Returns the number of ops lowered.
    """
    changed = lower(gm, aten.batch_norm.default, _batch_norm)
    for target in (aten.mul.Tensor, aten.add.Tensor):
        changed += lower(gm, target, _constant_operand)
    return changed


def _batch_norm(gm: GraphModule, node: Node) -> Lowered:
    codes = dequantized(node.args[0])
    if codes is None:
        why(node, "its input is not quantized")
        return None
    affine = batch_norm_affine(gm, node)
    if affine is None:
        why(node, "it has no running statistics")
        return None
    return _affine(gm, node, codes, *affine, axis=1)


def _constant_operand(gm: GraphModule, node: Node) -> Lowered:
    """``x * c`` or ``x + c`` where c varies along one dimension of x at most."""
    for x, other in (node.args[:2], node.args[1::-1]):
        codes, vector = dequantized(x), constant(gm, other)
        if codes is None or vector is None or "shape" not in codes.meta:
            continue
        axis = _axis(tuple(vector.shape), codes.meta["shape"])
        if axis is None:
            why(node, f"a constant of shape {tuple(vector.shape)} is not a vector along one axis")
            return None
        # One element stands for all: the sizes of the example are not those of every call.
        flat = vector.reshape(-1).float()
        if node.target is aten.mul.Tensor:
            return _affine(gm, node, codes, flat, torch.zeros_like(flat), axis=axis)
        return _affine(gm, node, codes, torch.ones_like(flat), flat, axis=axis)
    return None


def _axis(constant_shape: tuple[int, ...], shape: tuple[int, ...]) -> int | None:
    """The one dimension of ``shape`` along which the broadcast constant varies (else 1)."""
    if len(constant_shape) > len(shape):
        return None
    offset = len(shape) - len(constant_shape)
    varying = [offset + i for i, size in enumerate(constant_shape) if size != 1]
    if not varying:
        return 1 if len(shape) > 1 else 0
    same = len(varying) == 1 and constant_shape[varying[0] - offset] == shape[varying[0]]
    return varying[0] if same else None


def _affine(
    gm: GraphModule, node: Node, codes: Node, scale: torch.Tensor, shift: torch.Tensor, axis: int
) -> Lowered:
    return "affine", {
        "x": codes,
        "scale": add_constant(gm, gm.graph, f"{node.name}_scale", scale),
        "shift": add_constant(gm, gm.graph, f"{node.name}_shift", shift),
        "axis": axis,
        **scale_and_zp("x", codes),
    }


def lower_binary(gm: GraphModule) -> int:
    """Sum and product of two quantized tensors become ``x86quant.add`` and ``x86quant.mul``.

    Returns the number of ops lowered.
    """
    changed = lower(gm, aten.add.Tensor, lambda _, node: _binary_rule("add", node))
    return changed + lower(gm, aten.mul.Tensor, lambda _, node: _binary_rule("mul", node))


def _binary_rule(name: str, node: Node) -> Lowered:
    a, b = (dequantized(value) for value in node.args)
    if a is None or b is None:
        why(node, "one of its inputs is not quantized")
        return None
    return name, {"a": a, "b": b, **scale_and_zp("a", a), **scale_and_zp("b", b)}


_FEWEST_DIMENSIONS = 2


def lower_prelu(gm: GraphModule) -> int:
    """PReLU with a slope a channel becomes a table, an ``x86quant.affine`` and their sum, exactly.

    One of both parts is zero everywhere, and both have the codes of the result: it is rounded once.
    With one slope for all it is a table like other functions (``lower_unary``).

    Returns the number of PReLUs lowered.
    """
    changed = 0
    for quantize in nodes_of(gm, "quantize"):
        node = quantize.kwargs["x"]
        if not isinstance(node, Node) or node.target is not torch.ops.aten.prelu.default:
            continue
        codes, slopes = dequantized(node.args[0]), constant(gm, node.args[1])
        if slopes is None or slopes.numel() == 1:
            continue
        if codes is None or len(node.meta.get("shape", ())) < _FEWEST_DIMENSIONS:
            why(node, "its input is not quantized, or has no channels")
            continue
        if len(node.users) > 1:
            why(node, "its float result is used more than once")
            continue
        with gm.graph.inserting_before(quantize):
            replace(quantize, _sum_of_parts(gm, quantize, codes, slopes.float()))
        changed += 1
    return finish(gm, changed)


def _sum_of_parts(gm: GraphModule, quantize: Node, codes: Node, slopes: torch.Tensor) -> Node:
    out = scale_and_zp("out", quantize)
    above = _part_table(gm, quantize, codes, 0.0, None)
    below = codes
    if bool((slopes < 0).any()):  # what is below zero comes out above: a clamp cannot tell it
        below = _part_table(gm, codes, codes, None, 0.0)
    scaled = emit(
        gm.graph,
        "affine",
        quantize,
        x=below,
        scale=add_constant(gm, gm.graph, f"{quantize.name}_slopes", slopes),
        shift=add_constant(gm, gm.graph, f"{quantize.name}_shifts", torch.zeros_like(slopes)),
        axis=1,
        **scale_and_zp("x", codes),
        **out,
    )
    if below is codes:
        scaled.meta["bounds"] = (None, 0.0)
        set_output(scaled, qparams_of(quantize))
    a, b = scale_and_zp("a", quantize), scale_and_zp("b", quantize)
    return emit(gm.graph, "add", quantize, a=above, b=scaled, **a, **b, **out)


def _part_table(
    gm: GraphModule, like: Node, codes: Node, low: float | None, high: float | None
) -> Node:
    """The values of ``codes`` within bounds, in the codes of ``like``."""
    real = op("dequantize")(torch.arange(256, dtype=torch.uint8), **scale_and_zp("x", codes))
    table = op("quantize")(real.clamp(low, high), **scale_and_zp("out", like))
    node = add_constant(gm, gm.graph, f"{like.name}_table", table)
    new = inherit(emit(gm.graph, "lut", x=codes, table=node), like)
    new.meta["qparams"] = qparams_of(like)
    return new


#: A formula has at most so many steps.
_MOST_STEPS = 64


def lower_unary(gm: GraphModule) -> int:
    """A function of one quantized tensor becomes a 256-entry table, in however many ops it is.

    The ops themselves are evaluated on the 256 reals that the codes can be, so any elementwise
    function of one tensor is covered, alone or followed by others, and any formula that joins such.

    Returns the number of tables made.
    """
    changed = 0
    for quantize in nodes_of(gm, "quantize"):
        last: Any = quantize.kwargs["x"]
        steps, sources = _function(gm, last)
        codes = {dequantized(source) for source in sources}
        if not steps or len(codes) != 1 or None in codes:
            for source in sources if steps and len(sources) == 1 else ():
                first = next(user for user in source.users if user in steps)
                why(first, "its input is not quantized")
            continue
        reals = _evaluated(gm, steps, last, sources)
        table = op("quantize")(reals, **scale_and_zp("out", quantize))
        with gm.graph.inserting_before(quantize):
            node = add_constant(gm, gm.graph, f"{last.name}_table", table)
            new = emit(gm.graph, "lut", quantize, x=codes.pop(), table=node)
        new.meta["qparams"] = qparams_of(quantize)
        replace(quantize, new)
        changed += 1
    return finish(gm, changed)


def look_up_reals(gm: GraphModule) -> int:
    """A function of one quantized tensor that floats read becomes a table of 256 floats.

    Returns the number of tables made.
    """
    changed = 0
    for last in reversed(gm.graph.nodes):
        if not last.users:  # a step of a function that has a table by now
            continue
        steps, sources = _function(gm, last)
        codes = {dequantized(source) for source in sources}
        if not steps or len(codes) != 1 or None in codes:
            continue
        table = _evaluated(gm, steps, last, sources)
        if table.dtype != torch.float32:
            continue
        with gm.graph.inserting_before(last):
            node = add_constant(gm, gm.graph, f"{last.name}_reals", table)
            new = emit(gm.graph, "lut_real", last, x=codes.pop(), table=node)
        replace(last, new)
        changed += 1
    return finish(gm, changed)


def _function(gm: GraphModule, last: Any) -> tuple[set[Node], set[Node]]:
    """The elementwise ops that lead to ``last``, itself among them, and what they start from."""
    steps: set[Node] = set()
    sources: set[Node] = set()
    waiting: list[Any] = [last]
    while waiting and len(steps) <= _MOST_STEPS:
        value = waiting.pop()
        if value in steps or value in sources:
            continue
        if value.target in JOINS and all(isinstance(x, Node) for x in value.args):
            steps.add(value)
            waiting += value.args
        elif value.target in UNARY and _is_elementwise(gm, value):
            steps.add(value)
            waiting.append(value.args[0])
        else:
            sources.add(value)
    return steps, sources


def _is_elementwise(gm: GraphModule, node: Node) -> bool:
    for argument in node.args[1:]:
        tensor = constant(gm, argument)
        if isinstance(argument, Node) and (tensor is None or tensor.numel() > 1):
            why(node, "its parameter is not one constant")
            return False
    return True


def _evaluated(gm: GraphModule, steps: set[Node], last: Node, sources: set[Node]) -> torch.Tensor:
    """What ``last`` of ``steps`` is for the real that each code of ``sources`` stands for."""
    inputs = torch.arange(256, dtype=torch.uint8)
    values: dict[Any, Any] = {
        source: op("dequantize")(inputs, **scale_and_zp("x", source.kwargs["x"]))  # type: ignore[arg-type]
        for source in sources
    }
    for node in (node for node in gm.graph.nodes if node in steps):
        arguments = [
            values.get(argument, constant(gm, argument)) if isinstance(argument, Node) else argument
            for argument in node.args
        ]
        assert callable(node.target)
        values[node] = node.target(*arguments, **node.kwargs)
    found: torch.Tensor = values[last]
    return found
