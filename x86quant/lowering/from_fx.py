"""Front end: a stock-converted FX model becomes one canonical graph.

The canonical graph says what the stock model means and nothing of how it runs: between quantized
tensors stand plain float ops::

    codes = x86quant.quantize(...)  ->  x86quant.dequantize  ->  aten op  ->  x86quant.quantize ...

with int8 weights as constants behind ``x86quant.dequantize_weight``. It runs as it is, it is the
reference that the lowered graph is compared with, and an op that no pass knows simply stays.
Quantized-module form, reference form and eager-mode models all come out the same.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.fx import Graph, GraphModule, Interpreter, Node, Tracer
from torch.fx.node import map_arg

from x86quant.errors import InvalidInputError, UnsupportedError
from x86quant.lowering import normalize, stock_layers
from x86quant.lowering.from_export import exported_layer, reference_form
from x86quant.lowering.graph_tools import (
    QParams,
    add_constant,
    attribute,
    dequantized,
    emit,
    scale_and_zp,
    symmetric_int8,
)

_CODES = {torch.quint8: 0, torch.qint8: 128}


@dataclasses.dataclass(frozen=True, slots=True)
class Seen:
    """What a node's value was when the stock model ran once on the example inputs."""

    shape: tuple[int, ...] | None = None
    dtype: torch.dtype | None = None
    qparams: QParams | None = None

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
        return Seen(tuple(value.shape), value.dtype, qparams)


def _per_tensor(value: torch.Tensor) -> bool:
    return value.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric)


class _Recorder(Interpreter):
    """Runs the stock model once and keeps a description of every value."""

    def __init__(self, model: GraphModule) -> None:
        super().__init__(model)
        self.seen: dict[Node, Seen] = {}

    def run_node(self, n: Node) -> Any:
        value = super().run_node(n)
        self.seen[n] = Seen.of(value)
        return value


