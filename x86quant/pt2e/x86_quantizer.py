"""``X86Quantizer``: which values of an exported program become int8, and which share a range.

Every value between two ops that have an int8 form is quantized, but not the one between a layer and
a clamp (ReLU, ReLU6, hardtanh) that alone reads it: they are one step. Whatever only moves values
shares its input's range: max pools, views, concatenations. The vocabulary is the lowering's.
"""

from __future__ import annotations

import difflib
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torchao.quantization.pt2e.observer import (
    HistogramObserver,
    MinMaxObserver,
    PerChannelMinMaxObserver,
)
from torchao.quantization.pt2e.quantizer import (
    QuantizationAnnotation,
    QuantizationSpec,
    Quantizer,
    SharedQuantizationSpec,
)
from torchao.quantization.pt2e.quantizer.quantizer import Q_ANNOTATION_KEY

from x86quant.errors import InvalidInputError
from x86quant.lowering import normalize
from x86quant.lowering.from_export import exported_layer
from x86quant.lowering.views import moves_codes

aten = torch.ops.aten

_OBSERVERS = {"histogram": HistogramObserver, "minmax": MinMaxObserver}
#: So that a range of zeros has a scale.
_EPS = 2**-12

_WEIGHTED = frozenset(
    {aten.conv1d.default, aten.conv2d.default, aten.conv3d.default, aten.linear.default}
)
_SUMS = frozenset({aten.add.Tensor, aten.mul.Tensor})
_MAXIMA = frozenset(
    {
        aten.amax.default,
        aten.max_pool1d.default,
        aten.max_pool2d.default,
        aten.max_pool3d.default,
    }
)
#: Of one input; the result has a range of its own.
_OTHERS = frozenset(
    {
        aten.avg_pool1d.default,
        aten.avg_pool2d.default,
        aten.avg_pool3d.default,
        aten.adaptive_avg_pool1d.default,
        aten.adaptive_avg_pool2d.default,
        aten.adaptive_avg_pool3d.default,
        aten.mean.dim,
        aten.group_norm.default,
        aten.layer_norm.default,
        aten.batch_norm.default,
        torch.nn.functional.interpolate,
    }
)


class X86Quantizer(Quantizer):  # type: ignore[misc]
    """Annotates an exported program for ``prepare_pt2e``, so that it compiles natively.

    Args:
        observer: how ranges of activations are chosen, "histogram" or "minmax".
        float_layers: layers that stay in float: paths of modules, or of those around them.
    """

    def __init__(self, observer: str = "histogram", float_layers: Sequence[str] = ()) -> None:
        super().__init__()
        if observer not in _OBSERVERS:
            raise InvalidInputError(
                f"observer must be {' or '.join(map(repr, _OBSERVERS))}, not {observer!r}"
            )
        if isinstance(float_layers, str):
            raise InvalidInputError(f"float_layers must be a list of paths, not {float_layers!r}")
        self._float_layers = tuple(float_layers)
        self._activation = QuantizationSpec(
            dtype=torch.uint8,
            quant_min=0,
            quant_max=255,
            qscheme=torch.per_tensor_affine,
            observer_or_fake_quant_ctr=_OBSERVERS[observer].with_args(eps=_EPS),
        )
        self._weight = QuantizationSpec(
            dtype=torch.int8,
            quant_min=-127,
            quant_max=127,
            qscheme=torch.per_channel_symmetric,
            ch_axis=0,
            observer_or_fake_quant_ctr=PerChannelMinMaxObserver.with_args(eps=_EPS),
        )

    def annotate(self, model: GraphModule) -> GraphModule:
        """Say for every node which of its inputs, and whether its result, are quantized."""
        self._check_layers(model)
        walk = _Annotator(self._activation, self._weight)
        for node in model.graph.nodes:
            if node.op == "call_function" and not self._stays_float(node):
                walk.annotate(node)
        return model

    def validate(self, model: GraphModule) -> None:
        """Whatever is annotated can be lowered, and the rest runs in float."""

    def _stays_float(self, node: Node) -> bool:
        layer = exported_layer(node)
        return any(layer == path or layer.startswith(f"{path}.") for path in self._float_layers)

    def _check_layers(self, model: GraphModule) -> None:
        layers = {exported_layer(node) for node in model.graph.nodes} - {""}
        for path in self._float_layers:
            if not any(layer == path or layer.startswith(f"{path}.") for layer in layers):
                close = difflib.get_close_matches(path, layers, n=3)
                hint = f"; did you mean {' or '.join(close)}?" if close else ""
                raise InvalidInputError(f"float_layers: no layer is called {path!r}{hint}")


