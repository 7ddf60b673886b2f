"""Front end: a stock-converted FX model becomes one canonical graph.

The canonical graph says what the stock model means and nothing of how it runs: between quantized
tensors stand plain float ops::

    codes = x86quant.quantize(...)  ->  x86quant.dequantize  ->  aten op  ->  x86quant.quantize ...

with int8 weights as constants behind ``x86quant.dequantize_weight``. It runs as it is, it is the
reference that the lowered graph is compared with, and an op that no pass knows simply stays.
Quantized-module form, reference form and eager-mode models all come out the same. Writes in place
are gone before the walk begins (``mutation.py``).
"""

from __future__ import annotations

import dataclasses
import inspect
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.node import map_arg

from x86quant.errors import InvalidInputError, UnsupportedError
from x86quant.lowering import float_forms, normalize
from x86quant.lowering.builder import Builder
from x86quant.lowering.from_export import exported_layer, reference_form
from x86quant.lowering.graph_tools import QParams, attribute, emit, own_call
from x86quant.lowering.module_functions import MODULES
from x86quant.lowering.mutation import InPlaceTracer, without_mutations
from x86quant.lowering.rounded import RoundedRecurrent
from x86quant.lowering.views import laid_out

#: What is added to codes of stock PyTorch's types to make them unsigned.
_CODES = {
    getattr(torch, name): shift
    for name, shift in (("quint8", 0), ("qint8", 128))
    if hasattr(torch, name)
}

#: Methods whose result depends on how the tensor lies in memory, which is our own affair elsewhere.
_SEE_MEMORY = frozenset({"as_strided", "is_contiguous", "storage_offset", "stride", "view"})


@dataclasses.dataclass(frozen=True, slots=True)
class Seen:
    """What a node's value was when the stock model ran once on the example inputs."""

    shape: tuple[int, ...] | None = None
    dtype: torch.dtype | None = None
    qparams: QParams | None = None
    memory_format: torch.memory_format | None = None

    @property
    def is_tensor(self) -> bool:
        """Whether the value was a tensor (and not a size, a tuple, ...)."""
        return self.shape is not None

    @staticmethod
    def of(value: object) -> Seen:
        """Describe ``value``."""
        if not isinstance(value, torch.Tensor):
            return Seen()
        qparams = None
        if value.is_quantized and value.dtype in _CODES and _per_tensor(value):
            # A signed code c is the unsigned code c + 128 with its zero point shifted alike.
            qparams = QParams(value.q_scale(), value.q_zero_point() + _CODES[value.dtype])
        return Seen(tuple(value.shape), value.dtype, qparams, _memory_format(value))

    @property
    def canonical_dtype(self) -> torch.dtype | None:
        """The type of what stands for it in a canonical graph."""
        return torch.float32 if self.dtype in _CODES else self.dtype

    @property
    def is_real(self) -> bool:
        """Whether it stood for real numbers: floats or their codes."""
        return self.dtype is not None and (self.dtype.is_floating_point or self.dtype in _CODES)


def _per_tensor(value: torch.Tensor) -> bool:
    return value.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric)


def _memory_format(value: torch.Tensor) -> torch.memory_format | None:
    if value.layout is not torch.strided:
        return None
    if value.is_contiguous():
        return torch.contiguous_format
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(value.dim())
    return last if last is not None and value.is_contiguous(memory_format=last) else None


