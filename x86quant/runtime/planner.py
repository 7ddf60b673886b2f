"""Turns a segment of the graph, for inputs of given shapes, into a plan."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from x86quant.errors import NoKernelError
from x86quant.lowering.graph_tools import op_called
from x86quant.lowering.views import is_reshape, is_roll, lies_as_in_float
from x86quant.runtime import layout
from x86quant.runtime.draft import Draft
from x86quant.runtime.native_forms import FORMS
from x86quant.runtime.packs import Packs
from x86quant.runtime.plan import Buffer, NoNativeFormError, Plan, Value, aligned
from x86quant.runtime.shapes import counts_in_nothing, infer_shapes, is_empty


def plan_segment(
    graph_module: GraphModule,
    inputs: Sequence[Any],
    packs: Packs,
    threads: int,
    open_inputs: Sequence[Node] = (),
) -> Plan:
    """Plan ``graph_module`` for tensors and numbers like ``inputs``.

    Inputs that are open may have any number of elements.
    """
    draft = draft_segment(graph_module, inputs, packs, threads, open_inputs)
    return finished(draft, inputs)


def draft_segment(
    graph_module: GraphModule,
    inputs: Sequence[Any],
    packs: Packs,
    threads: int,
    open_inputs: Sequence[Node] = (),
    *,
    is_part: bool = False,
) -> Draft:
    """The steps and buffers of that plan, without places in memory and without a program.

    Of a part of a batch, outputs lie image after image.
    """
    packs.follow_rules()
    shapes = infer_shapes(graph_module, inputs)
    tensors = sum(isinstance(x, torch.Tensor) for x in inputs)
    draft = Draft(graph_module, shapes, packs, threads, tensors, open_inputs, is_part=is_part)
    _fill(draft, inputs)
    return draft


def _fill(draft: Draft, inputs: Sequence[Any]) -> None:
    """Walk the graph."""
    given = iter(inputs)
    bases = iter(range(1, len(inputs) + 1))
    for node in draft.root.graph.nodes:
        if node.op == "placeholder":
            draft[node] = _input(draft, node, next(given), bases)
        elif node.op in ("call_function", "call_method"):
            shape = draft.shapes[node]
            if is_empty(shape) and counts_in_nothing(node, draft.shapes):
                continue
            try:
                if isinstance(shape, torch.Size) and (not shape or not shape.numel()):
                    raise NoKernelError("its tensor is empty or has no dimensions")
                draft[node] = _lowering(node)(draft, node)
            except NoKernelError as error:
                raise NoNativeFormError(node.name, str(error)) from error


def _lowering(node: Node) -> Callable[[Draft, Node], Any]:
    name = op_called(node)
    if name is not None:
        return FORMS[name].lower
    if lies_as_in_float(node):
        return _contiguous
    return _roll if is_roll(node) else _view


def finished(draft: Draft, given: Sequence[Any]) -> Plan:
    """The plan that ``draft`` is of: lay out memory, build the program."""
    results = draft.results()
    peak = draft.lay_out()
    program = new_program(draft, peak, given, results)
    for step in draft.native_steps:
        draft.packs.programs.add(program, step)
    program.check_reach()
    naive = sum(aligned(b.nbytes) for b in draft.buffers if b.base == 0)
    return Plan(tuple(draft.steps), peak, naive, _numbers(results), program)


def new_program(
    draft: Draft, arena_bytes: int, given: Sequence[Any], results: Sequence[Any], batch: int = 0
) -> Any:
    """A program without steps, of which the draft is a part if there is a ``batch``."""
    inputs = [x for x in given if isinstance(x, torch.Tensor)]
    program = draft.packs.programs.new(arena_bytes, len(inputs))
    takes = [n for n in draft.root.graph.nodes if n.op == "placeholder"]
    takes = [n for n in takes if isinstance(draft[n], Value)]
    for node, x in zip(takes, inputs, strict=True):
        if draft.is_open(node):
            program.expect_any_size(_type_name(x))
        else:
            program.expect(list(x.shape), list(x.stride()), _type_name(x))
    for result in results:
        if isinstance(result, Value):
            sizes = [batch or result.meta.shape[0], *result.meta.shape[1:]]
            program.add_output(sizes, list(result.meta.stride()), _type_name(result.meta))
    return program


def _numbers(results: Sequence[Any]) -> tuple[tuple[Any] | None, ...]:
    return tuple(None if isinstance(r, Value) else (r,) for r in results)


def _type_name(x: torch.Tensor) -> str:
    """The type of ``x`` as a program is told."""
    return str(x.dtype).removeprefix("torch.")


def _input(draft: Draft, node: Node, given: Any, bases: Any) -> Any:
    if not isinstance(given, torch.Tensor):
        return given
    meta = torch.empty_strided(given.shape, given.stride(), dtype=given.dtype, device="meta")
    return Value(Buffer(node.name, 0, 0, 0, base=next(bases)), meta)


def _contiguous(draft: Draft, node: Node) -> Value:
    """A result in the order of its dimensions."""
    source = draft.value(node.args[0])
    if source.meta.is_contiguous():
        return source
    order = range(source.meta.dim())
    return draft.copy(node, source, draft.output_of(node, order, source.meta.dtype))


def _view(draft: Draft, node: Node) -> Any:
    """Apply a view, or a question about sizes, to tensors without data."""

    def meta_of(n: Node) -> Any:
        return _metas(draft[n])

    args = torch.fx.node.map_arg(node.args, meta_of)
    kwargs = torch.fx.node.map_arg(node.kwargs, meta_of)
    source = draft[node.args[0]] if isinstance(node.args[0], Node) else None
    if node.target is operator.getitem and not isinstance(source, Value):
        assert source is not None
        return source[node.args[1]]
    if node.op == "call_method":
        result = getattr(args[0], str(node.target))(*args[1:], **kwargs)
    else:
        result = node.target(*args, **kwargs)  # type: ignore[operator]
    if isinstance(result, torch.Tensor):
        assert isinstance(source, Value)
        return _moved(draft, node, source, result)
    if isinstance(result, tuple | list) and any(isinstance(r, torch.Tensor) for r in result):
        assert isinstance(source, Value)
        return tuple(_moved(draft, node, source, r) for r in result)
    return result


def _moved(draft: Draft, node: Node, source: Value, result: torch.Tensor) -> Value:
    """The result of a view; where torch would copy, so does the plan: rows, or channels last."""
    if result.untyped_storage()._cdata == source.meta.untyped_storage()._cdata:
        return Value(source.buffer, result)
    if not is_reshape(node):
        raise NoKernelError("it is no view of its input")
    dtype, order = result.dtype, list(range(result.dim()))
    if len(order) >= 4 and not _keeps_rows(source.meta, result):
        order = layout.channels_last_order(len(order))
    target = layout.like(result.shape, order, dtype)
    try:
        as_source = target.view(source.shape)
    except RuntimeError:  # only memory in logical order can be seen in both shapes
        target = layout.like(result.shape, range(result.dim()), dtype)
        as_source = target.view(source.shape)
    value = draft.new(node.name, target)
    draft.copy(node, source, Value(value.buffer, as_source))
    return value


def _keeps_rows(source: torch.Tensor, result: torch.Tensor) -> bool:
    """Whether the last dimension of both is one, and adjacent: features of rows."""
    return layout.are_rows(source) and source.shape[-1] == result.shape[-1]


def _roll(draft: Draft, node: Node) -> Value:
    """Copy a tensor in the parts whose order rolling changes."""
    source = draft.value(node.args[0])
    shifts, dims = (x if isinstance(x, list | tuple) else [x] for x in node.args[1:])
    strides = source.meta.stride()
    order = sorted(range(len(strides)), key=lambda dim: -strides[dim])
    meta = layout.like(source.shape, order, source.meta.dtype)
    rolled = draft.new(node.name, meta)
    parts = [(source.meta, rolled.meta)]
    for given, dim in zip(shifts, dims, strict=True):
        size = source.shape[dim]
        shift = (draft[given] if isinstance(given, Node) else given) % size
        places = ((0, shift, size - shift), (size - shift, 0, shift))
        parts = [
            (old.narrow(dim, begin, length), new.narrow(dim, to, length))
            for old, new in parts
            for begin, to, length in places
            if length
        ]
    for old, new in parts:
        draft.copy(node, Value(source.buffer, old), Value(rolled.buffer, new))
    return rolled


def _metas(value: Any) -> Any:
    if isinstance(value, Value):
        return value.meta
    return tuple(map(_metas, value)) if isinstance(value, tuple) else value
