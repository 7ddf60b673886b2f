"""Front end: an exported, reference-quantized model (PT2E) takes the form stock FX conversion has.

PT2E writes ``quantized_decomposed.quantize_per_tensor`` and ``dequantize_per_channel`` around aten
ops, on plain integer tensors. Here they become ``torch.quantize_per_tensor``,
``torch.quantize_per_channel`` and ``dequantize``, which ``from_fx`` reads. Whatever it cannot turn
into these stays and runs as it is.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.fx import Graph, GraphModule, Node
from torch.utils import _pytree as pytree

from x86quant.errors import UnsupportedError
from x86quant.lowering.graph_tools import add_constant, constant

#: How export spells the model itself at the start of a path.
_ROOT = re.compile(r"^(L\['self'\]|L__self__)\.?")

_QTYPES = {torch.uint8: torch.quint8, torch.int8: torch.qint8}


def reference_form(model: nn.Module | ExportedProgram, example_inputs: Sequence[Any]) -> nn.Module:
    """``model`` itself, or if it is exported or made by PT2E, as a graph that ``from_fx`` reads."""
    if isinstance(model, GraphModule) and (
        any(map(is_decomposed, model.graph.nodes)) or hasattr(model, "_guards_fn")
    ):
        model = _exported_again(model, example_inputs)
    if not isinstance(model, ExportedProgram):
        return model
    gm = flat(functionalized(model).module(check_guards=False))
    for node in list(gm.graph.nodes):
        if not node._erased and is_decomposed(node):
            _convert(gm, node)
        elif node.target is torch.ops.aten.sym_size.int:
            node.op, node.target = "call_method", "size"
    gm.graph.eliminate_dead_code()
    gm.recompile()
    return gm


def _exported_again(gm: GraphModule, example_inputs: Sequence[Any]) -> ExportedProgram:
    """What ``convert_pt2e`` made of an exported program, with the sizes free that were free in it.

    A size of one in ``example_inputs`` would be taken for a constant, so the export sees the sizes
    that the program was first exported with.
    """
    example: list[Any] = []
    free: list[dict[int, Any] | None] = []
    dynamic = False
    placeholders = gm.graph.find_nodes(op="placeholder")
    for node, given in itertools.zip_longest(placeholders, example_inputs):
        traced = None if node is None else node.meta.get("val")
        sizes: dict[int, Any] = {}
        if isinstance(given, torch.Tensor) and isinstance(traced, torch.Tensor):
            shape = list(given.shape)
            for i, size in enumerate(traced.shape[: given.dim()]):
                if isinstance(size, torch.SymInt):
                    sizes[i], shape[i] = torch.export.Dim.AUTO, _typical(size)
            if sizes:
                given, dynamic = torch.zeros(shape, dtype=given.dtype), True
        example.append(given)
        free.append(sizes if isinstance(given, torch.Tensor) else None)
    if not dynamic:
        return torch.export.export(gm, tuple(example_inputs))
    # The module takes them as they were exported, which need not be one by one.
    return torch.export.export(gm, tuple(example), dynamic_shapes=tuple(free))


def _typical(size: torch.SymInt) -> int:
    """A size that the program was traced with, or at least one that is no special case."""
    hint = size.node.hint if size.node.has_hint() else None
    return int(hint) if hint is not None and hint > 1 else 2


def flat(gm: GraphModule) -> GraphModule:
    """``gm``, an exported module, with positional inputs and its results as they are returned."""
    info = getattr(gm.graph._codegen, "pytree_info", None)
    if info is None:
        return gm
    inputs = sum(node.op == "placeholder" for node in gm.graph.nodes)
    if info.in_spec is not None:
        positional, named = info.in_spec.child(0), info.in_spec.child(1)
        if named.num_leaves or positional.num_children != inputs:
            raise UnsupportedError(
                "the exported model's inputs are not plain positional tensors; export a wrapper "
                "module that takes tensors one by one"
            )
    graph = Graph()
    results = graph.graph_copy(gm.graph, val_map={})
    if info.out_spec is not None:
        leaves = list(results) if isinstance(results, list | tuple) else [results]
        results = pytree.tree_unflatten(leaves, info.out_spec)
    graph.output(results)
    return GraphModule(gm, graph)


def take_parts_of_constants(gm: GraphModule) -> None:
    """Make parts of constants constants, such as the weights of queries of those of an attention.

    They share its memory.
    """
    for node in list(gm.graph.nodes):
        if node.target is not torch.ops.aten.slice.Tensor:
            continue
        source, *place = node.args
        whole = constant(gm, source)
        if whole is None or not all(isinstance(x, int) for x in place):
            continue
        with gm.graph.inserting_before(node):
            part = add_constant(gm, gm.graph, node.name, node.target(whole, *place))
        part.meta.update(node.meta)
        node.replace_all_uses_with(part)
        gm.graph.erase_node(node)
    gm.recompile()


def exported_layer(node: Node) -> str:
    """The path of the module that an exported ``node`` belongs to, or nothing."""
    stack = node.meta.get("nn_module_stack")
    path = str(list(stack.values())[-1][0]) if stack else ""
    return _ROOT.sub("", path)


def is_decomposed(node: Node) -> bool:
    """Whether ``node`` calls one of PT2E's ops."""
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and target.namespace == "quantized_decomposed"