class _Recorder(Interpreter):
    """Runs the stock model once and keeps a description of every value."""

    def __init__(self, model: GraphModule) -> None:
        super().__init__(model)
        self.seen: dict[Node, Seen] = {}

    def run_node(self, n: Node) -> Any:
        value = super().run_node(n)
        self.seen[n] = Seen.of(value)
        return value

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the module returns, or zeros in its place where only its own kind matters."""
        module = self.fetch_attr(str(target))
        if type(module) is RoundedRecurrent:
            return module.zeros(args[0])
        return super().call_module(target, args, kwargs)


class _Walk:
    """Goes through the stock graph node by node and writes down what each means."""

    def __init__(self, model: GraphModule, seen: dict[Node, Seen]) -> None:
        self.model = model
        self.builder = Builder()
        self._seen = seen
        self._values: dict[Node, Any] = {}

    def convert(self, node: Node) -> None:
        """Emit the canonical form of one stock node."""
        before = set(self.builder.graph.nodes)
        value = getattr(self, f"_{node.op}")(node)
        if node.op == "output":
            return
        value = self._quantized(node, value)
        self._values[node] = value
        self._describe(node, set(self.builder.graph.nodes) - before)

    def _describe(self, node: Node, new: set[Node]) -> None:
        seen = self._seen[node]
        for emitted in new:
            emitted.meta.setdefault("source", node.name)
            if node.op == "call_module":
                emitted.meta["layer"] = str(node.target)
            elif path := exported_layer(node):
                emitted.meta["layer"] = path
            if seen.is_tensor and emitted.op not in ("get_attr", "placeholder"):
                emitted.meta.setdefault("shape", seen.shape)
                emitted.meta.setdefault("dtype", seen.canonical_dtype)

    def _quantized(self, node: Node, value: Any) -> Any:
        """Quantize the float ``value`` if the stock node's result was quantized."""
        seen = self._seen[node]
        if seen.qparams is not None:
            scale, zero_point = seen.qparams.scale, seen.qparams.zero_point
            codes = emit(
                self.builder.graph, "quantize", x=value, out_scale=scale, out_zp=zero_point
            )
            return emit(self.builder.graph, "dequantize", x=codes, x_scale=scale, x_zp=zero_point)
        return value

    def _mapped(self, value: Any) -> Any:
        return map_arg(value, lambda node: self._values[node])

    def _placeholder(self, node: Node) -> Node:
        new = self.builder.graph.create_node(
            "placeholder", str(node.target), node.args, node.kwargs, name=node.name
        )
        seen = self._seen[node]
        new.meta["shape"] = seen.shape
        new.meta["input_dtype"] = seen.dtype
        return self.builder.graph.call_method("dequantize", (new,)) if seen.qparams else new

    def _get_attr(self, node: Node) -> Node:
        value = attribute(self.model, str(node.target))
        if isinstance(value, torch.Tensor):
            real = value.dequantize() if value.is_quantized else value
            return self.builder.constant(str(node.target), real)
        target = str(node.target).replace(".", "_")
        setattr(self.builder.root, target, value)
        return self.builder.graph.create_node("get_attr", target)

    def _output(self, node: Node) -> None:
        self.builder.graph.output(map_arg(node.args[0], self._result))

    def _result(self, node: Node) -> Any:
        """What ``node`` stands for, in memory as the model's own result lies."""
        seen, value = self._seen[node], self._values[node]
        if not isinstance(value, Node) or seen.memory_format is not torch.contiguous_format:
            return value
        assert seen.shape is not None
        return laid_out(self.builder.graph, value, len(seen.shape))

    def _call_method(self, node: Node) -> Any:
        return self._method(node, str(node.target))

    def _method(self, node: Node, name: str) -> Any:
        args, kwargs = self._mapped(node.args), dict(self._mapped(node.kwargs))
        if name == "dequantize":
            return args[0]
        if name == "view" and _reshapes(args, kwargs):
            # Codes may lie in memory channels last, where a view is not always possible.
            name = "reshape"
            if "size" in kwargs:
                kwargs["shape"] = kwargs.pop("size")
        elif name == "view_as":
            name = "reshape_as"
        elif name in _SEE_MEMORY and isinstance(node.args[0], Node):
            args = (self._as_it_lay(node, node.args[0]), *args[1:])
        function = normalize.METHODS.get(name)
        if function is not None and self._seen[node].is_real:
            return self.builder.call(function, *args, **kwargs)
        return self.builder.graph.call_method(name, args, kwargs)

    def _as_it_lay(self, node: Node, argument: Node) -> Any:
        """``argument`` in the memory format that it had in the stock model."""
        seen, value = self._seen[argument], self._values[argument]
        if not seen.is_tensor:
            return value
        if seen.memory_format is None:
            raise UnsupportedError(
                f"{node.name} ({node.target}) depends on how a tensor lies in memory; call "
                "contiguous() on the tensor first"
            )
        return self.builder.graph.call_method(
            "contiguous", (value,), {"memory_format": seen.memory_format}
        )

    def _call_function(self, node: Node) -> Any:
        target: Any = node.target
        if (name := _method_name(target)) is not None:
            return self._method(node, name)
        if (own := own_call(node)) is not None:
            return self.builder.graph.call_function(own[0], (), dict(self._mapped(own[1])))
        args, kwargs = self._mapped(node.args), dict(self._mapped(node.kwargs))
        if target is operator.getitem and isinstance(args[0], tuple):
            return args[0][args[1]]  # of what a module gave
        converter = float_forms.function_converter(target)
        if converter is not None and _binds(converter, self.builder, node, *args, **kwargs):
            return converter(self.builder, node, *args, **kwargs)
        if float_forms.is_quantized_op(target):
            return self._stock_op(node)
        if target is torch.quantize_per_tensor_dynamic:
            raise UnsupportedError(
                f"{node.name} (quantize_per_tensor_dynamic) gives a tensor a range of its own at "
                "each call, and ranges in a compiled graph are fixed; keep the dynamic layer "
                "around it in float, or quantize the float model with x86quant.quantize"
            )
        if target in _VIEWS:
            target = torch.ops.aten.reshape.default
        elif target in _STRIDED and isinstance(node.args[0], Node):
            args = (self._as_it_lay(node, node.args[0]), *args[1:])
        if self._seen[node].is_real:
            return self.builder.call(target, *args, **kwargs)
        return self.builder.graph.call_function(target, args, kwargs)

    def _call_module(self, node: Node) -> Any:
        module = attribute(self.model, str(node.target))
        args, kwargs = self._mapped(node.args), self._mapped(node.kwargs)
        return self.module(str(node.target), module, node, args, kwargs)

    def module(
        self, path: str, module: nn.Module, node: Node, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        """Emit a call of ``module``, found at ``path``."""
        if float_forms.is_fused(module) and not kwargs:
            value = args[0]
            for name, child in module.named_children():
                value = self.module(f"{path}.{name}", child, node, (value, *args[1:]), {})
            return value
        converter = float_forms.module_converter(module)
        if converter is not None:
            positional = _positional(module, args, kwargs)
            if _binds(converter, self.builder, path, module, *positional):
                return converter(self.builder, path, module, *positional)
        spelled = MODULES.get(type(module))
        if spelled is not None and self._seen[node].is_real:
            function, attributes = spelled(module)
            named = {
                key: self.builder.constant(f"{path}_{key}", value)
                if isinstance(value, torch.Tensor)
                else value
                for key, value in attributes.items()
            }
            return self.builder.call(function, *_positional(module, args, kwargs), **named)
        if float_forms.is_quantized_module(module) and self._seen[node].qparams is not None:
            return self._stock_op(node)
        self.builder.adopt(path, module)
        return self.builder.graph.call_module(path, tuple(args), kwargs)

    def _stock_op(self, node: Node) -> Any:
        """Run a stock quantized op that has no float form here, on real quantized tensors."""

        def stock_value(argument: Node) -> Any:
            seen, value = self._seen[argument], self._values[argument]
            if argument.op == "get_attr" and seen.shape == ():
                # A scale or zero point: torch.export wants the number.
                return attribute(self.model, str(argument.target)).item()
            if seen.qparams is None:
                return value
            assert seen.dtype is not None
            scale, zero_point = seen.qparams.scale, seen.qparams.zero_point - _CODES[seen.dtype]
            return self.builder.graph.call_function(
                torch.quantize_per_tensor, (value, scale, zero_point, seen.dtype)
            )

        args, kwargs = map_arg(node.args, stock_value), map_arg(node.kwargs, stock_value)
        if node.op == "call_module":
            path = str(node.target)
            self.builder.adopt(path, attribute(self.model, path))
            result = self.builder.graph.call_module(path, args, kwargs)
        else:
            result = self.builder.graph.call_function(node.target, args, kwargs)  # type: ignore[arg-type]
        result.meta["why"] = "a stock quantized op that has no int8 form here"
        if self._seen[node].qparams is None:
            return result
        return self.builder.graph.call_method("dequantize", (result,))


#: Functions that see how their first argument lies in memory.
_STRIDED = frozenset({torch.as_strided, torch.ops.aten.as_strided.default})
#: Views that reshape does too, wherever the codes lie.
_VIEWS = frozenset({torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default})


def _reshapes(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether a ``view`` is to another shape, not to another dtype."""
    wanted = [*args[1:], *kwargs.values()]
    return "dtype" not in kwargs and not isinstance(wanted[0], torch.dtype)


def _method_name(function: object) -> str | None:
    """``add`` for ``torch.Tensor.add``, a method spelled as a function."""
    name = getattr(function, "__name__", "")
    found = name and getattr(torch.Tensor, name, None) is function
    return name if found and not name.startswith("__") else None


def _binds(function: Any, *args: Any, **kwargs: Any) -> bool:
    """Whether ``function`` can be called so."""
    try:
        inspect.signature(function).bind(*args, **kwargs)
    except TypeError:
        return False
    return True


def _positional(module: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """The arguments of ``module``, whatever the call spelled by name, in their order."""
    if not kwargs:
        return tuple(args)
    bound = inspect.signature(module.forward).bind(*args, **kwargs)
    return bound.args if not bound.kwargs else tuple(bound.arguments.values())


def trace(model: nn.Module) -> GraphModule:
    """``model`` as a GraphModule; quantized modules stay whole."""
    if isinstance(model, GraphModule):
        return model
    if isinstance(model, torch.jit.ScriptModule):
        raise UnsupportedError(
            f"x86quant.compile: {type(model).__name__} is TorchScript, whose layers cannot be read "
            "back; compile the model that it was made from"
        )
    try:
        return GraphModule(model, InPlaceTracer().trace(model))
    except Exception as error:  # whatever the model's own code raises without values
        raise UnsupportedError(
            f"x86quant.compile: {type(model).__name__} cannot be traced by torch.fx ({error}); "
            "convert it with torch.ao.quantization.quantize_fx.convert_fx, or wrap the part that "
            "branches on values in torch.fx.wrap"
        ) from error


def from_fx(
    model: nn.Module | ExportedProgram, example_inputs: Sequence[Any], *, writes: bool = True
) -> GraphModule:
    """The canonical graph of ``model``, a result of stock ``convert_fx``, or of PT2E.

    ``example_inputs`` is the tuple of positional inputs; the model runs on it once, to learn the
    scale, zero point and shape of every value. ``writes`` is False where no node of it is known to
    write to another's value.
    """
    if isinstance(example_inputs, torch.Tensor):
        raise InvalidInputError(
            "x86quant.compile: example_inputs must be a tuple of inputs; write (x,) for one tensor"
        )
    traced = trace(reference_form(model, example_inputs))
    if writes:
        traced = without_mutations(traced, example_inputs)
    recorder = _Recorder(traced)
    with torch.no_grad():
        recorder.run(*example_inputs)
    walk = _Walk(traced, recorder.seen)
    for node in traced.graph.nodes:
        walk.convert(node)
    builder = walk.builder
    canonical = GraphModule(builder.root, builder.graph, class_name="CanonicalGraph")
    if canonical.graph.eliminate_dead_code():
        canonical.recompile()
    canonical.graph.lint()
    return canonical.eval()
