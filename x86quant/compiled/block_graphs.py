"""``BlockGraphs``: a forward that runs proved graphs of a module's int8 layers, where they hold.

The module stays what it is: its class, layers, state and attributes. Its graphs are made of the
same tensors and are quicker than calling layer by layer. They are a cache: the module's own code
runs for calls that none of them was proved for, while layers have hooks, and once something in the
module was replaced or written to.
"""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from x86quant.compiled.guarded import GuardedGraph
from x86quant.compiled.token_step import TokenStep
from x86quant.compiled.traced import only_watched, register
from x86quant.compiled.watch import InPlaceOfForward, ModuleWatch, fingerprint
from x86quant.errors import ExtensionError, InvalidInputError, X86QuantWarning


def tensors_for(
    graph: GuardedGraph,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    symbolic: bool = False,
) -> list[Any] | None:
    """The inputs of ``graph`` in place of a module's code, or None if it does not stand for that
    in this call.

    Only to torch.compile, ``symbolic``, may they be anything but memory.
    """
    tensors = graph.form.tensors(args, kwargs)
    if tensors is None:
        return None
    if not symbolic and not (all(map(_is_memory, tensors)) and only_watched()):
        return None
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        return None
    return tensors if graph.guard.refusal(tensors) is None else None


def _is_memory(x: torch.Tensor) -> bool:
    """Whether ``x`` is a tensor of real numbers, and not what a tracer stands in for one."""
    return type(x) is torch.Tensor and torch._C._get_tracing_state() is None and not x.is_neg()


