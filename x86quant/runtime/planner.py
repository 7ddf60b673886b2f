"""Turns a segment of the graph, for inputs of given shapes, into a plan."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from x86quant.errors import NoKernelError
from x86quant.lowering.graph_tools import attribute, is_op, label, op_name
from x86quant.lowering.views import is_reshape
from x86quant.routing.sizes import Sizes
from x86quant.runtime import layout
from x86quant.runtime.cat_placement import Placement, place_cats
from x86quant.runtime.memory import aligned, assign_offsets
from x86quant.runtime.native_op import NativeOp
from x86quant.runtime.packs import Packs
from x86quant.runtime.plan import Buffer, NoNativeFormError, Plan, Step, Value, multiply_adds
from x86quant.runtime.shapes import infer_shapes

#: Adds a step to a program, once every buffer has its place.
_Emit = Callable[[Any], None]


def plan_segment(
    graph_module: GraphModule, inputs: Sequence[Any], packs: Packs, threads: int, parts: int = 1
) -> Plan:
    """Plan ``graph_module`` for tensors and numbers like ``inputs``.

    With ``parts`` these are the first of so many equal parts of a batch; outputs are of all.
    """
    return _Planner(graph_module, inputs, packs, threads, parts).plan()


def _advance(part: torch.Tensor) -> int:
    """Bytes from one part of a batch to the next."""
    return part.shape[0] * part.stride(0) * part.element_size()


class _Planner:
    def __init__(
        self,
        graph_module: GraphModule,
        inputs: Sequence[Any],
        packs: Packs,
        threads: int,
        parts: int,
    ) -> None:
        self.root = graph_module
        self.packs = packs
        packs.follow_rules()
        self.threads = threads
        self.parts = parts
        self.inputs = inputs
        self.shapes = infer_shapes(graph_module, inputs)
        self.values: dict[Node, Any] = {}
        self.steps: list[Step] = []
        self.emitted: list[_Emit] = []
        self.buffers: list[Buffer] = []
        self.by_storage: dict[int, Buffer] = {}
        self.kept: list[torch.Tensor] = []  # meta tensors whose storages are keys above
        nodes = list(graph_module.graph.nodes)
        self.output_nodes: list[Node] = list(nodes[-1].args[0])
        self.placements: dict[Node, Placement] = place_cats(graph_module.graph, self.shapes)
        self.tensors = sum(isinstance(x, torch.Tensor) for x in inputs)

    def plan(self) -> Plan:
        """Walk the graph, lay out memory, build the program."""
        given = iter(self.inputs)
        bases = iter(range(1, self.tensors + 1))
        for node in self.root.graph.nodes:
            if node.op == "placeholder":
                self.values[node] = self._input(node, next(given), bases)
            elif node.op in ("call_function", "call_method"):
                lower = _LOWERED[op_name(node)] if is_op(node) else _Planner._view
                shape = self.shapes[node]
                try:
                    if isinstance(shape, torch.Size) and (not shape or not shape.numel()):
                        raise NoKernelError("its tensor is empty or has no dimensions")
                    self.values[node] = lower(self, node)
                except NoKernelError as error:
                    raise NoNativeFormError(node.name, str(error)) from error
        results = [self._result(node, index) for index, node in enumerate(self.output_nodes)]
        arena = [b for b in self.buffers if b.base == 0]
        peak = assign_offsets(arena)
        program = torch.classes.x86quant.Program(peak, self.tensors)
        inputs = [x for x in self.inputs if isinstance(x, torch.Tensor)]
        for x in inputs:
            program.expect(*self._whole_batch(x), x.dtype != torch.uint8)
        outputs = [result.meta for result in results if isinstance(result, Value)]
        for meta in outputs:
            program.add_output(*self._whole_batch(meta), meta.dtype != torch.uint8)
        for emit in self.emitted:
            emit(program)
        if self.parts > 1:
            program.repeat(self.parts, [*map(_advance, inputs)], [*map(_advance, outputs)])
        naive = sum(aligned(b.nbytes) for b in arena)
        numbers = tuple(None if isinstance(r, Value) else (r,) for r in results)
        return Plan(tuple(self.steps), peak, naive, numbers, program, self.parts)

    def _whole_batch(self, part: torch.Tensor) -> tuple[list[int], list[int]]:
        """Sizes and strides of all parts of the batch."""
        sizes = list(part.shape)
        if self.parts > 1:
            sizes[0] *= self.parts
        return sizes, list(part.stride())

    # ---------------------------------------------------------------- values and buffers

    def _input(self, node: Node, given: Any, bases: Any) -> Any:
        if not isinstance(given, torch.Tensor):
            return given
        meta = torch.empty_strided(given.shape, given.stride(), dtype=given.dtype, device="meta")
        buffer = Buffer(node.name, 0, 0, 0, base=next(bases))
        return self._value(buffer, meta)

    def _value(self, buffer: Buffer, meta: torch.Tensor) -> Value:
        self.by_storage[meta.untyped_storage()._cdata] = buffer
        self.kept.append(meta)
        return Value(buffer, meta)

    def _new(self, name: str, meta: torch.Tensor, base: int = 0) -> Value:
        """A value in a buffer of its own."""
        nbytes = meta.untyped_storage().nbytes()
        first = len(self.steps)
        buffer = Buffer(name, nbytes, first, first, base)
        self.buffers.append(buffer)
        return self._value(buffer, meta)

    def _output_of(
        self, node: Node, order: Sequence[int], dtype: torch.dtype = torch.uint8
    ) -> Value:
        """Where ``node`` writes: its part of a concatenation, an output, or a buffer of its own."""
        placement = self.placements.get(node)
        if placement is not None:
            whole = self._cat_buffer(placement.cat)
            part = whole.meta.narrow(placement.dim, placement.start, placement.size)
            return self._value(whole.buffer, part)
        base = 0
        if node in self.output_nodes:
            base = 1 + self.tensors + self._output_index(node)
            if self.parts > 1:  # the next part follows this one
                order = [0, *(i for i in order if i != 0)]
        return self._new(node.name, layout.like(self.shapes[node], order, dtype), base)

    def _output_index(self, node: Node) -> int:
        """The number of ``node`` among the outputs that are tensors."""
        before = self.output_nodes[: self.output_nodes.index(node)]
        return sum(self._is_tensor(n) for n in before)

    def _is_tensor(self, node: Node) -> bool:
        return isinstance(self.shapes[node], torch.Size)

    def _cat_buffer(self, cat: Node) -> Value:
        if cat not in self.values:
            order = layout.channels_last_order(len(self.shapes[cat]))
            self.values[cat] = self._output_of(cat, order)
        value: Value = self.values[cat]
        return value

    def _result(self, node: Node, index: int) -> Any:
        """The value of an output: in a buffer that leaves the segment, copied there if need be."""
        value = self.values[node]
        if not isinstance(value, Value):
            return value
        base = 1 + self.tensors + self._output_index(node)
        if value.buffer.base == base:
            return value
        order = layout.channels_last_order(value.meta.dim())
        if value.meta.dim() < 4:
            order = list(range(value.meta.dim()))
        out = self._new(node.name, layout.like(value.shape, order), base)
        self._copy(node, value, out)
        return out

    # ---------------------------------------------------------------- steps

    def _emit(
        self,
        node: Node,
        op: str,
        inputs: Sequence[Value],
        output: Value,
        emit: _Emit,
        **facts: Any,
    ) -> Value:
        index = len(self.steps)
        for value in (*inputs, output):
            value.buffer.first = min(value.buffer.first, index)
            value.buffer.last = max(value.buffer.last, index)
        self.steps.append(Step(node.name, label(node), op, tuple(inputs), output, **facts))
        self.emitted.append(emit)
        return output

    def _run_op(self, node: Node, op: NativeOp, inputs: Sequence[Value], output: Value) -> Value:
        return self._emit(node, op.name, inputs, output, op.add_to)

    def _copy(self, node: Node, source: Value, target: Value) -> Value:
        """Copy codes between tensors of one shape, whatever their strides."""
        op = NativeOp.copying(source, target)
        if op is not None:
            return self._run_op(node, op, [source], target)

        def emit(program: Any) -> None:
            size = source.meta.element_size()
            program.add_copy(
                size,
                list(source.shape),
                NativeOp.address(source),
                [s * size for s in source.meta.stride()],
                NativeOp.address(target),
                [s * size for s in target.meta.stride()],
            )

        return self._emit(node, "copy", [source], target, emit)

    def _with_channels_adjacent(self, node: Node, value: Value, channel: int) -> Value:
        """``value`` itself, or a copy whose dimension ``channel`` is innermost."""
        if layout.fits(value.meta, channel):
            return value
        rank = value.meta.dim()
        order = [i for i in range(rank) if i != channel % rank] + [channel % rank]
        return self._copy(
            node, value, self._new(node.name, layout.like(value.shape, order, value.meta.dtype))
        )

    def _rows(self, node: Node, values: Sequence[Value], channel: int) -> list[Any]:
        found = layout.rows([v.meta for v in values], channel)
        if found is None:
            raise NoKernelError("its tensors have too many dimensions that lie apart")
        return found

    # ---------------------------------------------------------------- nodes

    def _argument(self, argument: Any) -> Any:
        return torch.fx.node.map_arg(argument, lambda node: self.values[node])

    def _view(self, node: Node) -> Any:
        """Apply a view, or a question about sizes, to tensors without data."""

        def meta_of(n: Node) -> Any:
            return _metas(self.values[n])

        args = torch.fx.node.map_arg(node.args, meta_of)
        kwargs = torch.fx.node.map_arg(node.kwargs, meta_of)
        source = self.values[node.args[0]] if isinstance(node.args[0], Node) else None
        if node.target is operator.getitem and not isinstance(source, Value):
            assert source is not None
            return source[node.args[1]]
        if node.op == "call_method":
            result = getattr(args[0], str(node.target))(*args[1:], **kwargs)
        else:
            result = node.target(*args, **kwargs)  # type: ignore[operator]
        if isinstance(result, torch.Tensor):
            assert isinstance(source, Value)
            return self._moved(node, source, result)
        if isinstance(result, tuple | list) and any(isinstance(r, torch.Tensor) for r in result):
            assert isinstance(source, Value)
            return tuple(self._moved(node, source, r) for r in result)
        return result

    def _moved(self, node: Node, source: Value, result: torch.Tensor) -> Value:
        """The result of a view; where torch would copy, so does the plan, channels last."""
        if result.untyped_storage()._cdata == source.meta.untyped_storage()._cdata:
            return self._value(source.buffer, result)
        if not is_reshape(node):
            raise NoKernelError("it is no view of its input")
        order = layout.channels_last_order(result.dim())
        target = layout.like(result.shape, order if result.dim() >= 4 else range(result.dim()))
        try:
            as_source = target.view(source.shape)
        except RuntimeError:  # only memory in logical order can be seen in both shapes
            target = layout.like(result.shape, range(result.dim()))
            as_source = target.view(source.shape)
        value = self._new(node.name, target)
        self._copy(node, source, self._value(value.buffer, as_source))
        return value

    def conv(self, node: Node) -> Value:
        kwargs: Any = node.kwargs
        x = self._with_channels_adjacent(node, self.values[kwargs["x"]], 1)
        out = self._output_of(node, layout.channels_last_order(x.meta.dim()))
        residual = self._residual(node, 1)
        pixels = x.meta.shape[2:].numel() if kwargs["transposed"] else 0
        return self._weighted(node, x, out, residual, layout.image, pixels)

    def linear(self, node: Node) -> Value:
        kwargs: Any = node.kwargs
        x = self._with_channels_adjacent(node, self.values[kwargs["x"]], -1)
        out = self._output_of(node, range(x.meta.dim()))
        residual = self._residual(node, -1)
        values = [x, out] if residual is None else [x, residual, out]
        found = dict(zip(map(id, values), self._rows(node, values, -1), strict=True))
        by_meta = {id(value.meta): found[id(value)] for value in values}
        return self._weighted(node, x, out, residual, lambda meta: by_meta[id(meta)], 0)

    def _residual(self, node: Node, channel: int) -> Value | None:
        residual = node.kwargs["residual"]
        if residual is None:
            return None
        return self._with_channels_adjacent(node, self._argument(residual), channel)

    def _weighted(
        self,
        node: Node,
        x: Value,
        out: Value,
        residual: Value | None,
        sizes_of: Callable[[torch.Tensor], Any],
        input_pixels: int,
    ) -> Value:
        weight = self.packs.weight(node)
        shape = out.shape
        if op_name(node) == "conv":
            sizes = Sizes.of_conv(x.shape, shape)
        else:
            sizes = Sizes.of_linear(shape)
            shape = (sizes.rows, shape[-1])
        packed = self.packs.get(node, sizes, self.threads)

        def emit(program: Any) -> None:
            words = [
                NativeOp.words(value, *sizes_of(value.meta)) if value is not None else []
                for value in (x, out, residual)
            ]
            program.add_conv(packed.handle, *words)

        return self._emit(
            node,
            op_name(node),
            [x] if residual is None else [x, residual],
            out,
            emit,
            answer=packed.choice,
            sizes=sizes,
            multiply_adds=multiply_adds(shape, tuple(weight.shape), input_pixels),
            weight_bytes=weight.numel(),
        )

    def quantize(self, node: Node) -> Value:
        kwargs: Any = node.kwargs
        x: Value = self.values[kwargs["x"]]
        rank = x.meta.dim()
        order = list(range(rank)) if rank < 4 and not _feeds_conv(node) else None
        out = self._output_of(node, order or layout.channels_last_order(rank))
        return self._run_op(node, NativeOp.quantize(node, x, out), [x], out)

    def dequantize(self, node: Node) -> Value:
        x: Value = self.values[node.kwargs["x"]]  # type: ignore[index]
        rank = x.meta.dim()
        order = layout.channels_last_order(rank) if rank >= 4 else list(range(rank))
        channel = layout.order_of(x.meta)[-1] if rank else 0
        x = self._with_channels_adjacent(node, x, channel)
        out = self._output_of(node, order, torch.float32)
        return self._run_op(node, NativeOp.dequantize(node, x, out), [x], out)

    def lut(self, node: Node) -> Value:
        table = attribute(self.root, str(node.kwargs["table"].target))  # type: ignore[union-attr]
        return self._elementwise(node, ["x"], lambda v, o, c: NativeOp.lut(table, v, o, c))

    def requantize(self, node: Node) -> Value:
        return self._elementwise(
            node, ["x"], lambda v, o, c: NativeOp.requantize(node.kwargs, v, o, c)
        )

    def affine(self, node: Node) -> Value:
        return self._per_channel(node, NativeOp.affine)

    def layer_norm(self, node: Node) -> Value:
        return self._per_channel(node, NativeOp.layer_norm)

    def _per_channel(self, node: Node, make: Any) -> Value:
        """An op with one parameter for each index along an axis."""
        kwargs: Any = node.kwargs
        x: Value = self.values[kwargs["x"]]
        axis = kwargs["axis"] % x.meta.dim()
        x = self._with_channels_adjacent(node, x, axis)
        order = [i for i in layout.order_of(x.meta) if i != axis] + [axis]
        out = self._output_of(node, order)
        tables = {
            name: attribute(self.root, str(kwargs[name].target))
            for name in ("scale", "shift", "weight", "bias", "lut")
            if isinstance(kwargs.get(name), Node)
        }
        return self._run_op(node, make(kwargs, tables, x, out, axis), [x], out)

    def _elementwise(self, node: Node, names: Sequence[str], make: Any) -> Value:
        kwargs: Any = node.kwargs
        values = [self.values[kwargs[name]] for name in names]
        shape = self.shapes[node]
        values = [self._expanded(node, value, shape) for value in values]
        order = layout.order_of(values[0].meta)
        out = self._output_of(node, order)
        channel = next((i for i in reversed(order) if shape[i] != 1), len(shape) - 1)
        if not layout.fits(out.meta, channel):  # placed in a concatenation of another layout
            channel = layout.order_of(out.meta)[-1]
        values = [self._with_channels_adjacent(node, value, channel) for value in values]
        return self._run_op(node, make(values, out, channel), values, out)

    def _expanded(self, node: Node, value: Value, shape: torch.Size) -> Value:
        """``value`` broadcast to ``shape``, in memory of its own where it must be repeated."""
        if value.meta.shape == shape:
            return value
        wide = self._value(value.buffer, value.meta.expand(shape))
        order = layout.channels_last_order(len(shape))
        return self._copy(node, wide, self._new(node.name, layout.like(shape, order)))

    def add(self, node: Node) -> Value:
        tables = self._lut_of(node)
        return self._elementwise(
            node, ["a", "b"], lambda v, o, c: NativeOp.add(node.kwargs, tables, v, o, c)
        )

    def mul(self, node: Node) -> Value:
        tables = self._lut_of(node)
        kwargs: Any = node.kwargs
        a, b = (self.values[kwargs[name]] for name in "ab")
        swapped = _is_point(a.shape, b.shape)
        if swapped:  # a product does not mind
            a, b = b, a
        if not _is_point(b.shape, a.shape):
            return self._elementwise(
                node, ["a", "b"], lambda v, o, c: NativeOp.mul(node.kwargs, tables, v, o, c)
            )
        a, b = (self._with_channels_adjacent(node, v, 1) for v in (a, b))
        out = self._output_of(node, layout.channels_last_order(a.meta.dim()))
        op = NativeOp.mul_by_point(kwargs, tables, a, b, out, swapped)
        return self._run_op(node, op, [a, b], out)

    def _lut_of(self, node: Node) -> dict[str, torch.Tensor]:
        lut = node.kwargs.get("lut")
        return {"lut": attribute(self.root, str(lut.target))} if isinstance(lut, Node) else {}

    def pool(self, node: Node) -> Value:
        return self._spatial(node, NativeOp.pool)

    def upsample(self, node: Node) -> Value:
        return self._spatial(node, NativeOp.upsample)

    def _spatial(self, node: Node, make: Any) -> Value:
        kwargs: Any = node.kwargs
        x = self._with_channels_adjacent(node, self.values[kwargs["x"]], 1)
        out = self._output_of(node, layout.channels_last_order(x.meta.dim()))
        return self._run_op(node, make(op_name(node), kwargs, x, out), [x], out)

    def cat(self, node: Node) -> Value:
        kwargs: Any = node.kwargs
        whole = self._cat_buffer(node)
        dim = kwargs["dim"] % whole.meta.dim()
        start = 0
        qparams = zip(kwargs["x_scales"], kwargs["x_zps"], strict=True)
        for x_node, (scale, zero_point) in zip(kwargs["xs"], qparams, strict=True):
            x: Value = self.values[x_node]
            part = self._value(whole.buffer, whole.meta.narrow(dim, start, x.shape[dim]))
            start += x.shape[dim]
            placement = self.placements.get(x_node)
            if placement is not None and placement.cat is node:
                continue
            if (scale, zero_point) == (kwargs["out_scale"], kwargs["out_zp"]):
                self._copy(node, x, part)
                continue
            channel = layout.order_of(whole.meta)[-1]
            x = self._with_channels_adjacent(node, x, channel)
            change = {**kwargs, "x_scale": scale, "x_zp": zero_point}
            op = NativeOp.requantize(change, [x], part, channel)
            self._run_op(node, op, [x], part)
        return whole


_LOWERED: dict[str, Callable[[_Planner, Node], Value]] = {
    "adaptive_avg_pool": _Planner.pool,
    "add": _Planner.add,
    "affine": _Planner.affine,
    "avg_pool": _Planner.pool,
    "cat": _Planner.cat,
    "conv": _Planner.conv,
    "dequantize": _Planner.dequantize,
    "layer_norm": _Planner.layer_norm,
    "linear": _Planner.linear,
    "lut": _Planner.lut,
    "max_pool": _Planner.pool,
    "mul": _Planner.mul,
    "quantize": _Planner.quantize,
    "requantize": _Planner.requantize,
    "upsample": _Planner.upsample,
}


def _metas(value: Any) -> Any:
    if isinstance(value, Value):
        return value.meta
    return tuple(map(_metas, value)) if isinstance(value, tuple) else value


def _feeds_conv(node: Node) -> bool:
    return any(is_op(user, "conv") for user in node.users)


def _is_point(point: tuple[int, ...], whole: tuple[int, ...]) -> bool:
    """Whether ``point`` is one pixel of each image of ``whole``."""
    return (
        2 < len(point) == len(whole) <= 5
        and point[:2] == whole[:2]
        and all(size == 1 for size in point[2:])
        and point != whole
    )