def _convert(gm: GraphModule, node: Node) -> None:
    """Replace one quantized_decomposed ``node``."""
    assert isinstance(node.target, torch._ops.OpOverload)
    schema = node.target._schema
    values: dict[str, Any] = dict(zip((a.name for a in schema.arguments), node.args, strict=False))
    values.update(node.kwargs)
    name = schema.name.split("::")[1]
    convert = _CONVERTERS.get(name)
    with gm.graph.inserting_before(node):
        if name.startswith("quantize") and constant(gm, values["input"]) is not None:
            new = _folded(gm, node, values)
        else:
            new = None if convert is None else convert(gm, values)
    if new is None:
        return
    new.meta.update({k: node.meta[k] for k in ("nn_module_stack",) if k in node.meta})
    node.replace_all_uses_with(new)
    gm.graph.erase_node(node)


def _folded(gm: GraphModule, node: Node, values: dict[str, Any]) -> Node | None:
    """The codes of a constant, which PT2E may leave to be computed at each run."""
    found = {}
    for name, value in values.items():
        tensor = constant(gm, value)
        if tensor is None and isinstance(value, Node):
            return None
        found[name] = value if tensor is None else tensor
    assert isinstance(node.target, torch._ops.OpOverload)
    return add_constant(gm, gm.graph, "codes", node.target(**found))


def _quantize_per_tensor(gm: GraphModule, values: dict[str, Any]) -> Node | None:
    scale, zero_point = (_number(gm, values[name]) for name in ("scale", "zero_point"))
    qtype = _QTYPES.get(values["dtype"])
    if scale is None or zero_point is None or qtype is None:
        return None
    x = values["input"]
    low, high = values["quant_min"], values["quant_max"]
    whole = torch.iinfo(values["dtype"])
    if (low, high) != (whole.min, whole.max):  # such as 7 bits: the codes end before the type does
        bounds = [(code - zero_point) * scale for code in (low, high)]
        x = gm.graph.call_function(torch.clamp, (x, *bounds))
    return gm.graph.call_function(torch.quantize_per_tensor, (x, scale, int(zero_point), qtype))


def _dequantize_per_tensor(gm: GraphModule, values: dict[str, Any]) -> Node | None:
    codes = constant(gm, values["input"])
    scale, zero_point = (_number(gm, values[name]) for name in ("scale", "zero_point"))
    if scale is None or zero_point is None:
        return None
    if codes is None:
        source = values["input"]
        quantized = isinstance(source, Node) and _carries_qparams(source)
        return gm.graph.call_method("dequantize", (source,)) if quantized else None
    channels = codes.shape[0]
    return _weight(
        gm,
        codes,
        torch.full((channels,), scale, dtype=torch.float32),
        torch.zeros(channels, dtype=torch.float32) + zero_point,
        0,
    )


def _dequantize_per_channel(gm: GraphModule, values: dict[str, Any]) -> Node | None:
    codes, scales = (constant(gm, values[name]) for name in ("input", "scales"))
    zero_points = constant(gm, values["zero_points"])
    if codes is None or scales is None:
        return None
    if zero_points is None:
        zero_points = torch.zeros_like(scales)
    return _weight(gm, codes, scales, zero_points, values["axis"])


_CONVERTERS = {
    "quantize_per_tensor": _quantize_per_tensor,
    "dequantize_per_tensor": _dequantize_per_tensor,
    "dequantize_per_channel": _dequantize_per_channel,
}


def _weight(
    gm: GraphModule,
    codes: torch.Tensor,
    scales: torch.Tensor,
    zero_points: torch.Tensor,
    axis: int,
) -> Node | None:
    """A constant's codes as ``dequantize(quantize_per_channel(...))``, which gives them again."""
    qtype = _QTYPES.get(codes.dtype)
    if qtype is None or codes.dim() == 0:
        return None
    shape = [1] * codes.dim()
    shape[axis] = -1
    real = (codes - zero_points.reshape(shape)) * scales.reshape(shape)
    constants = [
        add_constant(gm, gm.graph, hint, tensor)
        for hint, tensor in (
            ("weight", real.to(torch.float32)),
            ("scales", scales.to(torch.float64)),
            ("zero_points", zero_points.to(torch.int64)),
        )
    ]
    quantized = gm.graph.call_function(torch.quantize_per_channel, (*constants, axis, qtype))
    return gm.graph.call_method("dequantize", (quantized,))


def _carries_qparams(node: Node) -> bool:
    """Whether ``node`` is a quantized tensor here, and not plain codes."""
    return node.target is torch.quantize_per_tensor


def _number(gm: GraphModule, value: object) -> float | None:
    """A number, or a constant tensor that holds one."""
    if isinstance(value, int | float):
        return value
    found = constant(gm, value)
    return None if found is None or found.numel() != 1 else found.item()


def functionalized(program: ExportedProgram) -> ExportedProgram:
    """``program`` without ops that write in place.

    Raises:
        UnsupportedError: ``out=`` gives a tensor another shape, where torch ends the process if
            there are views of it.
    """
    for node in program.graph.nodes:
        out = node.kwargs.get("out")
        if isinstance(out, Node) and _shape(out) != _shape(node):
            raise UnsupportedError(f"{node.target} gives its out= another shape")
    found: ExportedProgram = program.run_decompositions({})  # of no op
    return found


def _shape(node: Node) -> list[str]:
    return [str(size) for size in getattr(node.meta.get("val"), "shape", ())]
