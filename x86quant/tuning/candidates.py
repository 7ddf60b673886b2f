"""What can run a case: every kernel of the stock operators, or of compiled models, ready to time.

A ``Runner`` is one kernel with its weights packed. Stock kernels are timed by the clock around the
operator, which is what a user of the stock workflow waits for; graph kernels by the clock of the
native program around the step, since a compiled model calls from Python once for all its steps.
Linears on float tensors are called one by one, and timed so.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from time import perf_counter
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from x86quant.hardware.cpu import cpu
from x86quant.kernels import Kernel, kernels_for
from x86quant.kernels.reference import ReferenceKernel
from x86quant.lowering.graph_tools import add_constant, emit
from x86quant.packing.linear_dynamic import packed_for
from x86quant.packing.routed import ConvGeometry, pack_conv, pack_linear
from x86quant.routing.in_force import override, routing_in_force
from x86quant.routing.routes import NO_LIMIT
from x86quant.runtime import Plan, Segment
from x86quant.tuning.measured_lookups import GraphLookupRunner, LookupOperands, StockLookupRunner
from x86quant.tuning.measurements import NARROW_WEIGHTS, Caller, Status
from x86quant.tuning.operands import (
    FULL,
    NARROW,
    RESIDUAL_ZERO_POINT,
    TABLE,
    X_SCALE,
    X_ZERO_POINT,
    Y_ZERO_POINT,
    Operands,
)

#: Operands with weights in a range.
MakeOperands = Callable[[tuple[int, int]], Operands | LookupOperands]


class Runner(Protocol):
    """One kernel with packed weights and inputs."""

    def result(self) -> Tensor:
        """The output for the first operands."""

    def spread(self, copies: int) -> None:
        """Make ``copies`` sets of operands, inputs and packed weights each."""

    def seconds(self, calls: int, *, rotated: bool) -> float:
        """Seconds a call took, over ``calls`` calls on one set of operands, or on all in turn."""


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A kernel that may be able to run a case.

    Attributes:
        caller: who calls it.
        name: the kernel.
        make: packs the weights; None where it need not be tried.
        status: then, what to record.
        note: why, or what is special about it.
        operands: what the result of ``make`` is checked with.
    """

    caller: Caller
    name: str
    make: Callable[[], Runner] | None = None
    status: Status = "unsupported"
    note: str = ""
    operands: Operands | LookupOperands | None = None

    @property
    def narrow(self) -> bool:
        """Whether it runs with weights that cannot saturate 16-bit sums."""
        return self.note.startswith(NARROW_WEIGHTS)


def candidates(caller: Caller, operands: MakeOperands) -> tuple[Candidate, ...]:
    """Every registered kernel of ``caller``, with its refusal where it says it cannot."""
    registry = kernels_for(caller, operands(FULL).spec)
    found = [_candidate(caller, kernel, operands) for kernel in registry.values()]
    if any(candidate.narrow for candidate in found):
        # To compare with, since there the others meet narrow weights too.
        again = (one for one in found if one.status == "ok" and not one.narrow)
        found += [
            _made(caller, one.name, operands(NARROW), f"{NARROW_WEIGHTS}: quicker with them")
            for one in again
            if registry[one.name].quicker_with_narrow_weights(cpu())
        ]
    return tuple(found)


def _candidate(caller: Caller, kernel: Kernel, operands: MakeOperands) -> Candidate:
    if isinstance(kernel, ReferenceKernel):
        return Candidate(
            caller, kernel.name, status="skipped", note="plain arithmetic, a last resort"
        )
    note = ""
    reasons = _reasons(caller, kernel, operands(FULL))
    weights = FULL
    if reasons and not _reasons(caller, kernel, operands(FULL), shape_alone=True):
        # Some layers have weights that cannot saturate: they want to know how fast it is.
        weights, note = NARROW, f"{NARROW_WEIGHTS}: {reasons[0]}"
        reasons = _reasons(caller, kernel, operands(NARROW))
    if reasons:
        return Candidate(caller, kernel.name, note="; ".join(reasons))
    return _made(caller, kernel.name, operands(weights), note)


