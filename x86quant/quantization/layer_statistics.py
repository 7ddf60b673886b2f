"""``statistics``: how each layer's values compare with the float model's."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Interpreter, Node

from x86quant.calling.call import Call
from x86quant.calling.running import feed, feed_parts, no_fast_path, watched
from x86quant.calling.state import copied
from x86quant.compiled import CompiledModule
from x86quant.compiled.compiled_parts import whole_graph
from x86quant.dynamic import DynamicMultiheadAttention, Int8Linear
from x86quant.errors import InvalidInputError
from x86quant.lowering.graph_tools import is_op, op, qparams_of
from x86quant.ops.dynamic import ACTIVATIONS
from x86quant.quantization import channel_scales
from x86quant.quantization.batches import Calibration, Data
from x86quant.quantization.kit import equalization, smoothing
from x86quant.quantization.static.observation import fused
from x86quant.quantization.static.part_search import FoundPart, trace_part
from x86quant.quantization.summary import Summary
from x86quant.quantization.tracing.tracing import WAYS


@dataclasses.dataclass(frozen=True, slots=True)
class LayerStatistics:
    """One quantized tensor against the same tensor of the float model, over some data.

    Attributes:
        name: the layer that produces it.
        op: the operator that runs it.
        sqnr_db: signal to noise, on the float model's own inputs of the part.
        min: the float model's least value.
        max: the float model's largest value.
        saturation_rate: the share of the float model's values outside of the quantized range.
    """

    name: str
    op: str
    sqnr_db: float
    min: float
    max: float
    saturation_rate: float


class _Sums:
    """Running sums of one layer's comparison."""

    def __init__(self, name: str, kind: str) -> None:
        self.name, self.kind = name, kind
        self.signal = self.noise = 0.0
        self.outside = self.count = 0
        self.low, self.high = math.inf, -math.inf

    def add(
        self, exact: torch.Tensor, actual: torch.Tensor, ends: tuple[float, float] | None
    ) -> None:
        if not exact.numel():
            return
        exact = exact.detach().double()
        self.signal += float(exact.square().sum())
        self.noise += float((actual.detach().double() - exact).square().sum())
        self.count += exact.numel()
        low, high = torch.aminmax(exact)
        self.low, self.high = min(self.low, float(low)), max(self.high, float(high))
        if ends is not None:
            self.outside += int(((exact < ends[0]) | (exact > ends[1])).sum())

    def result(self) -> LayerStatistics:
        if self.noise == 0:
            sqnr = math.inf
        else:
            sqnr = 10 * math.log10(max(self.signal, 1e-300) / self.noise)
        rate = self.outside / max(self.count, 1)
        return LayerStatistics(self.name, self.kind, sqnr, self.low, self.high, rate)


def statistics(
    float_model: nn.Module,
    quantized: nn.Module,
    data: Data,
    *,
    example_inputs: Sequence[Any] | None = None,
) -> tuple[LayerStatistics, ...]:
    """Compare ``quantized`` with the ``float_model`` it was made from, layer by layer.

    Args:
        float_model: the model given to :func:`x86quant.quantize`.
        quantized: what that returned.
        data: as its ``calibration``; the first batches are used.
        example_inputs: as there.

    Raises:
        InvalidInputError: ``quantized`` was not made by :func:`x86quant.quantize`.
    """
    summary = getattr(quantized, "quantization", None)
    if not isinstance(summary, Summary):
        raise InvalidInputError(
            "statistics compares a model that x86quant.quantize returned with the float model it "
            f"was given; {type(quantized).__name__} has no summary of a quantization"
        )
    calls = Calibration(data, float_model, example_inputs=example_inputs).sample
    reference = copied(float_model).eval()
    for norm in summary.smoothed:
        smoothing.apply(reference, norm)
    for place in summary.scaled:
        channel_scales.apply(reference, place)
    found: list[LayerStatistics] = []
    for path in summary.traced_by:
        compiled = whole_graph(quantized.get_submodule(path))
        if compiled is not None:
            found += _static(reference, path, compiled, summary, calls)
    found += _dynamic(reference, quantized, calls)
    return tuple(found)


# --- static parts ---


