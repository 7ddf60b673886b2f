"""Compare a lowered graph with its reference, layer by layer.

Each op of the lowered graph is run on the *reference's* inputs, so that errors do not pile up,
and its result is held against the reference's value of the same name. The unit is one step: the
coarsest of the scales that the reference rounds to within the layer, as it shows in the output.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node

from x86quant.errors import InvalidInputError
from x86quant.lowering.graph_tools import Absorbed, constant, is_op, label, op, op_name, qparams_of


@dataclasses.dataclass(frozen=True, slots=True)
class LayerCheck:
    """How one op of the lowered graph compares with the reference.

    Attributes:
        name: the node.
        op: its op, without namespace.
        layer: the layer it stands for.
        steps: largest difference, in steps.
        beyond: the fraction of values that differ by more than one step.
        saturated: the fraction left out, where the reference clipped an intermediate result that
            the fused op keeps whole.
    """

    name: str
    op: str
    layer: str
    steps: float
    beyond: float
    saturated: float

    def __str__(self) -> str:
        return (
            f"{self.layer} ({self.op}): {self.steps:.2f} steps, {self.beyond:.2%} beyond one, "
            f"{self.saturated:.2%} saturated"
        )


def record(model: GraphModule, inputs: Sequence[Any]) -> dict[str, torch.Tensor]:
    """Real values of every quantized tensor of ``model`` run on ``inputs``, by source name.

    ``model`` is a canonical graph or the stock-converted model itself.
    """
    values: dict[str, torch.Tensor] = {}

    class Recorder(Interpreter):
        def run_node(self, n: Node) -> Any:
            value = super().run_node(n)
            if is_op(n, "dequantize"):
                values[n.meta["source"]] = value
            elif isinstance(value, torch.Tensor) and value.is_quantized:
                values[n.name] = value.dequantize()
            return value

    with torch.no_grad():
        Recorder(model).run(*inputs)
    return values


class _Comparer(Interpreter):
    def __init__(self, lowered: GraphModule, reference: dict[str, torch.Tensor]) -> None:
        super().__init__(lowered)
        self.reference = reference
        self.checks: list[LayerCheck] = []

    def run_node(self, n: Node) -> Any:
        value = super().run_node(n)
        name = n.meta.get("source", "")
        if "qparams" not in n.meta or name not in self.reference:
            return value
        expected = _aligned(self.reference[name], n.meta.get("order"), value.shape)
        if expected is None:
            raise InvalidInputError(
                f"verify: {n.name} has shape {tuple(value.shape)}, "
                f"the reference {tuple(self.reference[name].shape)}"
            )
        if is_op(n):
            self.checks.append(self._check(n, value, expected))
        # What follows is judged on the reference's input, in this graph's codes.
        out = qparams_of(n)
        return op("quantize")(expected, out_scale=out.scale, out_zp=out.zero_point)

    def _check(self, node: Node, value: torch.Tensor, expected: torch.Tensor) -> LayerCheck:
        out = qparams_of(node)
        real = op("dequantize")(value, x_scale=out.scale, x_zp=out.zero_point)
        absorbed: tuple[Absorbed, ...] = node.meta.get("absorbed", ())
        step = max(out.scale, self._inner_step(node, absorbed))
        saturated = torch.zeros_like(real, dtype=torch.bool)
        for entry in absorbed:
            saturated |= self._saturated(entry, real.shape)
        difference = ((real - expected).abs() / step)[~saturated]
        # Float rounding of a difference of exactly one step is not a second step.
        return LayerCheck(
            node.name,
            op_name(node),
            label(node),
            steps=float(difference.max()) if difference.numel() else 0.0,
            beyond=_fraction(difference > 1.001),
            saturated=_fraction(saturated),
        )

    def _inner_step(self, node: Node, absorbed: Sequence[Absorbed]) -> float:
        """The coarsest step before the output's, as it shows in the output.

        One step before a table is as much after it as the table's steepest part makes of it.
        """
        inner = [entry.step for entry in absorbed]
        table = constant(self.module, node.kwargs.get("lut"))  # type: ignore[arg-type]
        if table is None:
            return max(inner, default=0.0)
        scale = float(node.kwargs["out_scale"])  # type: ignore[arg-type]
        steepest = int(table.to(torch.int16).diff().abs().max())
        return max([scale, *inner]) / scale * steepest * qparams_of(node).scale

    def _saturated(self, entry: Absorbed, shape: torch.Size) -> torch.Tensor:
        """Where the reference's intermediate result sits at an end of its range."""
        values = self.reference.get(entry.source)
        aligned = None if values is None else _aligned(values, entry.order, shape)
        if aligned is None:
            return torch.zeros(shape, dtype=torch.bool)
        return entry.saturated(aligned)


def _fraction(mask: torch.Tensor) -> float:
    return float(mask.float().mean()) if mask.numel() else 0.0


def _aligned(
    values: torch.Tensor, order: tuple[int, ...] | None, shape: torch.Size
) -> torch.Tensor | None:
    """The reference's ``values`` in the dimension order of this graph, or None if they differ."""
    if order is not None:
        values = values.permute([order.index(dim) for dim in range(len(order))])
    if values.numel() != shape.numel():
        return None
    # Dimensions of size 1 may have been added; a permuted shape is another matter.
    squeezed = [size for size in shape if size != 1]
    return values.reshape(shape) if [n for n in values.shape if n != 1] == squeezed else None


def verify(lowered: GraphModule, reference: GraphModule, inputs: Sequence[Any]) -> list[LayerCheck]:
    """Check every op of ``lowered`` against ``reference`` on ``inputs``."""
    comparer = _Comparer(lowered, record(reference, inputs))
    with torch.no_grad():
        comparer.run(*inputs)
    return comparer.checks