class BlockGraphs(InPlaceOfForward):
    """Stands at ``module.forward``.

    Attributes:
        module: whose forward it is.
        graphs: what it runs; empty once the module was changed.
        token_step: the same for the newest tokens of a decoder; None once it was changed.
    """

    def __init__(
        self,
        module: nn.Module,
        graphs: Sequence[GuardedGraph],
        token_step: TokenStep | None = None,
    ) -> None:
        self.module = module
        self.graphs = tuple(graphs)
        self.token_step = token_step
        self.__signature__ = inspect.signature(module.forward)
        self._takes_ids = next(iter(self.__signature__.parameters), "") == _IDS
        self._watch: ModuleWatch | None = ModuleWatch(module)
        self._copied_from: int | None = None
        self._opaque = self._registered()

    def _registered(self) -> tuple[_Opaque, ...]:
        """The graphs as ``torch.compile`` calls them."""
        return tuple(_Opaque(self, graph) for graph in self.graphs)

    @property
    def __code__(self) -> Any:
        """What ``torch.export`` asks of a forward, and this cannot give."""
        raise AttributeError(
            f"a {type(self.module).__name__} with fused blocks cannot be exported: export what "
            "x86quant.to_dynamic, or x86quant.quantize with fuse_blocks=False, makes of the model"
        )

    def attach(self) -> None:
        """Let calls of the module come here."""
        self.module.forward = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the module's own forward returns."""
        if torch.compiler.is_compiling() and not torch.compiler.is_exporting():
            return self._traced(args, kwargs)
        if self.token_step is not None and self._may_run() and only_watched() and self._holds():
            if len(args) == 1 and self._takes_ids and _IDS not in kwargs:
                (ids,) = args
                answer = self.token_step.answer(self.module.config, (), {_IDS: ids, **kwargs})
            else:
                answer = self.token_step.answer(self.module.config, args, kwargs)
            if answer is not None:
                return answer
        found = self.graph_for(args, kwargs)
        reason = None
        if found is not None:
            graph, tensors = found
            try:
                results = graph.compiled.run(tensors)
            except (RuntimeError, ValueError, IndexError) as error:
                # Sizes that the graph asks more of than the model does; or the model refuses them,
                # too, and says so better.
                reason, _, _ = str(error).partition("\n")
            else:
                return graph.results.fill(results)
        answer = self._by_layers(args, kwargs)
        if reason is not None:
            warnings.warn(
                f"the fused graph of {type(self.module).__name__} does not take this call, so "
                f"its layers ran one by one, which is slower: {reason}",
                X86QuantWarning,
                stacklevel=4,
            )
        return answer

    def _traced(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The call as ``torch.compile`` should see it.

        It gets one op for a graph, as of any compiled model: see ``traced``.
        """
        if self._may_run():
            for opaque in self._opaque:
                graph = opaque.graph
                given = tensors_for(graph, args, kwargs, symbolic=True)
                if given is not None and graph.compiled.is_opaque:
                    results = graph.compiled.traced_run(opaque.handle, given)
                    return graph.results.fill(results)
        return type(self.module).forward(self.module, *args, **kwargs)

    def _by_layers(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What the module's own code returns, which may write to caches of its own."""
        watched = None
        if (self.graphs or self.token_step is not None) and not torch.compiler.is_exporting():
            watched = self._watch_of_copy()
        held = watched is not None and watched.holds()
        try:
            return type(self.module).forward(self.module, *args, **kwargs)
        finally:
            if held and watched is not None:
                watched.accept_caches()

    def graph_for(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[GuardedGraph, tuple[torch.Tensor, ...]] | None:
        """The graph that answers a call and its inputs; None if the module's own code does."""
        if not self._may_run():
            return None
        for graph in self.graphs:
            tensors = tensors_for(graph, args, kwargs)
            if tensors is not None:
                return (graph, tuple(tensors)) if self._holds() else None
        return None

    def _may_run(self) -> bool:
        """Whether the call is one that computes in float32, and is not exported."""
        return not (torch.compiler.is_exporting() or torch.is_autocast_enabled("cpu"))

    def current(self) -> bool:
        """Whether there are graphs of the module as it is."""
        if not self.graphs and self.token_step is None:
            return False
        if self._watch is None:
            return fingerprint(self.module) == self._copied_from
        return self._watch.holds()

    def _forget(self) -> None:
        self.graphs, self.token_step, self._opaque = (), None, ()

    def _holds(self) -> bool:
        """Whether the module is as it was when the graphs were made; if not, they go."""
        watched = self._watch_of_copy()
        if watched is not None and watched.wants_layers():
            return False
        if watched is not None and watched.holds():
            return True
        if self.graphs or self.token_step is not None:
            warnings.warn(
                f"{type(self.module).__name__} was changed after it was quantized, so its layers "
                "run one by one from now on, which is slower; quantize or load it again to mend it",
                X86QuantWarning,
                stacklevel=5,
            )
        self._forget()
        return False

    def _watch_of_copy(self) -> ModuleWatch | None:
        """The watch, which a copy makes when it is first called; None if it was changed by then."""
        if self._watch is None and self._copied_from is not None:
            copied_from, self._copied_from = self._copied_from, None
            if fingerprint(self.module) == copied_from:
                try:
                    self._watch = ModuleWatch(self.module)
                except ExtensionError:  # a copy where there are no native kernels
                    self.graphs, self.token_step = (), None
        return self._watch

    def __getstate__(self) -> dict[str, Any]:
        # What a copy is changed into before its first call must not be taken for what was copied.
        holds = self._watch is None or self._watch.holds()
        made = self._copied_from if self._watch is None else fingerprint(self.module)
        kept = {} if holds else {"graphs": (), "token_step": None}
        now = {"_watch": None, "_copied_from": made, "_opaque": ()}
        return {**self.__dict__, **kept, **now}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._opaque = self._registered()


class _Opaque:
    """A graph of ``blocks`` behind the op that ``torch.compile`` calls.

    Nothing guards a compiled program against changes of the module, so each run looks for them.
    """

    def __init__(self, blocks: BlockGraphs, graph: GuardedGraph) -> None:
        self.blocks, self.graph = blocks, graph
        self.graph_module = graph.compiled.graph_module
        self.handle = register(self)

    def run(self, inputs: tuple[Any, ...]) -> Any:
        """What the graph returns."""
        if not self.blocks._holds():
            raise InvalidInputError(
                f"{type(self.blocks.module).__name__} was changed after torch.compile had compiled "
                "it: call torch.compiler.reset(), and what torch.compile returned will be compiled "
                "again"
            )
        return self.graph.compiled.run(inputs)


def give_token_step(module: nn.Module, step: TokenStep) -> None:
    """Let ``module`` run ``step``, beside the graphs that it may have."""
    blocks = vars(module).get("forward")
    if isinstance(blocks, BlockGraphs):
        blocks.token_step = step
    else:
        BlockGraphs(module, (), step).attach()


def token_step_of(module: nn.Module) -> TokenStep | None:
    """The token step of ``module``; None if it has none, or none any longer."""
    found = vars(module).get("forward")
    return found.token_step if isinstance(found, BlockGraphs) and found.current() else None


#: What a decoder is given first.
_IDS = "input_ids"


def blocks_of(module: nn.Module) -> BlockGraphs | None:
    """The graphs at the forward of ``module``; None if it has none, or none any longer."""
    found = vars(module).get("forward")
    return found if isinstance(found, BlockGraphs) and found.graphs and found.current() else None


@contextlib.contextmanager
def layers_alone(model: nn.Module) -> Iterator[None]:
    """A block in which the layers of ``model`` run one by one, whatever graphs it has."""
    forwards = [vars(module).get("forward") for module in model.modules()]
    found = [(b, b.graphs, b.token_step) for b in forwards if isinstance(b, BlockGraphs)]
    for blocks, _, _ in found:
        blocks.graphs, blocks.token_step = (), None
    try:
        yield
    finally:
        for blocks, graphs, step in found:
            blocks.graphs, blocks.token_step = graphs, step