def _static(
    reference: nn.Module,
    path: str,
    compiled: CompiledModule,
    summary: Summary,
    calls: Sequence[Call],
) -> list[LayerStatistics]:
    examples: list[Call] = []
    feed(reference, calls[:1], {path: examples.append})
    way = WAYS[summary.traced_by[path]]
    form = trace_part(path, reference.get_submodule(path), examples[0], way)
    traced = form.graph_module
    for pair in summary.equalized:
        if pair.part == path:
            equalization.apply(traced, pair)
    comparison = _Comparison(fused(traced), compiled.graph_module, path)
    # Int8 parts get what the float model gives them: the errors are their own.
    feed_parts(reference, calls, {FoundPart(path, form, examples[0], ""): comparison.add})
    return [sums.result() for sums in comparison.sums.values()]


class _Comparison:
    """Runs the float graph and the int8 one on the same inputs."""

    def __init__(self, exact: GraphModule, actual: GraphModule, path: str) -> None:
        self.sums: dict[str, _Sums] = {}
        self._exact = _ValueRecorder(exact, lambda n: n.name)
        self._actual = _ValueRecorder(actual, _float_source, _real)
        self._prefix = f"{path}." if path else ""
        self._nodes = {n.meta.get("float_source"): n for n in actual.graph.nodes if is_op(n)}

    def add(self, call: Call) -> None:
        self._exact.run(*call.args)
        self._actual.run(*call.args)
        for name, value in self._actual.values.items():
            exact = self._exact.values.get(name)
            node = self._nodes.get(name)
            if exact is None or node is None:
                continue
            order = node.meta.get("order")
            if order is not None:
                value = value.permute([order.index(dim) for dim in range(len(order))])
            if value.numel() != exact.numel():
                continue
            layer = self._prefix + (node.meta.get("layer") or name)
            sums = self.sums.setdefault(name, _Sums(layer, str(node.target).split(".")[1]))
            sums.add(exact, value.reshape(exact.shape), _ends(node))


class _ValueRecorder(Interpreter):
    """Keeps the values of nodes, by the name that ``name_of`` gives them."""

    def __init__(
        self,
        gm: GraphModule,
        name_of: Callable[[Node], str | None],
        real: Callable[[Node, Any], Any] = lambda _, value: value,
    ) -> None:
        super().__init__(gm)
        self.values: dict[str, torch.Tensor] = {}
        self._name_of, self._real = name_of, real

    def run_node(self, n: Node) -> Any:
        value = super().run_node(n)
        name = self._name_of(n)
        if name is not None and isinstance(value, torch.Tensor):
            self.values[name] = self._real(n, value)
        return value


def _float_source(node: Node) -> str | None:
    of_int8 = "qparams" in node.meta or is_op(node, "conv_real", "linear_real")
    return node.meta.get("float_source") if is_op(node) and of_int8 else None


def _real(node: Node, codes: torch.Tensor) -> torch.Tensor:
    if "qparams" not in node.meta:
        return codes  # which are floats
    qparams = qparams_of(node)
    real: torch.Tensor = op("dequantize")(codes, x_scale=qparams.scale, x_zp=qparams.zero_point)
    return real


def _ends(node: Node) -> tuple[float, float] | None:
    """The real values that the codes of ``node`` reach, to half a step beyond; None of floats."""
    if "qparams" not in node.meta:
        return None
    scale, zero_point = qparams_of(node).scale, qparams_of(node).zero_point
    return (-0.5 - zero_point) * scale, (255.5 - zero_point) * scale


# --- dynamic layers ---


def _dynamic(
    reference: nn.Module, quantized: nn.Module, calls: Sequence[Call]
) -> Iterator[LayerStatistics]:
    floats = dict(reference.named_modules())
    names = [
        name
        for name, module in quantized.named_modules()
        if isinstance(module, Int8Linear | DynamicMultiheadAttention)
        and isinstance(floats.get(name), nn.Linear | nn.MultiheadAttention)
    ]
    sums = {name: _Sums(name, type(quantized.get_submodule(name)).__name__) for name in names}

    def compare(name: str, call: Call, result: Any) -> None:
        layer = quantized.get_submodule(name)
        exact, actual = _first(result), _first(layer(*call.args, **call.kwargs))
        activation = getattr(layer, "activation", None)
        if activation is not None:
            exact = ACTIVATIONS[activation](exact)
        sums[name].add(exact, actual, None)

    modules = {name: floats[name] for name in names}
    with torch.no_grad(), no_fast_path(), watched(modules, after=compare):
        for call in calls:
            call(reference)
    yield from (s.result() for s in sums.values())


def _first(result: Any) -> torch.Tensor:
    value: torch.Tensor = result[0] if isinstance(result, tuple) else result
    return value
