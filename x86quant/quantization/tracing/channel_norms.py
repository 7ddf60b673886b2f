"""Norms over the channels, spelled out, as torch's own functions.

``(x - x.mean(1)) / sqrt(x.var(1) + eps) * weight + bias`` is what networks have whose channels come
before their pixels (ConvNeXt's first code, the neck of SAM, restorers of pictures): a layer norm
between two moves. Over channels and all behind them it is a group norm of one group (what separates
voices). The weight may also be multiplied before the division, or weight and bias be applied while
the channels are last.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch.fx import GraphModule, Node

from x86quant.lowering.graph_tools import add_constant, constant, plain_name, sole_user
from x86quant.quantization.tracing.seen_values import seen_values

_CHANNELS = 1


@dataclasses.dataclass(frozen=True, slots=True)
class _Norm:
    """What has a mean of 0 and a variance of 1 over some dimensions, and a weight if it has one."""

    source: Node
    eps: float
    dims: tuple[int, ...]
    weight: torch.Tensor | None


@dataclasses.dataclass(frozen=True, slots=True)
class _Affine:
    """The last step of a norm, its parameters, one value a channel, and the rank of its result.

    No rank if the channels trade places with the last dimension, whatever the rank.
    """

    last: Node
    weight: torch.Tensor
    bias: torch.Tensor
    rank: int | None


def spell_channel_norms(gm: GraphModule, inputs: Callable[[], Sequence[torch.Tensor]]) -> None:
    """Let norms over the channels, with weight and bias, be calls of one function."""
    norms = [(node, norm) for node in gm.graph.nodes if (norm := _normalized(gm, node)) is not None]
    found = [
        (norm, affine)
        for node, norm in norms
        if (affine := _affine(gm, node, norm) or _affine_of_last(gm, node)) is not None
    ]
    # The graph runs once for all, and only if there is something to ask.
    asked = [norm.source for norm, affine in found if affine.rank is None and len(norm.dims) > 1]
    seen = seen_values(gm, inputs(), asked) if asked else {}
    made: dict[Node, Node] = {}
    for norm, affine in found:
        source = made.get(norm.source, norm.source)
        if len(norm.dims) > 1:
            rank = seen[norm.source].dim() if affine.rank is None else affine.rank
            if norm.dims != tuple(range(_CHANNELS, rank)):
                continue
        with gm.graph.inserting_before(affine.last):
            parameters = [
                add_constant(gm, gm.graph, f"{affine.last.name}_{name}", value)
                for name, value in (("weight", affine.weight), ("bias", affine.bias))
            ]
            if len(norm.dims) == 1:
                new = _over_each_pixel(gm, source, norm.eps, affine, parameters)
            else:
                new = [gm.graph.call_function(F.group_norm, (source, 1, *parameters, norm.eps))]
        for step in new:
            step.meta.update(affine.last.meta)
        affine.last.replace_all_uses_with(new[-1])
        made[affine.last] = new[-1]
    if made:
        gm.graph.eliminate_dead_code()


def _over_each_pixel(
    gm: GraphModule, source: Node, eps: float, affine: _Affine, parameters: list[Node]
) -> list[Node]:
    """A layer norm between two moves."""
    rank, channels = affine.rank, (affine.weight.numel(),)
    if rank is None:
        move, there, back = "transpose", (_CHANNELS, -1), (_CHANNELS, -1)
    else:
        move, there = "permute", (0, *range(_CHANNELS + 1, rank), _CHANNELS)
        back = (0, rank - 1, *range(1, rank - 1))
    pixels = gm.graph.call_method(move, (source, *there))
    norm = gm.graph.call_function(F.layer_norm, (pixels, channels, *parameters, eps))
    return [pixels, norm, gm.graph.call_method(move, (norm, *back))]


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


def _over(node: object, name: str) -> tuple[Node, tuple[int, ...]] | None:
    """What ``node`` takes the mean or the variance of, over which dimensions, which it keeps."""
    found = _called(node, name)
    if found is None:
        return None
    given: dict[str, Any] = dict(zip(_ARGUMENTS[name, len(found.args)], found.args, strict=False))
    given |= found.kwargs
    x, dim = given.pop("x", None) or given.pop("input", None), given.pop("dim", None)
    dims = tuple(dim) if isinstance(dim, list | tuple) else (dim,)
    if dims != tuple(range(_CHANNELS, _CHANNELS + len(dims))) or not dims:
        return None
    if given.pop("keepdim", False) is not True or not isinstance(x, Node):
        return None
    biased = given == {"unbiased": False} or given == {"correction": 0}
    return (x, dims) if (biased if name == "var" else not given) else None


#: By name and number of positional arguments, what these are.
_ARGUMENTS = {
    **{("mean", n): ("x", "dim", "keepdim") for n in range(4)},
    **{("var", n): ("x", "dim", "unbiased", "keepdim") for n in range(5)},
}


def _normalized(gm: GraphModule, node: Node) -> _Norm | None:
    """What ``node`` is the norm of, and a weight that is in it already."""
    for kind, root in (("div", "sqrt"), ("mul", "rsqrt")):
        for part, scale in _orders(_pair(node, kind), kind):
            under = _called(scale, root)
            if under is None or len(under.args) != 1 or under.kwargs:
                continue
            for centred, weight in ((part, None), *_by_constant(gm, part, "mul")):
                source = _centred(centred)
                for spread, eps in _orders(_pair(under.args[0], "add"), "add"):
                    if source is None or not isinstance(eps, float) or eps <= 0:
                        continue
                    if _variance_of(spread) == source:
                        return _Norm(source[0], eps, source[1], weight)
    return None


def _by_constant(gm: GraphModule, node: object, name: str) -> list[tuple[Any, torch.Tensor]]:
    """The operands of ``node``, if it is a ``name`` of something and a constant tensor."""
    found = ((x, constant(gm, other)) for x, other in _orders(_pair(node, name), name))
    return [(x, value) for x, value in found if value is not None and value.dim() > 0]


def _orders(pair: tuple[Any, Any] | None, kind: str) -> list[tuple[Any, Any]]:
    if pair is None:
        return []
    return [pair] if kind == "div" else [pair, pair[::-1]]


def _centred(node: object) -> tuple[Node, tuple[int, ...]] | None:
    """What ``node`` is, less its mean, and over which dimensions."""
    x, mean = _pair(node, "sub") or (None, None)
    found = _over(mean, "mean")
    return found if found is not None and found[0] is x else None


def _variance_of(node: object) -> tuple[Node, tuple[int, ...]] | None:
    """What ``node`` is the variance of, and over which dimensions."""
    direct = _over(node, "var")
    if direct is not None:
        return direct
    squares, dims = _over(node, "mean") or (None, None)
    base, power = _pair(squares, "pow") or _pair(squares, "mul") or (None, None)
    is_square = power == 2 if _called(squares, "pow") else power is base
    found = _centred(base) if is_square else None
    return found if found is not None and found[1] == dims else None


def _affine(gm: GraphModule, node: Node, norm: _Norm) -> _Affine | None:
    """What multiplies the channels of ``node``, unless that is in it already, and adds to them."""
    scaled, weight = node, norm.weight
    if weight is None:
        scaled, weight = _with_constant(gm, node, "mul")  # type: ignore[assignment]
    last, bias = _with_constant(gm, scaled, "add")
    if last is None or weight is None or bias is None or weight.shape != bias.shape:
        return None
    # [channels, 1, 1], or with a 1 for the rows.
    rank = weight.dim() if weight.dim() > _CHANNELS and len(weight) == 1 else weight.dim() + 1
    places = weight.reshape(-1).numel() == weight.shape[_CHANNELS - rank]
    if not places or rank <= _CHANNELS + 1:
        return None
    flat = (weight.detach().flatten().clone(), bias.detach().flatten().clone())
    return _Affine(last, *flat, rank)


def _affine_of_last(gm: GraphModule, node: Node) -> _Affine | None:
    """What does so between two moves of the channels to the end and back."""
    scaled, weight = _with_constant(gm, _moved(node), "mul")
    shifted, bias = _with_constant(gm, scaled, "add")
    last = _moved(shifted)
    if last is None or weight is None or bias is None:
        return None
    # A single value may be that of all channels.
    if weight.dim() != 1 or weight.shape != bias.shape or len(weight) == 1:
        return None
    return _Affine(last, weight.detach().clone(), bias.detach().clone(), None)


def _moved(node: Node | None) -> Node | None:
    """What alone reads ``node``, if it lets the channels and the last dimension trade places."""
    user = None if node is None else sole_user(node)
    found = _called(user, "transpose", "swapaxes", "swapdims")
    if found is None or found.kwargs or {*found.args[1:]} != {_CHANNELS, -1}:
        return None
    return found


def _with_constant(
    gm: GraphModule, node: Node | None, name: str
) -> tuple[Node | None, torch.Tensor | None]:
    """What alone reads ``node``, if it is a ``name`` with a constant, and that."""
    user = None if node is None else sole_user(node)
    for one, value in _by_constant(gm, user, name):
        if one is node:
            return user, value
    return None, None
