"""A requantize moves into the op or table that it alone reads, or into the sums that read it."""

from __future__ import annotations

from typing import cast

from torch.fx import GraphModule, Node

from x86quant.lowering.graph_tools import (
    absorb,
    add_constant,
    constant,
    finish,
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

#: Ops whose output qparams can be chosen freely.
REQUANTIZABLE = (
    "conv", "linear", "add", "mul", "affine", "layer_norm", "avg_pool", "adaptive_avg_pool",
    "requantize", "cat",
)  # fmt: skip


def run(gm: GraphModule) -> int:
    """Apply the pass to ``gm``; returns the number of requantizes fused."""
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
