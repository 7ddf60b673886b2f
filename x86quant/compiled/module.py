"""``CompiledModule``: a lowered model, and what runs it."""

from __future__ import annotations

import copy
import functools
import operator
import threading
import warnings
from collections.abc import Collection
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node

from x86quant import extension
from x86quant.errors import ExtensionError, InvalidInputError, X86QuantWarning
from x86quant.lowering import FloatNode
from x86quant.lowering.passes import Report
from x86quant.packing.linear_dynamic import forget_packs
from x86quant.runtime import Segment, partition
from x86quant.runtime.plan import NoNativeFormError
from x86quant.runtime.plan_cache import default_bytes


class CompiledModule(nn.Module):
    """A lowered model: float in, float out, the same results as the model it was made from.

    Attributes:
        graph_module: the graph of ``x86quant`` ops: what runs, and what is exported and saved.
        reports: what each pass did.
        float_nodes: the nodes that still run as torch float ops, each with its reason.
        quantization: what ``quantize`` did to make it, a ``quantization.summary.Summary``; None if
            something else made it.
    """

    def __init__(
        self,
        graph_module: GraphModule,
        reports: tuple[Report, ...] = (),
        float_nodes: tuple[FloatNode, ...] = (),
        plan_cache_bytes: int | None = None,
    ) -> None:
        super().__init__()
        self.graph_module = graph_module
        self.reports = reports
        self.float_nodes = float_nodes
        self.quantization: Any = None
        self._plan_cache_bytes = plan_cache_bytes
        placeholders = [n for n in self.graph_module.graph.nodes if n.op == "placeholder"]
        self._inputs = tuple(_InputSpec.of(node) for node in placeholders)
        self._lock = threading.Lock()
        self._runtime: _Runtime | None = None
        self._torch_nodes: set[str] = set()
        self.eval()

    def forward(self, *inputs: Any) -> Any:
        """Run the graph on positional ``inputs`` like those it was compiled for."""
        if torch.compiler.is_compiling():  # tracers want the ops, not what runs them
            return self.graph_module(*inputs)
        if self._runtime is not None and self._runtime.whole is not None:
            results = self._runtime.whole.run_again(inputs)
            if results is not None:
                return results[0]
        required = sum(not spec.optional for spec in self._inputs)
        if not required <= len(inputs) <= len(self._inputs):
            raise InvalidInputError(
                f"the compiled model takes {len(self._inputs)} inputs "
                f"({', '.join(spec.name for spec in self._inputs)}), got {len(inputs)}"
            )
        for spec, value in zip(self._inputs, inputs, strict=False):
            spec.check(value)
        while True:
            runtime = self.runtime
            try:
                return runtime(*inputs)
            except NoNativeFormError as error:
                self._leave_to_torch(error, runtime)

    def _leave_to_torch(self, found: NoNativeFormError, runtime: GraphModule) -> None:
        """Cut the graph into segments anew, without the node that ``runtime`` cannot run."""
        with self._lock:
            if self._runtime is None or self._runtime.module is not runtime:
                return  # another thread has done it
            self._torch_nodes = {*self._torch_nodes, found.node}
            (node,) = (n for n in self.graph_module.graph.nodes if n.name == found.node)
            node.meta["why"] = found.reason
            self.float_nodes = (*self.float_nodes, FloatNode.of(self.graph_module, node))
            self._runtime = None

    @property
    def runtime(self) -> GraphModule:
        """What runs: segments of native code, and torch for whatever is left.

        Without the compiled extension it is the graph itself, in plain torch.
        """
        if self._runtime is None:
            with self._lock:
                if self._runtime is None:
                    self._runtime = _Runtime(
                        _build_runtime(self.graph_module, self._torch_nodes, self._plan_cache_bytes)
                    )
        return self._runtime.module

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The parts that run natively."""
        return tuple(m for m in self.runtime.children() if isinstance(m, Segment))

    def plan_again(self) -> None:
        """Pack and plan again at the next call, by the rules that are in force then."""
        with self._lock:
            self._runtime = None
        forget_packs(self.graph_module.buffers())

    @property
    def plan_cache_bytes(self) -> int | None:
        """How many bytes of plans each segment keeps; None: what X86QUANT_PLAN_CACHE_MB says."""
        return self._plan_cache_bytes

    @plan_cache_bytes.setter
    def plan_cache_bytes(self, limit: int | None) -> None:
        if limit is not None and limit < 0:
            raise InvalidInputError(f"plan_cache_bytes must not be negative, got {limit}")
        self._plan_cache_bytes = limit
        for segment in self.segments:
            segment.plan_cache_bytes = default_bytes() if limit is None else limit

    def with_runtime(self, runtime: GraphModule) -> CompiledModule:
        """A module with the same tensors and checks that runs ``runtime``."""
        other = copy.copy(self)
        other._runtime = _Runtime(runtime)
        return other

    def extra_repr(self) -> str:
        """How many nodes there are, how many run in float, and what ``quantize`` did."""
        calls = [n for n in self.graph_module.graph.nodes if n.op.startswith("call_")]
        text = f"nodes={len(calls)}, float_nodes={len(self.float_nodes)}"
        return text if self.quantization is None else f"{text}\n{self.quantization}"

    def __getstate__(self) -> dict[str, Any]:
        # Packed weights and plans belong to this process; a copy makes its own.
        return {**self.__dict__, "_lock": None, "_runtime": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._lock = threading.Lock()


class _Runtime:
    """Holds the runtime apart from the module's children: it has the same tensors again.

    Attributes:
        module: what runs.
        whole: the segment that is all there is to run, with one result; None otherwise.
    """

    def __init__(self, module: GraphModule) -> None:
        self.module = module
        self.whole = _only_segment(module)


def _only_segment(module: GraphModule) -> Segment | None:
    """The segment that does all that ``module`` does."""
    nodes = list(module.graph.nodes)
    if len(nodes) < 4:
        return None
    *inputs, call, item, output = nodes
    alone = (
        all(node.op == "placeholder" for node in inputs)
        and call.op == "call_module"
        and call.args == tuple(inputs)
        and item.target is operator.getitem
        and item.args == (call, 0)
        and output.args == (item,)
    )
    segment = module.get_submodule(str(call.target)) if alone else None
    return segment if isinstance(segment, Segment) else None


def _build_runtime(
    graph_module: GraphModule, torch_nodes: Collection[str], plan_cache_bytes: int | None
) -> GraphModule:
    try:
        extension.load()
    except ExtensionError as error:
        warnings.warn(
            f"compiled models run in plain torch, slowly: {error}", X86QuantWarning, stacklevel=4
        )
        return graph_module
    make = functools.partial(Segment, plan_cache_bytes=plan_cache_bytes)
    return partition(graph_module, make, torch_nodes)


class _InputSpec:
    """What an input must look like: the dtype and rank of the example."""

    def __init__(
        self, name: str, dtype: torch.dtype | None, rank: int | None, optional: bool
    ) -> None:
        self.name, self.dtype, self.rank, self.optional = name, dtype, rank, optional

    @staticmethod
    def of(node: Node) -> _InputSpec:
        shape = node.meta.get("shape")
        rank = None if shape is None else len(shape)
        return _InputSpec(node.name, node.meta.get("input_dtype"), rank, bool(node.args))

    def check(self, value: object) -> None:
        if self.rank is None:
            return
        if not isinstance(value, torch.Tensor):
            raise InvalidInputError(f"input {self.name!r} must be a tensor, got {type(value)}")
        if value.dtype != self.dtype:
            raise InvalidInputError(
                f"input {self.name!r} must be {self.dtype}, got {value.dtype}; "
                f"convert it with .to({self.dtype})"
            )
        if value.dim() != self.rank:
            raise InvalidInputError(
                f"input {self.name!r} must have rank {self.rank} as when compiled, "
                f"got shape {tuple(value.shape)}"
            )
        if value.device.type != "cpu":
            raise InvalidInputError(
                f"input {self.name!r} is on {value.device}; x86quant runs on the CPU, use .cpu()"
            )