def _made(caller: Caller, name: str, operands: Operands | LookupOperands, note: str) -> Candidate:
    make = functools.partial(_runner, caller, name, operands)
    return Candidate(caller, name, make, "ok", note, operands=operands)


def _runner(caller: Caller, name: str, operands: Operands | LookupOperands) -> Runner:
    if isinstance(operands, LookupOperands):
        looking_up = StockLookupRunner if caller == "stock" else GraphLookupRunner
        return looking_up(operands, name)
    if caller == "stock":
        return StockRunner(operands, name)
    return (RowsRunner if operands.spec.dynamic else GraphRunner)(operands, name)


def _reasons(
    caller: Caller, kernel: Kernel, operands: Operands | LookupOperands, shape_alone: bool = False
) -> tuple[str, ...]:
    spec = operands.spec.replace(caller="graph" if caller == "graph" else None)
    if shape_alone:
        spec = spec.replace(weights=None)
    kernels = {kernel.name: kernel}
    return routing_in_force(kernels).refusals(spec).get(kernel.name, ())


# ---------------------------------------------------------------------------- stock operators


class StockRunner:
    """A stock operator on a pack routed to one kernel."""

    def __init__(self, operands: Operands, kernel: str) -> None:
        self._operands = operands
        self._kernel = kernel
        self._sets = [self._new_set()]
        self._run = _stock_operator(operands)

    def _new_set(self) -> tuple[Tensor, Any]:
        return self._operands.quantized_input(), _stock_pack(self._operands, self._kernel)

    def result(self) -> Tensor:
        """See ``Runner``."""
        return self._run(*self._sets[0])

    def spread(self, copies: int) -> None:
        """See ``Runner``. Each set runs once: libraries lay weights out at the first call."""
        while len(self._sets) < copies:
            self._sets.append(self._new_set())
            self._run(*self._sets[-1])

    def seconds(self, calls: int, *, rotated: bool) -> float:
        """See ``Runner``."""
        order = _in_turn(self._sets, calls, rotated)
        run = self._run
        start = perf_counter()
        for x, pack in order:
            run(x, pack)
        return (perf_counter() - start) / calls


def _in_turn(sets: list[Any], calls: int, rotated: bool) -> list[Any]:
    return list(itertools.islice(itertools.cycle(sets if rotated else sets[:1]), calls))


def _stock_pack(operands: Operands, kernel: str) -> Any:
    spec, weight = operands.spec, operands.quantized_weight()
    with override(kernel):
        if spec.op == "linear":
            return pack_linear(weight, operands.bias)
        geometry = ConvGeometry(
            spec.stride,
            spec.padding,
            spec.dilation,
            spec.groups,
            spec.transposed,
            spec.output_padding or (0,) * spec.dims,
        )
        return pack_conv(weight, operands.bias, geometry)


def _stock_operator(operands: Operands) -> Callable[[Tensor, Any], Tensor]:
    spec, scale = operands.spec, operands.y_scale
    name = spec.op.replace("conv", "conv_transpose") if spec.transposed else spec.op
    if spec.post_op:
        name += f"_{spec.post_op}"
    if spec.dynamic:
        dynamic: Callable[[Tensor, Any], Tensor] = getattr(torch.ops.quantized, f"{name}_dynamic")
        return dynamic
    # Past the overload's resolution, which a model's call has behind it too.
    op = getattr(torch.ops.quantized, name)
    return lambda x, pack: op(x, pack, scale, Y_ZERO_POINT)


# ---------------------------------------------------------------------------- compiled models


