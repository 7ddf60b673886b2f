"""``CompiledModule``: a lowered model, and what runs it."""

from __future__ import annotations

import contextlib
import functools
import operator
import threading
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from x86quant import extension
from x86quant.compiled import traced
from x86quant.compiled.baked import Baked
from x86quant.compiled.graph_inputs import (
    GraphInputs,
    as_in,
    as_rank,
    row_rank,
    rows_of_another_rank,
)
from x86quant.compiled.watch import track_all_writes, watch
from x86quant.errors import ExtensionError, InvalidInputError, X86QuantWarning
from x86quant.forms.call_form import is_transformed
from x86quant.graph_sources import forgotten_with_their_graphs
from x86quant.lowering import FloatNode
from x86quant.lowering.passes import Report
from x86quant.lowering.pickled_graph import PlainGraph
from x86quant.ops.float_type import Int8Module, asks_for_gradient, in_float_type, without_gradient
from x86quant.packing.linear_dynamic import forget_packs
from x86quant.runtime import Segment, partition
from x86quant.runtime.packed_cache import CachedPrograms, PackedCache
from x86quant.runtime.plan import NoNativeFormError
from x86quant.runtime.segment import default_bytes
from x86quant.unforeseen import described, is_own

_get_tracing_state = torch._C._get_tracing_state


