"""``export_program``: the plans of a compiled model as a file that C++ runs."""

from __future__ import annotations

import operator
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.fx import Node
from torch.fx.node import map_arg

from x86quant.compiled import CompiledModule, GuardedModule
from x86quant.compiled.block_graphs import blocks_of
from x86quant.errors import InvalidInputError, UnsupportedError
from x86quant.files import check_target, write_aside
from x86quant.runtime import Segment
from x86quant.runtime.packs import Packs
from x86quant.runtime.parts import BatchParts
from x86quant.serving.program_file import StoredPlan, StoredPrograms

#: One call of a model: a tensor, its inputs in order, or its inputs by name.
Call = torch.Tensor | Sequence[torch.Tensor] | Mapping[str, torch.Tensor]

_INSTEAD = "serve it from Python, or export the parts of the model that are all int8"


def export_program(module: nn.Module, path: str | os.PathLike[str], inputs: Sequence[Call]) -> None:
    """Write a file that ``libx86quant_runtime.so`` runs without Python and without torch.

    Args:
        module: a compiled model, as ``quantize``, ``compile`` and ``load`` return it, all of whose
            steps run natively.
        path: the file to write; by custom it ends in ``.xq``.
        inputs: for each set of shapes that the file is to run, an example: a tensor, or a sequence
            or mapping of tensors for a model with several inputs. Their values do not matter. A
            batch is a shape as well: give one example for each size of batch. Of lists of indices
            that come with offsets, and of their weights, the file takes any number.

    Plans are made for the number of threads that torch has now; the library runs them on any number
    with the same answers, which are those of ``module``.

    Raises:
        UnsupportedError: a part of the model runs in torch; the message names it.
        InvalidInputError: there are no inputs, or they do not fit the model.
    """
    target = Path(path)
    check_target(target)
    calls = [inputs] if isinstance(inputs, torch.Tensor | Mapping) else list(inputs)
    if not calls:
        raise InvalidInputError("export_program needs an example of inputs for each set of shapes")
    write_aside(target, program_bytes(module, calls))


def program_bytes(module: nn.Module, calls: Sequence[Call]) -> bytes:
    """The file for these calls."""
    float_type = getattr(module, "_float_type", torch.float32)
    if float_type is not torch.float32:
        raise UnsupportedError(
            f"the model takes and returns {float_type}, and a program file float32, "
            "uint8 or indices: export it before .half() or .to(), or after .float()"
        )
    found = [_graph_call(module, call) for call in calls]
    graph, arguments = found[0][0], [values for _, values in found]
    if any(other is not graph for other, _ in found):
        raise UnsupportedError(
            "a program file holds one graph, and several answer these calls of the model: "
            "export each in a file of its own"
        )
    if not all(isinstance(x, torch.Tensor) for values in arguments for x in values):
        raise InvalidInputError("export_program takes tensors as inputs")
    with torch.no_grad():
        for values in arguments:
            graph(*values)  # what turns out to have no native form for these shapes goes to torch
    segment, taken = _whole_segment(graph)
    programs = StoredPrograms()
    packs = Packs(segment.graph_module, programs)
    parts = BatchParts(segment.graph_module, packs)
    inputs = [[values[i].contiguous() for i in taken] for values in arguments]
    plans = {str(plan.inputs): plan for plan in (_plan(segment, one, parts) for one in inputs)}
    return programs.to_bytes(list(plans.values()))


def _graph_call(given: nn.Module, call: Call) -> tuple[CompiledModule, tuple[Any, ...]]:
    """The graph that answers a call of ``given``, and its inputs in order."""
    positional = [call] if isinstance(call, torch.Tensor) else call
    named = positional if isinstance(positional, Mapping) else {}
    args: tuple[Any, ...] = () if named else tuple(positional)
    if (blocks := blocks_of(given)) is not None:
        answering = blocks.graph_for(args, named)
        if answering is None:
            raise UnsupportedError(
                f"no graph of the {type(given).__name__} holds for this call, and its own code is "
                "no program: give a call like those of the calibration data"
            )
        return answering[0].compiled, answering[1]
    if isinstance(given, GuardedModule):
        graph, tensors = given.graph_call(args, named)
        return graph, graph.arguments(tensors, {})
    if not isinstance(given, CompiledModule):
        inside = sum(isinstance(part, CompiledModule) for part in given.modules())
        raise UnsupportedError(
            f"export_program takes a model that is compiled as a whole, got {type(given).__name__}"
            f" with {inside} compiled parts: what is around them runs in Python; {_INSTEAD}"
        )
    return given, given.arguments(args, named)


def _whole_segment(module: CompiledModule) -> tuple[Segment, list[int]]:
    """The segment that does all that ``module`` does, and which inputs of the model it takes.

    Raises:
        UnsupportedError: something else runs as well.
    """
    runtime = module.runtime
    nodes = list(runtime.graph.nodes)
    placeholders = [node for node in nodes if node.op == "placeholder"]
    calls = [node for node in nodes if _segment_of(runtime, node) is not None]
    others = [
        node
        for node in nodes
        if node.op not in ("placeholder", "output")
        and node not in calls
        and not (node.target is operator.getitem and node.args[0] in calls)
    ]
    if others or len(calls) != 1:
        raise UnsupportedError(_why_not(module, others, len(calls)))
    results: list[Node] = []
    map_arg(nodes[-1].args, lambda node: results.append(node))
    wanted = [node.args for node in results if node not in placeholders]
    if wanted != [(calls[0], i) for i in range(len(results))]:
        raise UnsupportedError(
            "the model returns an input, a constant or a result twice, which a program file cannot "
            "do: return only what it computes, each once"
        )
    segment = _segment_of(runtime, calls[0])
    assert segment is not None
    return segment, [placeholders.index(node) for node in calls[0].args]


def _segment_of(runtime: nn.Module, node: Node) -> Segment | None:
    module = runtime.get_submodule(str(node.target)) if node.op == "call_module" else None
    return module if isinstance(module, Segment) else None


def _why_not(module: CompiledModule, others: Sequence[Node], segments: int) -> str:
    found = [f"{node.layer}: {node.op} ({node.reason})" for node in module.float_nodes]
    found = found or [str(node.target) for node in others] or [f"{segments} separate parts"]
    more = f" and {len(found) - 3} more" if len(found) > 3 else ""
    return (
        "a program file holds native steps alone, and this model runs in torch: "
        f"{'; '.join(found[:3])}{more}; {_INSTEAD}"
    )


def _plan(segment: Segment, inputs: list[torch.Tensor], parts: BatchParts) -> StoredPlan:
    if not segment.can_plan(inputs):
        raise InvalidInputError("export_program takes tensors that are not empty as inputs")
    plan = parts.plan(inputs, torch.get_num_threads(), segment.open_inputs(inputs))
    if any(plan.numbers):
        raise UnsupportedError(
            "the model returns a size as a number, which a program file cannot do: return tensors"
        )
    stored: StoredPlan = plan.program
    return stored
