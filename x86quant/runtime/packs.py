"""Convolutions and linears of a segment: described, routed by the rules, packed once a kernel."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from typing import Any

import torch
from torch.fx import GraphModule, Node

from x86quant.kernels import graph_kernels
from x86quant.kernels.saturation import weight_facts
from x86quant.lowering.graph_tools import attribute, op_name
from x86quant.routing.in_force import routing_in_force
from x86quant.routing.router import Routing
from x86quant.routing.routes import Choice
from x86quant.routing.sizes import SizeRanges, Sizes
from x86quant.runtime.programs import LayerWeights, Programs
from x86quant.spec import OpSpec, WeightFacts

_DIMS = 3

#: Channels from which on how a convolution is packed depends on the number of its pixels.
_WIDE = 256


@dataclasses.dataclass(frozen=True)
class Packed:
    """Weights ready for one kernel.

    Attributes:
        choice: the kernel, and why; its spec leaves the sizes open that others share the answer
            with.
        handle: the extension's object.
    """

    choice: Choice
    handle: Any


@dataclasses.dataclass
class _Op:
    """A convolution or linear, whatever the size of its input.

    Attributes:
        spec: all of it but the sizes.
        ranges: which sizes are answered alike.
        packed: the answers so far, by ``ranges.key``.
    """

    spec: OpSpec
    ranges: SizeRanges
    packed: dict[Hashable, Packed]


class Packs:
    """The packed weights of ``graph_module``; plans for different input shapes share them.

    Attributes:
        rules_seen: how many times other rules came into force, as far as ``follow_rules`` saw.
    """

    def __init__(self, graph_module: GraphModule, programs: Programs | None = None) -> None:
        self.programs = programs or Programs()
        self._root = graph_module
        self.rules_seen = 0
        self._facts: dict[Node, WeightFacts] = {}
        self._weights: dict[Node, torch.Tensor] = {}
        self._routing = routing_in_force(graph_kernels())
        self._ops: dict[tuple[Node, int], _Op] = {}
        self._handles: dict[tuple[Node, str], Any] = {}

    def follow_rules(self) -> None:
        """Forget the answers if other rules are in force now; asked once for each plan."""
        routing = routing_in_force(graph_kernels())
        if not _is_same(routing, self._routing):
            self._routing = routing
            self._ops.clear()
            self.rules_seen += 1

    def get(self, node: Node, sizes: Sizes, threads: int) -> Packed:
        """The pack for a conv or linear ``node`` on an input of these ``sizes``."""
        op = self._ops.get((node, threads))
        if op is None:
            spec = self._spec(node, threads)
            op = self._ops[node, threads] = _Op(spec, self._routing.size_ranges(spec), {})
        key = op.ranges.key(op.spec, sizes, self._routing.cpu)
        packed = op.packed.get(key)
        if packed is None:
            packed = op.packed[key] = self._packed(
                node, self._routing.choose(sizes.of(op.spec)), sizes.rows
            )
        return packed

    def _packed(self, node: Node, choice: Choice, pixels: int) -> Packed:
        kernel = self.programs.kernel(choice.kernel)
        key = (node, kernel)
        if key not in self._handles:
            self._handles[key] = self.programs.pack(kernel, self._layer_weights(node, pixels))
        return Packed(choice, self._handles[key])

    def _tensor(self, node: Node, name: str) -> torch.Tensor | None:
        argument = node.kwargs[name]
        if argument is None:
            return None
        assert isinstance(argument, Node)
        tensor: torch.Tensor = attribute(self._root, str(argument.target))
        return tensor

    def weight(self, node: Node) -> torch.Tensor:
        """The plain int8 weight of ``node``."""
        weight = self._weights.get(node)
        if weight is None:
            weight = self._tensor(node, "weight")
            assert weight is not None
            self._weights[node] = weight
        return weight

    def _spec(self, node: Node, threads: int) -> OpSpec:
        """``node`` as an op on an input of any size."""
        kwargs: Any = node.kwargs
        weight = self.weight(node)
        convolution = op_name(node) == "conv"
        transposed = convolution and kwargs["transposed"]
        groups = kwargs["groups"] if convolution else 1
        if node not in self._facts:
            self._facts[node] = weight_facts(weight, groups=groups, transposed=transposed)
        common: dict[str, Any] = {
            "bias": kwargs["bias"] is not None,
            "dynamic": False,
            "post_op": _post_op(node),
            "threads": threads,
            "weights": self._facts[node],
            "caller": "graph",
        }
        if not convolution:
            return OpSpec("linear", weight.shape[1], weight.shape[0], **common)
        first, second = weight.shape[:2]
        return OpSpec(
            f"conv{weight.dim() - 2}d",  # type: ignore[arg-type]
            first if transposed else second * groups,
            second * groups if transposed else first,
            groups=groups,
            kernel=tuple(weight.shape[2:]),
            stride=tuple(kwargs["stride"]),
            padding=tuple(kwargs["padding"]),
            dilation=tuple(kwargs["dilation"]),
            output_padding=tuple(kwargs["output_padding"]),
            transposed=transposed,
            **common,
        )

    def _layer_weights(self, node: Node, pixels: int) -> LayerWeights:
        kwargs: Any = node.kwargs
        weight = self.weight(node)
        convolution = op_name(node) == "conv"
        groups, transposed = 1, False
        lists: tuple[list[int], ...] = ([], [], [])
        if convolution:
            groups, transposed = kwargs["groups"], kwargs["transposed"]
            lists = (kwargs["stride"], kwargs["padding"], kwargs["dilation"])
        if transposed:
            weight = _output_channels_first(weight, groups)
        kernel_size = [1] * (_DIMS - weight.dim() + 2) + list(weight.shape[2:])
        geometry = [*kernel_size]
        for values, missing in zip(lists, (1, 0, 1), strict=True):
            geometry += [missing] * (_DIMS - len(values)) + list(values)
        geometry += [groups, int(transposed)]
        if convolution and max(weight.shape[:2]) > _WIDE:
            # Rounded, so that a size near this one finds the same packed weights in a cache.
            geometry.append(1 << pixels.bit_length() - 1 if pixels else 0)
        scales = self._tensor(node, "weight_scales")
        assert scales is not None
        out_scale = kwargs["out_scale"]
        # As the op defines them: products in double, then rounded to float.
        mult = (scales.double() * (kwargs["x_scale"] / out_scale)).float()
        residual = kwargs["residual"] is not None
        return LayerWeights(
            weight.reshape(weight.shape[0], weight.shape[1], *kernel_size),
            mult.expand(weight.shape[0]).contiguous(),
            _bias_in_steps(self._tensor(node, "bias"), mult, out_scale),
            self._tensor(node, "lut"),
            geometry,
            [
                kwargs["x_zp"],
                kwargs["out_zp"],
                kwargs["lo"],
                kwargs["hi"],
                int(residual),
                kwargs["residual_zp"] if residual else 0,
            ],
            kwargs["residual_scale"] / out_scale if residual else 0.0,
            self.weight(node),
            self._tensor(node, "slopes"),
        )


def _is_same(one: Routing, other: Routing) -> bool:
    """Whether both choose alike: tables, the CPU and errata are made once and then shared."""
    return (
        one.table is other.table
        and one.cpu is other.cpu
        and one.errata is other.errata
        and one.overrides == other.overrides
        and one.kernels == other.kernels
    )


def _bias_in_steps(
    bias: torch.Tensor | None, mult: torch.Tensor, out_scale: float
) -> torch.Tensor | None:
    """The bias in units of the output scale; an int32 one is in units of the accumulator."""
    if bias is None:
        return None
    if bias.dtype == torch.int32:
        return (bias.double() * mult.double()).float()
    return bias.float() * (1.0 / out_scale)


def _output_channels_first(weight: torch.Tensor, groups: int) -> torch.Tensor:
    """(in, out / groups, …) of a transposed convolution as (out, in / groups, …)."""
    grouped = weight.reshape(groups, weight.shape[0] // groups, *weight.shape[1:])
    return grouped.transpose(1, 2).flatten(0, 1).contiguous()


def _post_op(node: Node) -> str:
    """What is fused behind the convolution: "add", "slopes", "lut", "relu" (any clamp), "none"."""
    kwargs: Any = node.kwargs
    if kwargs["residual"] is not None:
        return "add"
    if kwargs["slopes"] is not None:
        return "slopes"
    if kwargs["lut"] is not None:
        return "lut"
    return "relu" if (kwargs["lo"], kwargs["hi"]) != (0, 255) else "none"
