"""Small tools that the front ends and the passes share.

A node that yields uint8 codes carries ``meta["qparams"]``. Every ``x86quant`` node keeps all its
arguments, defaults included, in ``node.kwargs``, so a pass reads and changes them by name.
``meta["bounds"]`` is the clamp of an op as reals: codes alone cannot tell a ReLU from a range that
merely ends at zero, and bounds must move when the output's scale does.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, GraphModule, Node

import x86quant.ops  # noqa: F401  registers torch.ops.x86quant

Bounds = tuple[float | None, float | None]
UNBOUNDED: Bounds = (None, None)

#: Our ops that compute in float.
FLOAT_OPS = ("float_conv", "float_conv_codes")

#: Meta keys that a replacement inherits.
_INHERITED = ("source", "layer", "shape", "qparams", "bounds", "absorbed", "order")


@dataclasses.dataclass(frozen=True, slots=True)
class QParams:
    """Scale and zero point of a tensor of uint8 codes."""

    scale: float
    zero_point: int

    def code(self, real: float) -> int:
        """The code nearest to ``real``."""
        return min(255, max(0, round(real / self.scale) + self.zero_point))

    def clamp(self, bounds: Bounds) -> tuple[int, int]:
        """``bounds`` as codes."""
        low, high = bounds
        return (0 if low is None else self.code(low), 255 if high is None else self.code(high))


class Absorbed(NamedTuple):
    """An intermediate result that a fused op no longer rounds or saturates."""

    source: str
    qparams: QParams
    bounds: Bounds
    order: tuple[int, ...] | None
    gain: float = 1.0

    @property
    def step(self) -> float:
        """The step it was rounded to, as it appears in the output."""
        return self.qparams.scale * self.gain

    def saturated(self, values: torch.Tensor) -> torch.Tensor:
        """Where the intermediate ``values`` sit at an end of their codes that is no clamp."""
        low, high = self.bounds
        codes = torch.round(values / self.qparams.scale) + self.qparams.zero_point
        mask = torch.zeros_like(values, dtype=torch.bool)
        if low is None:
            mask |= codes <= 0
        if high is None:
            mask |= codes >= 255
        return mask


def op(name: str) -> torch._ops.OpOverload:
    """The overload ``x86quant::name``."""
    overload: torch._ops.OpOverload = getattr(torch.ops.x86quant, name).default
    return overload


def is_op(node: object, *names: str) -> bool:
    """Whether ``node`` calls one of our ops ``names`` (any of our ops when none is given)."""
    if not isinstance(node, Node) or not isinstance(node.target, torch._ops.OpOverload):
        return False
    namespace, name = _qualified_name(node.target)
    return namespace == "x86quant" and (not names or name in names)


def op_called(node: Node) -> str | None:
    """``conv`` for a node that calls ``x86quant::conv``, None for one that calls no op of ours."""
    found = _names.get(id(node.target))
    if found is None:
        if not isinstance(node.target, torch._ops.OpOverload):
            return None
        found = (node.target, *_qualified_name(node.target))
    return found[2] if found[1] == "x86quant" else None


def _qualified_name(target: torch._ops.OpOverload) -> tuple[str, str]:
    """Namespace and name. Plans ask for every node, again and again: asking torch takes far longer,
    and so does its hash of an overload."""
    found = _names.get(id(target))
    if found is None:
        namespace, name = target._schema.name.split("::")
        found = _names[id(target)] = (target, namespace, name)
    return found[1:]


#: By the address of an overload, which stays its own since it is kept.
_names: dict[int, tuple[torch._ops.OpOverload, str, str]] = {}


def leads_only(node: Node, ends: Callable[[Node], bool | None]) -> bool:
    """Whether all that reads ``node``, at first hand or further on, is as it should be.

    ``ends`` tells it of a reader: True where that is the end of it, False where it is not as it
    should be, None where what reads that one is to be looked at.
    """
    left, seen = [*node.users], set[Node]()
    while left:
        reader = left.pop()
        if reader in seen:
            continue
        seen.add(reader)
        told = ends(reader)
        if told is None:
            left += reader.users
        elif not told:
            return False
    return True


def own_call(node: Node) -> tuple[torch._ops.OpOverload, dict[str, Any]] | None:
    """The op of ours that ``node`` calls, in any spelling, and all its arguments by name."""
    target = node.target
    if isinstance(target, torch._ops.OpOverloadPacket):
        target = getattr(target, "default", target)
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "x86quant":
        return None
    schema = target._schema.arguments
    found: dict[str, Any] = {a.name: a.default_value for a in schema if a.has_default_value()}
    found.update(zip((a.name for a in schema), node.args, strict=False))
    found.update(node.kwargs)
    return target, {a.name: found[a.name] for a in schema if a.name in found}


def op_name(node: Node) -> str:
    """``conv`` for a node that calls ``x86quant::conv``."""
    assert isinstance(node.target, torch._ops.OpOverload)
    return _qualified_name(node.target)[1]


def emit(graph: Graph, name: str, like: Node | None = None, /, **kwargs: Any) -> Node:
    """Insert a call of ``x86quant::name`` with every argument by name, defaults filled in.

    Meta data is inherited from ``like``; the output's qparams are read off the arguments.
    """
    target = op(name)
    known = {argument.name for argument in target._schema.arguments}
    assert known >= kwargs.keys(), sorted(kwargs.keys() - known)
    full: dict[str, Any] = {
        a.name: kwargs.get(a.name, a.default_value) for a in target._schema.arguments
    }
    node = graph.call_function(target, (), full)
    if like is not None:
        inherit(node, like)
    if "out_scale" in full:
        node.meta["qparams"] = QParams(full["out_scale"], full["out_zp"])
    return node


def inherit(node: Node, like: Node) -> Node:
    """Copy the meta data that says what ``like`` stands for."""
    # The order of dimensions belongs to the value stood for, so an old one never survives.
    node.meta.pop("order", None)
    node.meta.update({key: like.meta[key] for key in _INHERITED if key in like.meta})
    return node


def stand_for(node: Node, value: Node) -> None:
    """Let ``node``, which a pass has changed to yield what ``value`` did, say so."""
    for key in ("source", "shape", "order"):
        node.meta.pop(key, None)
        if key in value.meta:
            node.meta[key] = value.meta[key]
    if "layer" in value.meta:
        node.meta.setdefault("layer", value.meta["layer"])
    node.meta["absorbed"] = (*node.meta.get("absorbed", ()), *value.meta.get("absorbed", ()))


def replace(old: Node, new: Node) -> None:
    """Let ``new`` take the place of ``old`` and erase ``old``."""
    old.replace_all_uses_with(new)
    old.graph.erase_node(old)


def given_by_name(node: Node, names: Iterable[str]) -> dict[str, Any]:
    """What ``node`` is called with, whether by position or not; ``names`` are its parameters'."""
    return dict(zip(names, node.args, strict=False)) | node.kwargs