class RowsRunner:
    """A linear on float tensors, whose rows are quantized as they come, by one kernel."""

    def __init__(self, operands: Operands, kernel: str) -> None:
        self._operands = operands
        self._kernel = kernel
        self._sets = [self._new_set()]

    def _new_set(self) -> tuple[Tensor, Any]:
        o = self._operands
        limits, kernels = [NO_LIMIT], [self._kernel]
        weight, scale = o.stored_weight(), o.weight_scale.clone()
        pack = packed_for(weight, scale, o.bias, o.spec.post_op, limits, kernels, "")
        return o.quantized_input(), pack

    def result(self) -> Tensor:
        """See ``Runner``."""
        x, pack = self._sets[0]
        output: Tensor = pack.run(x)
        return output

    def spread(self, copies: int) -> None:
        """See ``Runner``. Each set runs once: libraries lay weights out at the first call."""
        while len(self._sets) < copies:
            self._sets.append(self._new_set())
            x, pack = self._sets[-1]
            pack.run(x)

    def seconds(self, calls: int, *, rotated: bool) -> float:
        """See ``Runner``."""
        order = _in_turn(self._sets, calls, rotated)
        start = perf_counter()
        for x, pack in order:
            pack.run(x)
        return (perf_counter() - start) / calls


class GraphRunner:
    """A compiled graph of one op, run by one kernel."""

    def __init__(self, operands: Operands, kernel: str) -> None:
        self._operands = operands
        self._kernel = kernel
        self._sets = [self._new_set()]

    def _new_set(self) -> tuple[Plan, list[Tensor]]:
        o = self._operands
        inputs = [x for x in (o.x, o.residual) if x is not None]
        inputs = [_channels_innermost(x) for x in inputs]
        segment = Segment(_graph_of(o), "tune")
        with override(self._kernel, caller="graph"):
            return segment.plan(inputs), inputs

    def result(self) -> Tensor:
        """See ``Runner``."""
        plan, inputs = self._sets[0]
        output: Tensor = plan.gather(plan.program.run(inputs))[0]
        return output

    def spread(self, copies: int) -> None:
        """See ``Runner``."""
        while len(self._sets) < copies:
            self._sets.append(self._new_set())
            plan, inputs = self._sets[-1]
            plan.program.run(inputs)

    def seconds(self, calls: int, *, rotated: bool) -> float:
        """See ``Runner``: the time of the op's own steps, copies for its layout included."""
        total = 0.0
        for plan, inputs in _in_turn(self._sets, calls, rotated):
            total += float(plan.program.run_timed(inputs)[1].sum())
        return total / calls * 1e-6


def _channels_innermost(x: Tensor) -> Tensor:
    """A copy of ``x`` whose channels are adjacent in memory, as between two layers."""
    if x.dim() == 2:
        return x.clone()
    return x.movedim(1, -1).contiguous().movedim(-1, 1)


def _graph_of(o: Operands) -> GraphModule:
    """One conv or linear with its epilogue, its output the only result."""
    spec, root, graph = o.spec, nn.Module(), Graph()
    x = graph.placeholder("x")
    residual = graph.placeholder("residual") if o.residual is not None else None

    def constant(name: str, value: Tensor) -> Node:
        return add_constant(root, graph, name, value)

    geometry: dict[str, Any] = {}
    if spec.op != "linear":
        geometry = {
            "stride": list(spec.stride),
            "padding": list(spec.padding),
            "dilation": list(spec.dilation),
            "groups": spec.groups,
            "transposed": spec.transposed,
            "output_padding": list(spec.output_padding or (0,) * spec.dims),
        }
    y = emit(
        graph,
        "linear" if spec.op == "linear" else "conv",
        x=x,
        weight=constant("weight", o.weight.clone()),
        weight_scales=constant("weight_scales", o.weight_scale.expand(spec.out_channels).clone()),
        bias=constant("bias", o.bias),
        x_scale=X_SCALE,
        x_zp=X_ZERO_POINT,
        out_scale=o.y_scale,
        out_zp=Y_ZERO_POINT,
        lo=Y_ZERO_POINT if spec.post_op == "relu" else 0,
        residual=residual,
        residual_scale=o.y_scale if residual is not None else 1.0,
        residual_zp=RESIDUAL_ZERO_POINT if residual is not None else 0,
        lut=constant("table", TABLE) if spec.post_op == "lut" else None,
        **geometry,
    )
    graph.output([y])
    return GraphModule(root, graph)
