"""GELU and SiLU that are spelled out, such as transformers' ``NewGELUActivation``, become one op.

How they are spelled does not matter: what several elementwise steps make of one tensor is computed
on a grid of numbers and compared with the activations that a product can end in.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from x86quant.lowering.graph_tools import finish, replace
from x86quant.lowering.row_passes._values import call, is_float32, same_sizes, value_of

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


def run(gm: GraphModule) -> int:
    """Apply the pass to ``gm``; returns the number of activations."""
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
            name = _name(steps, source, last, order)
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


def _name(steps: set[Node], source: Node, last: Node, order: dict[Node, int]) -> str | None:
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