def nodes_of(gm: GraphModule, *names: str) -> Iterator[Node]:
    """The nodes that call our ops ``names``, in order, safe against erasure of the current one."""
    return (node for node in list(gm.graph.nodes) if not node._erased and is_op(node, *names))


def finish(gm: GraphModule, changed: int) -> int:
    """Drop dead nodes after ``changed`` rewrites; returns ``changed``.

    ``gm`` is not recompiled, which takes longer than most passes: ``run_passes`` does so once.
    """
    if changed:
        gm.graph.eliminate_dead_code()
        gm.graph.lint()
    return changed


def plain_name(node: Node) -> str:
    """``stride`` for the method, the function and the op."""
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._schema.name.partition("::")[2]
    return str(getattr(node.target, "__name__", node.target))


def sole_user(node: Node) -> Node | None:
    """The only user of ``node``, or None when it has more or none."""
    return next(iter(node.users)) if len(node.users) == 1 else None


def dequantized(value: object) -> Node | None:
    """The codes behind ``value`` when it is a ``dequantize`` node."""
    if is_op(value, "dequantize"):
        assert isinstance(value, Node)
        codes = value.kwargs["x"]
        assert isinstance(codes, Node)
        return codes
    return None


def qparams_of(codes: Node) -> QParams:
    """Scale and zero point of a node that yields codes."""
    qparams: QParams = codes.meta["qparams"]
    return qparams


def scale_and_zp(prefix: str, codes: Node) -> dict[str, Any]:
    """``{prefix}_scale`` and ``{prefix}_zp`` of ``codes``, as keyword arguments."""
    qparams = qparams_of(codes)
    return {f"{prefix}_scale": qparams.scale, f"{prefix}_zp": qparams.zero_point}


