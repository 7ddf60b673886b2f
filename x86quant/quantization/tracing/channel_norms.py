"""Layer norms over the channels of pictures, spelled out, as torch's layer norm between two moves.

``(x - x.mean(1)) / sqrt(x.var(1) + eps) * weight + bias`` is what networks have whose channels come
before their pixels (ConvNeXt's first code, the neck of SAM, restorers of pictures).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch.fx import GraphModule, Node

from x86quant.lowering.graph_tools import add_constant, constant, plain_name, sole_user

_CHANNELS = 1


def spell_channel_norms(gm: GraphModule) -> None:
    """Let norms over the channels, with weight and bias, be calls of one function."""
    changed = False
    for node in list(gm.graph.nodes):
        found = _normalized(node)
        affine = None if found is None else _affine(gm, node)
        if found is None or affine is None:
            continue
        x, eps = found
        last, weight, bias, rank = affine
        with gm.graph.inserting_before(last):
            places = [0, *range(_CHANNELS + 1, rank), _CHANNELS]
            pixels = gm.graph.call_method("permute", (x, *places))
            parameters = [
                add_constant(gm, gm.graph, f"{last.name}_{name}", value.detach().flatten().clone())
                for name, value in (("weight", weight), ("bias", bias))
            ]
            norm = gm.graph.call_function(
                F.layer_norm, (pixels, (weight.numel(),), *parameters, eps)
            )
            back = gm.graph.call_method("permute", (norm, 0, rank - 1, *range(1, rank - 1)))
        for new in (pixels, norm, back):
            new.meta.update(last.meta)
        last.replace_all_uses_with(back)
        changed = True
    if changed:
        gm.graph.eliminate_dead_code()


def _name(node: Node) -> str:
    """``mul`` for the method, the function, the operator and the op."""
    if node.op not in ("call_method", "call_function"):
        return ""
    return {"truediv": "div"}.get(name := plain_name(node), name)


def _called(node: object, *names: str) -> Node | None:
    return node if isinstance(node, Node) and _name(node) in names else None


def _pair(node: object, name: str) -> tuple[Any, Any] | None:
    """The two operands of a plain call of ``name``."""
    found = _called(node, name)
    if found is None or len(found.args) != 2 or found.kwargs:
        return None
    return found.args[0], found.args[1]


def _over_channels(node: object, name: str) -> Node | None:
    """What ``node`` takes the mean or the variance of, over the channels, which it keeps."""
    found = _called(node, name)
    if found is None:
        return None
    given: dict[str, Any] = dict(zip(_ARGUMENTS[name, len(found.args)], found.args, strict=False))
    given |= found.kwargs
    x, dim = given.pop("x", None) or given.pop("input", None), given.pop("dim", None)
    if list(dim if isinstance(dim, list | tuple) else [dim]) != [_CHANNELS]:
        return None
    if given.pop("keepdim", False) is not True or not isinstance(x, Node):
        return None
    biased = given == {"unbiased": False} or given == {"correction": 0}
    return x if (biased if name == "var" else not given) else None


#: By name and number of positional arguments, what these are.
_ARGUMENTS = {
    **{("mean", n): ("x", "dim", "keepdim") for n in range(4)},
    **{("var", n): ("x", "dim", "unbiased", "keepdim") for n in range(5)},
}


def _normalized(node: Node) -> tuple[Node, float] | None:
    """What ``node`` is the norm of, without weight and bias, and the epsilon in it."""
    for kind, root in (("div", "sqrt"), ("mul", "rsqrt")):
        for centred, scale in _orders(_pair(node, kind), kind):
            under = _called(scale, root)
            source = _centred(centred)
            if under is None or source is None or len(under.args) != 1 or under.kwargs:
                continue
            for spread, eps in _orders(_pair(under.args[0], "add"), "add"):
                if isinstance(eps, float) and eps > 0 and _variance_of(spread) is source:
                    return source, eps
    return None


def _orders(pair: tuple[Any, Any] | None, kind: str) -> list[tuple[Any, Any]]:
    if pair is None:
        return []
    return [pair] if kind == "div" else [pair, pair[::-1]]


def _centred(node: object) -> Node | None:
    """What ``node`` is, less its mean."""
    x, mean = _pair(node, "sub") or (None, None)
    return x if isinstance(x, Node) and _over_channels(mean, "mean") is x else None


def _variance_of(node: object) -> Node | None:
    """What ``node`` is the variance of."""
    direct = _over_channels(node, "var")
    if direct is not None:
        return direct
    squares = _over_channels(node, "mean")
    base, power = _pair(squares, "pow") or _pair(squares, "mul") or (None, None)
    is_square = power == 2 if _called(squares, "pow") else power is base
    return _centred(base) if is_square else None


def _affine(gm: GraphModule, node: Node) -> tuple[Node, torch.Tensor, torch.Tensor, int] | None:
    """The last step of what multiplies ``node`` by a weight and adds a bias, both, and the rank."""
    scaled, weight = _with_constant(gm, node, "mul")
    moved, bias = _with_constant(gm, scaled, "add")
    if moved is None or weight is None or bias is None or weight.shape != bias.shape:
        return None
    # [channels, 1, 1], or with a 1 for the rows.
    rank = weight.dim() if weight.dim() > _CHANNELS and len(weight) == 1 else weight.dim() + 1
    places = weight.reshape(-1).numel() == weight.shape[_CHANNELS - rank]
    return (moved, weight, bias, rank) if places and rank > _CHANNELS + 1 else None


def _with_constant(
    gm: GraphModule, node: Node | None, name: str
) -> tuple[Node | None, torch.Tensor | None]:
    """What alone reads ``node``, if it is a ``name`` with a constant, and that."""
    user = None if node is None else sole_user(node)
    for one, other in _orders(_pair(user, name), name):
        value = constant(gm, other)
        if one is node and value is not None and value.dim() > 0:
            return user, value
    return None, None