class Builder:
    """Builds the canonical graph node by node; converters in ``stock`` call its methods."""

    def __init__(self, model: GraphModule, seen: dict[Node, Seen]) -> None:
        self.model = model
        self.root = nn.Module()
        self.graph = Graph()
        self._seen = seen
        self._values: dict[Node, Any] = {}

    # --- what converters use ---

    def call(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        """Emit a float call in its canonical spelling; an identity emits nothing."""
        call = normalize.normalized(function, args, kwargs)
        if call is None:
            return self.graph.call_function(function, args, kwargs)
        target, arguments = call
        if target is normalize.IDENTITY:
            return arguments[0]
        keywords = arguments[-1] if arguments and isinstance(arguments[-1], dict) else {}
        positional = arguments[:-1] if keywords else arguments
        return self.graph.call_function(target, tuple(positional), dict(keywords))

    def constant(self, hint: str, tensor: torch.Tensor) -> Node:
        """A constant tensor of the graph."""
        return add_constant(self.root, self.graph, hint, tensor.detach())

    def weight(self, hint: str, weight: torch.Tensor, transposed_groups: int = 0) -> Node:
        """A weight: int8 codes and scales where it is symmetric int8, else its float value.

        ``transposed_groups`` is the group count of a transposed convolution, whose output
        channels are dimension 1 within each group.
        """
        if not weight.is_quantized:
            return self.constant(f"{hint}_weight", weight)
        quantized = symmetric_int8(weight)
        if quantized is None:
            node = self.constant(f"{hint}_weight", weight.dequantize())
            node.meta["why"] = f"its weight is {weight.dtype} with a zero point, not symmetric int8"
            return node
        codes, scales = quantized
        return emit(
            self.graph,
            "dequantize_weight",
            weight=self.constant(f"{hint}_weight", codes),
            weight_scales=self.constant(f"{hint}_weight_scales", scales),
            axis=1 if transposed_groups else 0,
        )

    def same_codes(self, x: Any, moved: Node, margins: Sequence[tuple[int, int]]) -> Node:
        """``moved``, which is ``x`` with ``margins``, quantized as ``x`` was (losing nothing)."""
        source = dequantized(x)
        if source is None:
            return moved
        codes = emit(self.graph, "quantize", x=moved, **scale_and_zp("out", source))
        real = emit(self.graph, "dequantize", x=codes, **scale_and_zp("x", source))
        shape = list(source.meta["shape"])
        for axis, (before, after) in enumerate(margins, start=2):
            shape[axis] += before + after
        for node in (moved, codes, real):
            # No tensor of the stock model is this one.
            node.meta.update(source="", shape=tuple(shape))
        return real

    # --- the walk ---

    def convert(self, node: Node) -> None:
        """Emit the canonical form of one stock node."""
        before = set(self.graph.nodes)
        value = getattr(self, f"_{node.op}")(node)
        if node.op == "output":
            return
        value = self._quantized(node, value)
        self._values[node] = value
        if (mutated := _mutated(node, self.model)) is not None:
            self._values[mutated] = value
        self._describe(node, set(self.graph.nodes) - before)

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

    def _quantized(self, node: Node, value: Any) -> Any:
        """Quantize the float ``value`` if the stock node's result was quantized."""
        seen = self._seen[node]
        if seen.qparams is not None:
            scale, zero_point = seen.qparams.scale, seen.qparams.zero_point
            codes = emit(self.graph, "quantize", x=value, out_scale=scale, out_zp=zero_point)
            return emit(self.graph, "dequantize", x=codes, x_scale=scale, x_zp=zero_point)
        return value

    def _mapped(self, value: Any) -> Any:
        return map_arg(value, lambda node: self._values[node])

    def _placeholder(self, node: Node) -> Node:
        new = self.graph.create_node(
            "placeholder", str(node.target), node.args, node.kwargs, name=node.name
        )
        seen = self._seen[node]
        new.meta["shape"] = seen.shape
        new.meta["input_dtype"] = seen.dtype
        return self.graph.call_method("dequantize", (new,)) if seen.qparams else new

    def _get_attr(self, node: Node) -> Node:
        value = attribute(self.model, str(node.target))
        if isinstance(value, torch.Tensor):
            real = value.dequantize() if value.is_quantized else value
            return self.constant(str(node.target), real)
        target = str(node.target).replace(".", "_")
        setattr(self.root, target, value)
        return self.graph.create_node("get_attr", target)

    def _output(self, node: Node) -> None:
        self.graph.output(self._mapped(node.args[0]))

    def _call_method(self, node: Node) -> Any:
        name = str(node.target)
        args, kwargs = self._mapped(node.args), self._mapped(node.kwargs)
        if name == "dequantize":
            return args[0]
        if name == "view" and not isinstance(args[1], torch.dtype):
            # Codes may lie in memory channels last, where a view is not always possible.
            name = "reshape"
        if name.endswith("_") and not name.endswith("__"):
            name = name[:-1]
        function = normalize.METHODS.get(name)
        if function is not None and self._seen[node].is_tensor:
            return self.call(function, *args, **kwargs)
        return self.graph.call_method(name, args, kwargs)

    def _call_function(self, node: Node) -> Any:
        converter = stock_layers.FUNCTIONS.get(node.target)
        if converter is not None:
            return converter(self, node, *self._mapped(node.args), **self._mapped(node.kwargs))
        if stock_layers.is_quantized_op(node.target):
            return self._stock_op(node)
        args, kwargs = self._mapped(node.args), dict(self._mapped(node.kwargs))
        if kwargs.get("inplace"):
            kwargs["inplace"] = False
        if self._seen[node].is_tensor:
            return self.call(node.target, *args, **kwargs)
        return self.graph.call_function(node.target, args, kwargs)  # type: ignore[arg-type]

    def _call_module(self, node: Node) -> Any:
        module = attribute(self.model, str(node.target))
        args, kwargs = self._mapped(node.args), self._mapped(node.kwargs)
        return self.module(str(node.target), module, node, args, kwargs)

    def module(
        self, path: str, module: nn.Module, node: Node, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        """Emit a call of ``module``, found at ``path``."""
        if type(module) in stock_layers.FUSED:
            value = args[0]
            for name, child in module.named_children():
                value = self.module(f"{path}.{name}", child, node, (value, *args[1:]), {})
            return value
        converter = stock_layers.MODULES.get(type(module))
        if converter is not None:
            return converter(self, path, module, *args, **kwargs)
        spelled = normalize.MODULES.get(type(module))
        if spelled is not None:
            function, attributes = spelled(module)
            named = {
                key: self.constant(f"{path}_{key}", value)
                if isinstance(value, torch.Tensor)
                else value
                for key, value in attributes.items()
            }
            return self.call(function, *args, **kwargs, **named)
        if stock_layers.is_quantized_module(module) and self._seen[node].qparams is not None:
            return self._stock_op(node)
        _adopt(self.root, path, _not_in_place(module))
        return self.graph.call_module(path, tuple(args), kwargs)

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
            return self.graph.call_function(
                torch.quantize_per_tensor, (value, scale, zero_point, seen.dtype)
            )

        args, kwargs = map_arg(node.args, stock_value), map_arg(node.kwargs, stock_value)
        if node.op == "call_module":
            path = str(node.target)
            _adopt(self.root, path, attribute(self.model, path))
            result = self.graph.call_module(path, args, kwargs)
        else:
            result = self.graph.call_function(node.target, args, kwargs)  # type: ignore[arg-type]
        result.meta["why"] = "a stock quantized op that has no int8 form here"
        if self._seen[node].qparams is None:
            return result
        return self.graph.call_method("dequantize", (result,))


def _mutated(node: Node, model: GraphModule) -> Node | None:
    """The argument that a stock node changes in place: later users of it see the result."""
    first = node.args[0] if node.args else None
    if not isinstance(first, Node):
        return None
    if node.op == "call_module":
        in_place = bool(getattr(attribute(model, str(node.target)), "inplace", False))
    elif node.op == "call_method":
        name = str(node.target)
        in_place = name.endswith("_") and not name.endswith("__")
    else:
        in_place = node.kwargs.get("inplace") is True
    return first if in_place else None


def _not_in_place(module: nn.Module) -> nn.Module:
    """``module`` itself, or a shallow copy that does not overwrite its input."""
    if getattr(module, "inplace", False):
        module = copy.copy(module)
        module.inplace = False  # type: ignore[assignment]
    return module


def _adopt(root: nn.Module, path: str, module: nn.Module) -> None:
    """Register ``module`` under the dotted ``path``."""
    *parents, name = path.split(".")
    for parent in parents:
        if not hasattr(root, parent):
            root.add_module(parent, nn.Module())
        root = root.get_submodule(parent)
    root.add_module(name, module)


def trace(model: nn.Module) -> GraphModule:
    """``model`` as a GraphModule; quantized modules stay whole."""
    if isinstance(model, GraphModule):
        return model
    try:
        return GraphModule(model, Tracer().trace(model))
    except (torch.fx.proxy.TraceError, TypeError, ValueError) as error:
        raise UnsupportedError(
            f"x86quant.compile: {type(model).__name__} cannot be traced by torch.fx ({error}); "
            "convert it with torch.ao.quantization.quantize_fx.convert_fx, or wrap the part that "
            "branches on values in torch.fx.wrap"
        ) from error


def from_fx(model: nn.Module | ExportedProgram, example_inputs: Sequence[Any]) -> GraphModule:
    """The canonical graph of ``model``, a result of stock ``convert_fx``, or of PT2E.

    ``example_inputs`` is the tuple of positional inputs; the model runs on it once, to learn the
    scale, zero point and shape of every value.
    """
    if isinstance(example_inputs, torch.Tensor):
        raise InvalidInputError(
            "x86quant.compile: example_inputs must be a tuple of inputs; write (x,) for one tensor"
        )
    traced = trace(reference_form(model, example_inputs))
    recorder = _Recorder(traced)
    with torch.no_grad():
        recorder.run(*example_inputs)
    builder = Builder(traced, recorder.seen)
    for node in traced.graph.nodes:
        builder.convert(node)
    canonical = GraphModule(builder.root, builder.graph, class_name="CanonicalGraph")
    canonical.graph.eliminate_dead_code()
    canonical.recompile()
    canonical.graph.lint()
    return canonical.eval()
