"""Clamps, scales, activations and tables move into the ops whose results they read."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch.fx import GraphModule, Node

from x86quant.lowering.graph_tools import (
    UNBOUNDED,
    Bounds,
    absorb,
    add_constant,
    constant,
    dequantized,
    finish,
    intersect,
    is_op,
    nodes_of,
    op,
    qparams_of,
    replace,
    scale_and_zp,
    set_kwargs,
    set_output,
    sole_user,
    stand_for,
)
from x86quant.lowering.passes._epilogue import through_clamps
from x86quant.lowering.passes.products import scaled_weight

aten = torch.ops.aten


#: Ops with a clamp in their epilogue.
CLAMPING = ("conv", "linear", "add", "mul", "affine", "group_norm")


def fuse_clamp(gm: GraphModule) -> int:
    """A clamp (ReLU, ReLU6, hardtanh) of an op's quantized result moves into that op.

    The op's own rounding to the intermediate qparams goes with it. Of a float value a clamp goes
    where the codes that it is rounded to end there as well.

    Returns the number of clamps fused.
    """
    changed = 0
    for quantize in nodes_of(gm, "quantize"):
        real, bounds = through_clamps(quantize)
        producer = dequantized(real)
        if bounds == UNBOUNDED:
            continue
        if producer is None and _codes_end_there(quantize, bounds):
            quantize.update_kwarg("x", real)
            changed += 1
            continue
        if producer is None or not is_op(producer, *CLAMPING):
            continue
        if sole_user(producer) is not real or not _leads_only_to(real, quantize):
            continue
        if producer.kwargs["lut"] is not None:
            continue
        merged = intersect(producer.meta.get("bounds", UNBOUNDED), bounds)
        if qparams_of(producer) != qparams_of(quantize):
            absorb(producer, producer)
        stand_for(producer, quantize)
        producer.meta["bounds"] = merged
        set_output(producer, qparams_of(quantize))
        replace(quantize, producer)
        changed += 1
    return finish(gm, changed)


def _leads_only_to(real: Node, quantize: Node) -> bool:
    """Whether nothing else reads ``real`` or a clamp on its way: it would miss the old codes."""
    node: Node | None = real
    while node is not None and node is not quantize:
        node = sole_user(node)
    return node is quantize


def _codes_end_there(quantize: Node, bounds: Bounds) -> bool:
    """Whether codes say nothing beyond ``bounds``."""
    qparams = qparams_of(quantize)
    return qparams.clamp(bounds) == qparams.clamp(UNBOUNDED)


#: Ops whose output qparams can be chosen freely.
REQUANTIZABLE = (
    "conv", "linear", "add", "mul", "affine", "group_norm", "layer_norm", "avg_pool",
    "adaptive_avg_pool", "requantize", "cat",
)  # fmt: skip


def fuse_requantize(gm: GraphModule) -> int:
    """A requantize moves into the op or table that it alone reads, or into the sums that read it.

    Returns the number of requantizes fused.
    """
    changed = 0
    for node in nodes_of(gm, "requantize"):
        if _into_producer(gm, node) or _into_users(node):
            changed += 1
    return finish(gm, changed)


def _into_producer(gm: GraphModule, node: Node) -> bool:
    producer = node.kwargs["x"]
    assert isinstance(producer, Node)
    if sole_user(producer) is not node:
        return False
    if is_op(producer, "lut"):
        _through_table(gm, producer, node)
    elif is_requantizable(producer):
        requantize_output(producer, node)
    else:
        return False
    replace(node, producer)
    return True


def _into_users(node: Node) -> bool:
    """Sums and concatenations rescale their inputs anyway: they can read the original codes.

    A convolution could too, but would no longer equal the reference within a step.
    """
    codes = node.kwargs["x"]
    assert isinstance(codes, Node)
    if not all(is_op(user, "add", "cat") for user in node.users):
        return False
    for user in list(node.users):
        absorb(user, node)
        user.replace_input_with(node, codes)
        refresh_input_qparams(user)
    return True


def is_requantizable(node: Node) -> bool:
    """Whether ``set_output`` may change what ``node`` produces."""
    return is_op(node, *REQUANTIZABLE) and node.kwargs.get("lut") is None


def requantize_output(producer: Node, like: Node) -> None:
    """Let ``producer`` yield the codes, and stand for the value, of ``like``."""
    absorb(producer, producer)
    stand_for(producer, like)
    set_output(producer, qparams_of(like))


def refresh_input_qparams(node: Node) -> None:
    """Let an ``add`` or ``cat`` state the qparams of the codes it reads."""
    if is_op(node, "cat"):
        qparams = [qparams_of(x) for x in cast(list[Node], node.kwargs["xs"])]
        scales, zps = [q.scale for q in qparams], [q.zero_point for q in qparams]
        set_kwargs(node, x_scales=scales, x_zps=zps)
        return
    a, b = cast(Node, node.kwargs["a"]), cast(Node, node.kwargs["b"])
    set_kwargs(node, **scale_and_zp("a", a), **scale_and_zp("b", b))


def _through_table(gm: GraphModule, producer: Node, node: Node) -> None:
    table = constant(gm, producer.kwargs["table"])
    assert table is not None
    settings = {k: node.kwargs[k] for k in ("x_scale", "x_zp", "out_scale", "out_zp")}
    with gm.graph.inserting_before(producer):
        new = add_constant(
            gm, gm.graph, f"{producer.name}_table", op("requantize")(table, **settings)
        )
    absorb(producer, producer)
    set_kwargs(producer, table=new)
    stand_for(producer, node)
    producer.meta["qparams"] = qparams_of(node)


def fuse_activation(gm: GraphModule) -> int:
    """An activation right behind a product that gives floats moves into it.

    Returns the number of activations fused.
    """
    changed = 0
    for product in nodes_of(gm, "conv_real", "linear_dynamic", "linear_real", "linear_weight_only"):
        user = sole_user(product)
        activation = None if user is None else activation_of(user)
        if user is None or activation is None or product.kwargs["activation"] is not None:
            continue
        set_kwargs(product, activation=activation)
        product.meta["source"] = user.meta.get("source", "")
        replace(user, product)
        changed += 1
    return finish(gm, changed)


_PLAIN_ACTIVATIONS: dict[Any, str] = {
    aten.relu.default: "relu",
    aten.sigmoid.default: "sigmoid",
    aten.silu.default: "silu",
    aten.tanh.default: "tanh",
}


def activation_of(node: Node) -> str | None:
    """The name under which a linear knows what ``node`` computes of its first argument."""
    bounds: tuple[Any, ...] = (*node.args[1:], *node.kwargs.values())
    if node.target is aten.clamp.default and bounds in ((0,), (0, None)):
        return "relu"
    if node.target is aten.gelu.default:
        spelling = str(node.kwargs.get("approximate", (*node.args[1:], "none")[0]))
        return {"none": "gelu", "tanh": "gelu_tanh"}[spelling]
    return _PLAIN_ACTIVATIONS.get(node.target)


def fuse_affine(gm: GraphModule) -> int:
    """A per-channel affine map of a convolution or linear moves into its scales and bias.

    Returns the number of affine maps fused.
    """
    changed = sum(_fuse_affine(gm, node) for node in nodes_of(gm, "affine"))
    return finish(gm, changed)


def _fuse_affine(gm: GraphModule, affine: Node) -> int:
    layer = affine.kwargs["x"]
    assert isinstance(layer, Node)
    if not has_no_epilogue(layer) or sole_user(layer) is not affine:
        return 0
    if layer.kwargs.get("transposed"):
        return 0
    weight, scales, bias, scale, shift = (
        constant(gm, value)
        for value in (
            *(layer.kwargs[name] for name in ("weight", "weight_scales", "bias")),
            affine.kwargs["scale"],
            affine.kwargs["shift"],
        )
    )
    assert weight is not None
    assert scales is not None
    assert scale is not None
    assert shift is not None
    if scale.numel() > 1 and affine.kwargs["axis"] != _channel_axis(layer):
        return 0
    if bias is not None and bias.dtype == torch.int32:
        return 0
    scaled = scaled_weight(weight, scales, scale)
    if scaled is None:
        return 0
    constants = dict(
        zip(
            ("weight", "weight_scales", "bias"),
            (
                *scaled,
                (shift if bias is None else bias * scale + shift).expand(len(weight)).contiguous(),
            ),
            strict=True,
        )
    )
    with gm.graph.inserting_before(layer):
        set_kwargs(
            layer,
            **{
                name: add_constant(gm, gm.graph, f"{layer.name}_{name}", value)
                for name, value in constants.items()
            },
        )
    absorb(layer, layer, gain=float(scale.abs().max()))
    stand_for(layer, affine)
    layer.meta["bounds"] = affine.meta.get("bounds", UNBOUNDED)
    set_output(layer, qparams_of(affine))
    set_kwargs(layer, lut=affine.kwargs["lut"])
    replace(affine, layer)
    return 1


def has_no_epilogue(layer: Node) -> bool:
    """A convolution or linear with nothing in its epilogue yet."""
    return (
        is_op(layer, "conv", "linear")
        and layer.meta.get("bounds", UNBOUNDED) == UNBOUNDED
        and all(layer.kwargs[name] is None for name in ("residual", "lut", "slopes"))
    )


def _channel_axis(layer: Node) -> int:
    return 1 if is_op(layer, "conv") else len(layer.meta["shape"]) - 1


def fuse_table(gm: GraphModule) -> int:
    """A table moves into the op, or the table, whose result it alone reads.

    Returns the number of tables fused.
    """
    changed = 0
    for node in nodes_of(gm, "lut"):
        producer = node.kwargs["x"]
        assert isinstance(producer, Node)
        slot = "table" if is_op(producer, "lut") else "lut"
        if sole_user(producer) is not node or not is_op(producer, "lut", *CLAMPING):
            continue
        table = _composed(gm, producer.kwargs[slot], node.kwargs["table"])
        with gm.graph.inserting_before(producer):
            set_kwargs(
                producer, **{slot: add_constant(gm, gm.graph, f"{producer.name}_table", table)}
            )
        stand_for(producer, node)
        producer.meta["qparams"] = qparams_of(node)
        replace(node, producer)
        changed += 1
    return finish(gm, changed)


def _composed(gm: GraphModule, first: object, second: object) -> torch.Tensor:
    outer = constant(gm, second)
    assert outer is not None
    inner = constant(gm, first)
    return outer if inner is None else outer[inner.to(torch.int64)]
