"""Activations behind products, and gates."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from x86quant.lowering.graph_tools import (
    add_constant,
    constant,
    emit,
    finish,
    is_op,
    nodes_of,
    op,
    replace,
    set_kwargs,
)
from x86quant.lowering.normalize import UNARY
from x86quant.lowering.row_passes._values import (
    call,
    emit_many,
    is_alone,
    is_float32,
    same_sizes,
    take_over,
    value_of,
)
from x86quant.lowering.views import is_view

aten = torch.ops.aten


#: What such spellings are made of; each gives at a place what its inputs have there.
_STEPS = frozenset(
    {
        aten.add.Tensor, aten.sub.Tensor, aten.rsub.Scalar, aten.mul.Tensor, aten.div.Tensor,
        aten.pow.Tensor_Scalar, aten.neg.default, aten.exp.default, aten.reciprocal.default,
    }
)  # fmt: skip
#: One of these is in every spelling.
_CORES = frozenset(
    {aten.tanh.default, aten.erf.default, aten.sigmoid.default, aten.hardtanh.default}
)
_KNOWN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
}
#: GELU by erf and by tanh are 5e-4 apart.
_TOLERANCE = 1e-5


def recognise_activations(gm: GraphModule) -> int:
    """Spelled-out GELU and SiLU, such as transformers' ``NewGELUActivation``, become one op.

    How they are spelled does not matter: what several elementwise steps make of one tensor is
    computed on a grid of numbers and compared with the activations that a product can end in.

    Returns the number of activations.
    """
    order = {node: number for number, node in enumerate(gm.graph.nodes)}
    changed = 0
    for core in [node for node in order if node.target in _CORES]:
        found = _activation(core, order)
        if found is None:
            continue
        last, source, name = found
        with gm.graph.inserting_before(last):
            if name == "silu":
                new = call(gm.graph, aten.silu.default, value_of(last), source)
            else:
                new = call(gm.graph, aten.gelu.default, value_of(last), source)
                new.kwargs = {"approximate": "tanh" if name == "gelu_tanh" else "none"}
        new.meta = {**last.meta, **new.meta}
        replace(last, new)
        changed += 1
    return finish(gm, changed)


def _activation(core: Node, order: dict[Node, int]) -> tuple[Node, Node, str] | None:
    """The last step of the spelling around ``core``, what it is a function of, and its name."""
    last = core
    while len(last.users) == 1:
        (last,) = last.users
        if last.target not in _STEPS or not same_sizes(core, last):
            return None
        steps, source = _steps_before(last, order)
        if source is not None and core in steps and is_float32(source, last):
            name = _known_name(steps, source, last, order)
            if name is not None:
                return last, source, name
    return None


def _steps_before(last: Node, order: dict[Node, int]) -> tuple[set[Node], Node | None]:
    """The steps that compute ``last`` of one tensor of its sizes, and that tensor."""
    steps = {last}
    while True:
        sources = {x for step in steps for x in step.all_input_nodes} - steps
        if len(sources) == 1:
            (source,) = sources
            if source.target not in _STEPS | _CORES or not steps.issuperset(source.users):
                return steps, source if same_sizes(source, last) else None
        if not sources:
            return steps, None
        latest = max(sources, key=order.__getitem__)
        if latest.target not in _STEPS | _CORES or not steps.issuperset(latest.users):
            return steps, None
        steps.add(latest)


def _known_name(steps: set[Node], source: Node, last: Node, order: dict[Node, int]) -> str | None:
    """The activation that ``steps`` compute."""
    grid = torch.linspace(-12, 12, 1001, dtype=torch.float64)
    values: dict[Node, torch.Tensor] = {source: grid}
    for step in sorted(steps, key=order.__getitem__):
        args, kwargs = map_arg((step.args, step.kwargs), values.__getitem__)
        values[step] = step.target(*args, **kwargs)  # type: ignore[operator]
    for name, function in _KNOWN.items():
        if torch.allclose(values[last], function(grid), rtol=_TOLERANCE, atol=_TOLERANCE):
            return name
    return None


def fold_sigmoid_gates(gm: GraphModule) -> int:
    """``x * sigmoid(c * x)`` behind a linear, such as CLIP's activation, becomes SiLU.

    It is ``silu(c * x) / c``: the linear is scaled by c, and what reads it by a c-th.

    Returns the number of activations.
    """
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


def look_up_reals_moved(gm: GraphModule) -> int:
    """A function of reals that are moved, if anything, once codes became them: a table of reals.

    Such stand behind the static convolutions between a transformer's layers.

    Returns the number of functions that are in tables now.
    """
    changed = 0
    for node in list(gm.graph.nodes):
        if node.target not in UNARY or any(isinstance(x, Node) for x in node.args[1:]):
            continue
        source = node.args[0]
        while isinstance(source, Node) and is_view(source) and is_alone(source):
            source = source.args[0]
        if not is_float32(source, node) or not is_alone(source):
            continue
        reals = _reals_of_codes(gm, source)
        if reals is None:
            continue
        table = node.target(reals, *node.args[1:], **node.kwargs)
        with gm.graph.inserting_before(source):
            buffer = add_constant(gm, gm.graph, f"{node.name}_reals", table)
            codes, contiguous = source.kwargs["x"], source.kwargs["contiguous"]
            new = emit(gm.graph, "lut_real", node, x=codes, table=buffer, contiguous=contiguous)
        new.meta["val"] = source.meta["val"]
        replace(source, new)
        replace(node, node.args[0])
        changed += 1
    return finish(gm, changed)


def _reals_of_codes(gm: GraphModule, node: Node) -> torch.Tensor | None:
    """What ``node`` makes of each code, if it makes reals of codes."""
    if is_op(node, "lut_real"):
        return constant(gm, node.kwargs["table"])
    if not is_op(node, "dequantize"):
        return None
    given = {**node.kwargs, "x": torch.arange(256, dtype=torch.uint8)}
    found: torch.Tensor = op("dequantize")(**given)
    return found


_ROWS = ("codes", "scale", "zero_point")


def fuse_gates(gm: GraphModule) -> int:
    """``activation(gate) * up``, which alone reads two products of the same rows and is quantized.

    Returns the number of gates fused.
    """
    changed = 0
    for quantizer in nodes_of(gm, "quantize_rows"):
        product = quantizer.kwargs["x"]
        if not isinstance(product, Node) or (pair := _gate_and_up(product)) is None:
            continue
        gate, up = pair
        with gm.graph.inserting_before(quantizer):
            _, *results = emit_many(
                gm.graph,
                "gated_rows_rows",
                gate,
                (None, None, None),
                **{name: gate.kwargs[name] for name in _ROWS},
                gate_weight=gate.kwargs["weight"],
                gate_scale=gate.kwargs["weight_scale"],
                gate_bias=gate.kwargs["bias"],
                up_weight=up.kwargs["weight"],
                up_scale=up.kwargs["weight_scale"],
                up_bias=up.kwargs["bias"],
                activation=gate.kwargs["activation"],
            )
        take_over(gm, quantizer, dict(enumerate(results)))
        changed += 1
    return finish(gm, changed)


def _gate_and_up(product: Node) -> tuple[Node, Node] | None:
    if product.target is not aten.mul.Tensor or len(product.users) != 1:
        return None
    a, b = product.args[:2]
    if not is_op(a, "linear_rows") or not is_op(b, "linear_rows"):
        return None
    assert isinstance(a, Node)
    assert isinstance(b, Node)
    if a is b or not (is_alone(a) and is_alone(b) and same_sizes(a, b)):
        return None
    if any(a.kwargs[name] is not b.kwargs[name] for name in _ROWS):
        return None
    if (a.kwargs["activation"] is None) == (b.kwargs["activation"] is None):
        return None
    return (b, a) if a.kwargs["activation"] is None else (a, b)