class CompiledModule(Baked, Int8Module):
    """A lowered model: float in, float out, the same results as the model it was made from.

    It is a module like others, for inference: always in evaluation mode, on the CPU, and its
    results carry no gradient. Its tensors may be loaded, replaced or written to: what runs follows.
    ``.half()``, ``.to(torch.bfloat16)`` and the like change the floating type it takes and returns;
    inside it computes as before.

    Attributes:
        graph_module: the graph of ``x86quant`` ops: what runs, and what is exported and saved.
        reports: what each pass did.
        float_nodes: the nodes that still run as torch float ops, each with its reason.
        quantization: what ``quantize`` did to make it, a ``quantization.summary.Summary``; None if
            something else made it.
        row_rank: the rank of the example's one input, if tensors of another are taken, too, since
            every row is computed by itself; else None.
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
        self._inputs = GraphInputs(graph_module.graph)
        self.__signature__ = self._inputs.signature()
        self._plan_cache_bytes = plan_cache_bytes
        self._packed_cache: PackedCache | None = None
        self.row_rank = row_rank(graph_module)
        self._results = traced.results_of(graph_module.graph)
        self._torch_nodes: set[str] = set()
        self._has_failed = False
        self._start()
        self.eval()

    def _start(self) -> None:
        """What belongs to this process and this object."""
        self._lock = threading.Lock()
        self._runtime: _Runtime | None = None
        self._handle = traced.register(self)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Run the graph on inputs like those it was compiled for, by position or by name."""
        if torch.compiler.is_compiling():
            return self._traced(inputs, named)
        if torch.is_grad_enabled():
            given = (*inputs, *named.values()) if named else inputs
            if any(map(asks_for_gradient, given)):
                with torch.no_grad():
                    results = self.forward(*inputs, **named)
                tensors = [x for x in given if isinstance(x, torch.Tensor)]
                return without_gradient(results, "a compiled model", *tensors)
        if not named and self._float_type is torch.float32:
            results = self._again(inputs)
            if results is not None:
                return results[0]
        if _get_tracing_state() is not None or not traced.only_watched():
            return self._traced(inputs, named)
        if (results := self._by_rows(inputs, named)) is not None:
            return results
        values = self._inputs.bound(inputs, named, self._float_type)
        if any(map(is_transformed, values)):
            raise InvalidInputError(
                "a compiled model has no rules for torch.vmap, torch.func.grad and their kind; "
                "call it with the whole batch, outside of the transform"
            )
        return in_float_type(self.run(values), self._float_type)

    def _again(self, inputs: tuple[Any, ...]) -> Sequence[Any] | None:
        """The one result, if all that there is to run is a segment and a plan for such inputs."""
        runtime = self._runtime
        if runtime is None or runtime.whole is None or not runtime.is_current():
            return None
        return runtime.whole.run_again(inputs)

    def arguments(self, positional: Sequence[Any], named: Mapping[str, Any]) -> tuple[Any, ...]:
        """The arguments of a call in order, each as the graph takes it.

        Raises:
            InvalidInputError: one is missing, unknown, given twice, or nothing like its example.
        """
        return self._inputs.bound(positional, named, self._float_type)

    @property
    def float_type(self) -> torch.dtype:
        """The floating type that it takes and returns."""
        return self._float_type

    def run(self, inputs: tuple[Any, ...]) -> Any:
        """Run the graph on inputs that are as it takes them: nothing is checked or converted."""
        if not torch.is_autocast_enabled("cpu") and (results := self._again(inputs)) is not None:
            return results[0]
        with torch.no_grad():  # segments have no gradient, and a part of it would be wrong
            if not torch.is_autocast_enabled("cpu"):
                return self._run(inputs)
            with torch.autocast("cpu", enabled=False):
                return self._run(inputs)

    def _run(self, inputs: tuple[Any, ...]) -> Any:
        while True:
            runtime = self.runtime
            try:
                result = runtime.forward(*inputs)  # torch.fx prints errors of its __call__
                if self._packed_cache is not None:
                    self._packed_cache.write(self)
                return result
            except NoNativeFormError as error:
                self._leave_to_torch(error, runtime)
            except Exception as error:
                if runtime is self.graph_module or not is_own(error):
                    raise
                return self._in_plain_torch(inputs, error)

    def _in_plain_torch(self, inputs: tuple[Any, ...], error: Exception) -> Any:
        """The result of the graph without native code, which failed with ``error``."""
        try:
            result = self.graph_module.forward(*inputs)
        except Exception:  # the call is at fault
            raise error from None
        if not self._has_failed:
            self._has_failed = True
            warnings.warn(
                f"a call runs in plain torch, slowly: {described(error)}",
                X86QuantWarning,
                stacklevel=6,
            )
        return result

    def _leave_to_torch(self, found: NoNativeFormError, runtime: GraphModule) -> None:
        """Cut the graph into segments again, without the node that ``runtime`` cannot run."""
        with self._lock:
            if self._runtime is None or self._runtime.module is not runtime:
                return  # another thread has done it
            self._torch_nodes = {*self._torch_nodes, found.node}
            (node,) = (n for n in self.graph_module.graph.nodes if n.name == found.node)
            node.meta["why"] = found.reason
            self.float_nodes = (*self.float_nodes, FloatNode.of(self.graph_module, node))
            self._runtime = None

    def _traced(self, inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """The call as a tracer should see it: see :mod:`x86quant.compiled.traced`."""
        if (results := self._by_rows(inputs, named)) is not None:
            return results
        values = self._inputs.bound(inputs, named, self._float_type)
        tensors = [x for x in values if isinstance(x, torch.Tensor)]
        if (
            torch.compiler.is_exporting()
            or not torch.compiler.is_compiling()
            or not self.is_opaque
            or len(tensors) < len(values)
        ):
            return in_float_type(self.graph_module(*values), self._float_type)
        return in_float_type(self.traced_run(self._handle, tensors), self._float_type)

    @property
    def is_opaque(self) -> bool:
        """Whether ``torch.compile`` may call it as one op: it returns tensors alone."""
        return self._results is not None

    def traced_run(self, handle: str, tensors: Sequence[torch.Tensor]) -> Any:
        """The results of the opaque op for ``handle``, in the structure that the graph returns."""
        assert self._results is not None
        results = torch.ops.x86quant.run_compiled(handle, [x.detach() for x in tensors])
        return self._results.fill(results)

    def _by_rows(self, inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """The result of a call with rows of another rank than the example's; None of any other."""
        x = None if named else rows_of_another_rank(inputs, self.row_rank)
        if x is None or self.row_rank is None:
            return None
        return as_in(x, self.forward(as_rank(x, self.row_rank)))

    @property
    def runtime(self) -> GraphModule:
        """What runs: segments of native code, and torch for whatever is left.

        Without the compiled extension it is the graph itself, in plain torch.
        """
        return self._runtime_now().module

    def _runtime_now(self) -> _Runtime:
        """The runtime of the tensors as they are now."""
        runtime = self._runtime
        if runtime is None or not runtime.is_current():
            with self._lock, forgotten_with_their_graphs():
                runtime = self._runtime
                if runtime is None or not runtime.is_current():
                    runtime = self._runtime = _Runtime.of(
                        self.graph_module,
                        self._torch_nodes,
                        self._plan_cache_bytes,
                        self._packed_cache,
                    )
        return runtime

    def use_packed_cache(self, cache: PackedCache) -> None:
        """Take packed weights from ``cache``, and add to it what it lacks."""
        with self._lock:
            self._packed_cache, self._runtime = cache, None

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

    @contextlib.contextmanager
    def running(self, runtime: GraphModule) -> Iterator[None]:
        """A block in which ``runtime`` stands for what runs the tensors as they are now."""
        before = self._runtime_now()
        self._runtime = _Runtime(runtime, before.is_current)
        try:
            yield
        finally:
            self._runtime = before

    def train(self, mode: bool = True) -> CompiledModule:
        """Stay in evaluation mode: there is nothing to train."""
        return super().train(False)

    def extra_repr(self) -> str:
        """How many nodes there are, how many run in float, and what ``quantize`` did."""
        calls = [n for n in self.graph_module.graph.nodes if n.op.startswith("call_")]
        text = f"nodes={len(calls)}, float_nodes={len(self.float_nodes)}"
        return text if self.quantization is None else f"{text}\n{self.quantization}"

    def __getstate__(self) -> dict[str, Any]:
        # Packed weights and plans belong to this process; a copy makes its own.
        own = {"_lock": None, "_runtime": None, "_handle": None, "_packed_cache": None}
        return {**super().__getstate__(), **own}

    def __reduce__(self) -> tuple[Any, ...]:
        state = self.__getstate__()
        modules = {**state["_modules"], "graph_module": PlainGraph.of(self.graph_module)}
        return _unpickled, (type(self), {**state, "_modules": modules})

    def __reduce_ex__(self, _: Any) -> tuple[Any, ...]:
        return self.__reduce__()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._start()


def _unpickled(kind: type[CompiledModule], state: dict[str, Any]) -> CompiledModule:
    modules = {
        **state["_modules"],
        "graph_module": state["_modules"]["graph_module"].graph_module(),
    }
    found = kind.__new__(kind)
    found.__setstate__({**state, "_modules": modules})
    return found


class _Runtime:
    """Holds the runtime apart from the module's children: it has the same tensors again.

    Attributes:
        module: what runs.
        whole: the segment that is all there is to run, with one result; None otherwise.
        is_current: tells whether the tensors of the graph are still those that were packed.
    """

    def __init__(self, module: GraphModule, is_current: Callable[[], bool]) -> None:
        self.module = module
        self.whole = _only_segment(module)
        self.is_current = is_current

    @classmethod
    def of(
        cls,
        graph_module: GraphModule,
        torch_nodes: Collection[str],
        plan_cache_bytes: int | None,
        packed_cache: PackedCache | None = None,
    ) -> _Runtime:
        """What runs ``graph_module`` as it is now."""
        try:
            extension.load()
        except ExtensionError as error:
            warnings.warn(
                f"compiled models run in plain torch, slowly: {error}",
                X86QuantWarning,
                stacklevel=5,
            )
            return cls(graph_module, lambda: True)
        track_all_writes(graph_module)
        is_current = watch(graph_module)  # before anything is read
        programs = None if packed_cache is None else CachedPrograms(packed_cache)
        make = functools.partial(Segment, plan_cache_bytes=plan_cache_bytes, programs=programs)
        return cls(partition(graph_module, make, torch_nodes), is_current)


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