class _Annotator:
    """Goes through a graph from its inputs on, and knows which values are quantized so far."""

    def __init__(self, activation: QuantizationSpec, weight: QuantizationSpec) -> None:
        self._activation = activation
        self._weight = weight
        self._quantized: set[Node] = set()
        self._fused: set[Node] = set()
        self._pieces: dict[Node, Node] = {}  # what returns several views, and of what

    def annotate(self, node: Node) -> None:
        """Annotate ``node``, whose inputs are done."""
        if node in self._fused:
            return
        rule = self._rule(node)
        if rule is not None:
            rule(node)

    def _rule(self, node: Node) -> Callable[[Node], None] | None:
        target = _canonical(node)
        if target in _WEIGHTED:
            return self._weighted
        if target in _SUMS:
            return self._sum
        if target is aten.cat.default:
            return self._cat
        if target in _MAXIMA or moves_codes(node):
            return self._moving
        if target in _OTHERS or target in normalize.UNARY:
            return self._computing
        return None

    def _weighted(self, node: Node) -> None:
        x, weight = node.args[:2]
        if not (_is_real(x) and isinstance(weight, Node) and weight.op == "get_attr"):
            return
        assert isinstance(x, Node)
        self._annotate(node, {x: self._activation, weight: self._weight})

    def _sum(self, node: Node) -> None:
        """A constant operand is folded into the step, and no value of its own."""
        values = [x for x in node.args if isinstance(x, Node) and x.op != "get_attr"]
        if all(map(_is_real, values)) and not self._quantized.isdisjoint(values):
            self._annotate(node, dict.fromkeys(values, self._activation))

    def _computing(self, node: Node) -> None:
        x = node.args[0]
        if isinstance(x, Node) and x in self._quantized:
            fuses = _canonical(node) is aten.batch_norm.default
            self._annotate(node, {x: self._activation}, fuses=fuses)

    def _moving(self, node: Node) -> None:
        x = node.args[0]
        if not isinstance(x, Node):
            return
        if node.target is operator.getitem and x in self._pieces:
            self._mark(node, {}, SharedQuantizationSpec((self._pieces[x], x)))
        elif x in self._quantized and _is_real(node):
            self._mark(node, {x: self._activation}, SharedQuantizationSpec((x, node)))
        elif x in self._quantized and isinstance(node.meta.get("val"), list | tuple):
            self._pieces[node] = x
            node.meta[Q_ANNOTATION_KEY] = QuantizationAnnotation(
                input_qspec_map={x: self._activation}, _annotated=True
            )

    def _cat(self, node: Node) -> None:
        values: Any = node.args[0]
        if not all(map(_is_real, values)) or self._quantized.isdisjoint(values):
            return
        first = values[0]
        shared = SharedQuantizationSpec((first, node))
        self._mark(node, {**dict.fromkeys(values, shared), first: self._activation}, shared)

    def _annotate(self, node: Node, inputs: dict[Node, Any], fuses: bool = True) -> None:
        """``node`` computes with ``inputs``; its result has a range of its own."""
        clamp = _clamp_behind(node) if fuses else None
        if clamp is None:
            self._mark(node, inputs, self._activation)
            return
        self._fused.add(clamp)
        node.meta[Q_ANNOTATION_KEY] = QuantizationAnnotation(inputs, _annotated=True)
        self._mark(clamp, {}, self._activation)

    def _mark(self, node: Node, inputs: dict[Node, Any], output: Any) -> None:
        self._quantized.add(node)
        node.meta[Q_ANNOTATION_KEY] = QuantizationAnnotation(inputs, output, _annotated=True)


def _canonical(node: Node) -> Any:
    """The op that ``node`` is, whichever way it is spelled and wherever it writes."""
    target = node.target
    if target in _WEIGHTED or not isinstance(target, torch._ops.OpOverload):
        return target
    name = target._schema.name.partition("::")[2]
    if name.endswith("_"):
        packet = getattr(aten, name[:-1], None)
        target = getattr(packet, target._overloadname, target)
    found = normalize.normalized(target, node.args, node.kwargs)
    return target if found is None else found[0]


def _clamp_behind(node: Node) -> Node | None:
    """The clamp to constants that alone reads the result of ``node``."""
    if len(node.users) != 1:
        return None
    (user,) = node.users
    is_clamp = _canonical(user) is aten.clamp.default if user.op == "call_function" else False
    return user if is_clamp and user.args[0] is node else None


def _is_real(value: object) -> bool:
    """Whether ``value`` is a float32 tensor."""
    tensor = value.meta.get("val") if isinstance(value, Node) else None
    return isinstance(tensor, torch.Tensor) and tensor.dtype is torch.float32
