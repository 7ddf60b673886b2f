"""What every lowering pass does alike: find the op behind a quantize, and put ours in its place."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from x86quant.lowering.graph_tools import (
    UNBOUNDED,
    Bounds,
    QParams,
    emit,
    finish,
    intersect,
    nodes_of,
    qparams_of,
    replace,
    why,
)

aten = torch.ops.aten

#: Our op's name and its keyword arguments, without output qparams and clamp; None: not lowered.
Lowered = tuple[str, dict[str, Any]] | None
Rule = Callable[[GraphModule, Node], Lowered]


def is_clamp(node: object) -> bool:
    """Whether ``node`` clamps to two constants."""
    return (
        isinstance(node, Node)
        and node.target is aten.clamp.default
        and all(bound is None or _is_finite(bound) for bound in node.args[1:])
    )


def _is_finite(bound: object) -> bool:
    return isinstance(bound, int | float) and math.isfinite(bound)


def clamp_bounds(node: Node) -> Bounds:
    """The bounds of an ``is_clamp`` node."""
    _, low, high = node.args
    return low, high  # type: ignore[return-value]


def through_clamps(quantize: Node) -> tuple[Node, Bounds]:
    """The float value that ``quantize`` quantizes, and the clamps in between."""
    value, bounds = quantize.kwargs["x"], UNBOUNDED
    while is_clamp(value):
        assert isinstance(value, Node)
        bounds = intersect(clamp_bounds(value), bounds)
        value = value.args[0]
    assert isinstance(value, Node)
    return value, bounds


def lower(gm: GraphModule, target: Any, rule: Rule, *, clamps: bool = True) -> int:
    """Replace each ``target -> [clamp] -> quantize`` by the op that ``rule`` answers with.

    With ``clamps=False`` the op has no clamp of its own: one in between is left to be a table.
    """
    changed = 0
    for quantize, core, bounds in _candidates(gm, target):
        if bounds != UNBOUNDED and not clamps:
            why(core, "a clamp that this op cannot fuse follows before the quantize")
            continue
        with gm.graph.inserting_before(quantize):
            lowered = rule(gm, core)
            if lowered is None:
                continue
            name, arguments = lowered
            new = _emit(gm, quantize, name, arguments, qparams_of(quantize), bounds)
        new.meta.update({key: core.meta[key] for key in ("layer",) if key in core.meta})
        replace(quantize, new)
        changed += 1
    return finish(gm, changed)


def _candidates(gm: GraphModule, target: Any) -> Iterator[tuple[Node, Node, Bounds]]:
    for quantize in nodes_of(gm, "quantize"):
        core, bounds = through_clamps(quantize)
        if core.target is not target:
            continue
        if len(core.users) > 1:
            others = ", ".join(user.name for user in core.users)
            why(core, f"its float result is used more than once, by {others}")
            continue
        yield quantize, core, bounds


def _emit(
    gm: GraphModule,
    quantize: Node,
    name: str,
    arguments: dict[str, Any],
    out: QParams,
    bounds: Bounds,
) -> Node:
    more: dict[str, Any] = {"out_scale": out.scale, "out_zp": out.zero_point}
    if bounds != UNBOUNDED:
        more["lo"], more["hi"] = out.clamp(bounds)
    new = emit(gm.graph, name, quantize, **arguments, **more)
    if bounds != UNBOUNDED:
        new.meta["bounds"] = bounds
    return new