def set_kwargs(node: Node, **changes: Any) -> None:
    """Change some keyword arguments of ``node``."""
    node.kwargs = {**node.kwargs, **changes}


def set_output(node: Node, qparams: QParams) -> None:
    """Let ``node`` produce codes of other ``qparams``; its clamp moves along."""
    set_kwargs(node, out_scale=qparams.scale, out_zp=qparams.zero_point)
    node.meta["qparams"] = qparams
    if "lo" in node.kwargs:
        lo, hi = qparams.clamp(node.meta.get("bounds", UNBOUNDED))
        set_kwargs(node, lo=lo, hi=hi)


def intersect(inner: Bounds, outer: Bounds) -> Bounds:
    """The clamp that equals clamping to ``inner`` and then to ``outer``."""
    low, high = (_bounded(value, outer) for value in _filled(inner))
    return (low if math.isfinite(low) else None, high if math.isfinite(high) else None)


def _filled(bounds: Bounds) -> tuple[float, float]:
    low, high = bounds
    return (-math.inf if low is None else low, math.inf if high is None else high)


def _bounded(value: float, bounds: Bounds) -> float:
    low, high = _filled(bounds)
    return min(max(value, low), high)


def absorb(node: Node, *absorbed: Node, gain: float = 1.0) -> None:
    """Record that ``node`` also does the work of ``absorbed``, whose own rounding is gone.

    A comparison with the unfused graph allows for ``meta["absorbed"]``: there an intermediate
    result was rounded to its scale (times ``gain`` by the time it reaches the output) and may have
    saturated.
    """
    entries: list[Absorbed] = []
    for other in absorbed:
        entries += other.meta.get("absorbed", ())
        meta = other.meta
        bounds = meta.get("bounds", UNBOUNDED)
        entries.append(
            Absorbed(meta.get("source", ""), qparams_of(other), bounds, meta.get("order"))
        )
    mine = node.meta.get("absorbed", ()) if node not in absorbed else ()
    scaled = [entry._replace(gain=entry.gain * gain) for entry in entries]
    node.meta["absorbed"] = (*mine, *scaled)


def constant(gm: GraphModule, value: object) -> torch.Tensor | None:
    """The tensor behind a ``get_attr`` node, else None."""
    if not isinstance(value, Node) or value.op != "get_attr":
        return None
    found = attribute(gm, str(value.target))
    return found.detach() if isinstance(found, torch.Tensor) else None


def attribute(root: torch.nn.Module, target: str) -> Any:
    """The attribute of ``root`` at the dotted path ``target``."""
    found: Any = root._buffers.get(target)  # nearly all are, and plans ask for them often
    if found is not None:
        return found
    found = root
    for name in target.split("."):
        found = getattr(found, name)
    return found


def add_constant(root: torch.nn.Module, graph: Graph, hint: str, tensor: torch.Tensor) -> Node:
    """Register ``tensor`` as a buffer under a fresh name and return its ``get_attr`` node."""
    base = "".join(c if c.isalnum() else "_" for c in hint)
    name, count = base, 0
    while hasattr(root, name):
        count += 1
        name = f"{base}_{count}"
    root.register_buffer(name, tensor)
    return graph.create_node("get_attr", name)


def drop_unused_buffers(gm: GraphModule) -> None:
    """Let go of the constants of ``gm`` that no node reads any more."""
    used = {str(node.target) for node in gm.graph.nodes if node.op == "get_attr"}
    for name in [name for name, _ in gm.named_buffers(recurse=False) if name not in used]:
        delattr(gm, name)


def why(node: Node, reason: str) -> None:
    """Record why ``node`` stays a float op; the first reason stands."""
    node.meta.setdefault("why", reason)


def label(node: Node) -> str:
    """What a user knows the node by: its layer path, else the name in the original graph."""
    return str(node.meta.get("layer") or node.meta.get("source") or node.name)


def symmetric_int8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Codes and one scale per output channel, or None when it is something else."""
    if weight.dtype != torch.qint8:
        return None
    if weight.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        if weight.q_zero_point() != 0:
            return None
        return weight.int_repr(), torch.tensor([weight.q_scale()], dtype=torch.float32)
    if weight.q_per_channel_zero_points().count_nonzero():
        return None
    return weight.int_repr(), weight.q_per_channel_scales().to(torch.float32)
