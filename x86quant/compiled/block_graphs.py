"""``BlockGraphs``: a forward that runs proved graphs of a module's int8 layers, where they hold.

The module stays what it is: its class, layers, state and attributes. Its graphs are made of the
same tensors and are quicker than calling layer by layer. They are a cache: the module's own code
runs for calls that none of them was proved for, while layers have hooks, and once something in the
module was replaced or written to.
"""

from __future__ import annotations

import contextlib
import inspect
import operator
import types
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from x86quant import extension
from x86quant.compiled.baked import TORCHS_OWN
from x86quant.compiled.guarded import GuardedModule
from x86quant.compiled.token_step import TokenStep
from x86quant.compiled.traced import only_watched, register
from x86quant.compiled.watch import watch
from x86quant.errors import ExtensionError, InvalidInputError, X86QuantWarning


def tensors_for(
    graph: GuardedModule, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[Any] | None:
    """The inputs of ``graph`` in place of a module's code, or None if it does not stand for that
    in this call.
    """
    tensors = graph.form.tensors(args, kwargs)
    if tensors is None or not all(map(_is_memory, tensors)) or not only_watched():
        return None
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        return None
    return tensors if graph.guard.refusal(tensors) is None else None


def _is_memory(x: torch.Tensor) -> bool:
    """Whether ``x`` is a tensor of real numbers, and not what a tracer stands in for one."""
    return type(x) is torch.Tensor and torch._C._get_tracing_state() is None and not x.is_neg()


class BlockGraphs:
    """Stands at ``module.forward``.

    Attributes:
        module: whose forward it is.
        graphs: what it runs; empty once the module was changed.
        token_step: the same for the newest tokens of a decoder; None once it was changed.
    """

    def __init__(
        self,
        module: nn.Module,
        graphs: Sequence[GuardedModule],
        token_step: TokenStep | None = None,
    ) -> None:
        self.module = module
        self.graphs = tuple(graphs)
        self.token_step = token_step
        self.__signature__ = inspect.signature(module.forward)
        self._takes_ids = next(iter(self.__signature__.parameters), "") == _IDS
        self._watch: _BlockWatch | None = _BlockWatch(module)
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
                given = graph.form.tensors(args, kwargs)
                if given is None or (
                    torch.is_grad_enabled() and any(x.requires_grad for x in given)
                ):
                    continue
                if graph.compiled.is_opaque and graph.guard.refusal(given) is None:
                    results = graph.compiled.traced_run(opaque.handle, given)
                    return graph.results.fill(results)
        return type(self.module).forward(self.module, *args, **kwargs)

    def _by_layers(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What the module's own code returns, which may write to caches of its own."""
        watched = self._watch_of_copy() if self.graphs or self.token_step is not None else None
        held = watched is not None and watched.holds()
        try:
            return type(self.module).forward(self.module, *args, **kwargs)
        finally:
            if held and watched is not None:
                watched.accept_caches()

    def graph_for(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[GuardedModule, tuple[torch.Tensor, ...]] | None:
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
            return _fingerprint_of(self.module) == self._copied_from
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

    def _watch_of_copy(self) -> _BlockWatch | None:
        """The watch, which a copy makes when it is first called; None if it was changed by then."""
        if self._watch is None and self._copied_from is not None:
            copied_from, self._copied_from = self._copied_from, None
            if _fingerprint_of(self.module) == copied_from:
                try:
                    self._watch = _BlockWatch(self.module)
                except ExtensionError:  # a copy where there are no native kernels
                    self.graphs, self.token_step = (), None
        return self._watch

    def __getstate__(self) -> dict[str, Any]:
        # What a copy is changed into before its first call must not be taken for what was copied.
        holds = self._watch is None or self._watch.holds()
        made = self._copied_from if self._watch is None else _fingerprint_of(self.module)
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

    def __init__(self, blocks: BlockGraphs, graph: GuardedModule) -> None:
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

_training = operator.attrgetter("training")


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


class _BlockWatch:
    """Tells whether a module's code would still do what a graph of it does."""

    def __init__(self, module: nn.Module) -> None:
        self._tensors_hold = watch(module)
        self._modules = list(module.modules())
        inner = self._modules[1:]  # hooks of the module itself are around its forward
        self._hooks = [d for m in inner for d in (m._forward_pre_hooks, m._forward_hooks)]
        self._config = vars(module).get("config")
        self._settings = _settings(self._config)
        self._variables = [vars(m) for m in inner]
        self._plain = _getters((vars(m), _plain_values(m)) for m in self._modules)
        self._values = [get(d) for d, get in self._plain]
        self._objects = _objects_in(self._modules)
        self._private = _getters((vars(m), _private_values(m)) for m in self._modules)
        self._caches = self._caches_now()
        dictionaries = [
            *map(vars, self._modules),
            *map(vars, self._objects),
            *self._hooks,
            getattr(self._config, "__dict__", {}),
        ]
        self._dictionaries = tuple(d for d in dictionaries if isinstance(d, dict))
        self._counted = len(self._dictionaries) == len(dictionaries)
        self._unchanged_since = extension.fast().unchanged_since
        # One value, since any number of threads may look: changes counted, and what was seen after.
        self._seen = (bytearray(8 * len(self._dictionaries)), False, False)

    def wants_layers(self) -> bool:
        """Whether some of it is in training mode, or somebody looks at the calls of layers."""
        return self._look()[0]

    def holds(self) -> bool:
        """Whether nothing was replaced or written to."""
        return self._tensors_hold() and self._look()[1]

    def _look(self) -> tuple[bool, bool]:
        """Whether layers are wanted and attributes hold: looked at where one was set since."""
        known, wants_layers, hold = self._seen
        counts = bytearray(known)
        if self._unchanged_since(self._dictionaries, counts) and self._counted:
            return wants_layers, hold
        hooked = any(map(len, self._hooks)) and not self._only_known_hooks()
        wants_layers = hooked or any(map(_training, self._modules))
        hold = (
            _settings(self._config) == self._settings
            and not any(map(_is_replaced, self._variables))
            and self._attributes_hold()
        )
        self._seen = (counts, wants_layers, hold)
        return wants_layers, hold

    def _attributes_hold(self) -> bool:
        try:
            return [
                get(variables) for variables, get in self._plain
            ] == self._values and self._caches_now() == self._caches
        except KeyError:
            return False

    def _caches_now(self) -> list[Any]:
        """What the module's own code may change as it runs: private attributes, and objects'."""
        fields = [_settings(x) for x in self._objects]
        return [*fields, *(get(variables) for variables, get in self._private)]

    def accept_caches(self) -> None:
        """Take what the module's own code has just written for what it was made with."""
        with contextlib.suppress(KeyError):  # then it counts as changed
            self._caches = self._caches_now()

    def _only_known_hooks(self) -> bool:
        """transformers puts hooks of its own on modules, which do nothing unless it asks."""
        return all(map(is_known_hook, (hook for d in self._hooks for hook in d.values())))


def _getters(
    named: Iterable[tuple[dict[str, Any], Mapping[str, Any]]],
) -> list[tuple[dict[str, Any], Callable[[dict[str, Any]], Any]]]:
    """For each dictionary what reads the entries named off it."""
    return [(d, operator.itemgetter(*names)) for d, names in named if names]


def _objects_in(modules: Sequence[nn.Module]) -> list[Any]:
    """Configurations and the like among the attributes of ``modules``, whose fields are read."""
    found: dict[int, Any] = {}
    for module in modules:
        for name, value in vars(module).items():
            if name not in TORCHS_OWN and hasattr(value, "__dict__") and not _is_code(value):
                found[id(value)] = value
    return list(found.values())


def _is_code(value: object) -> bool:
    """Whether ``value`` computes, rather than being read."""
    kinds = (nn.Module, torch.Tensor, type, types.ModuleType, BlockGraphs)
    return isinstance(value, kinds) or callable(value)


def _is_replaced(variables: Mapping[str, Any]) -> bool:
    """Whether a module with these attributes has a forward that is not its class's."""
    return "forward" in variables and not isinstance(variables["forward"], BlockGraphs)


def _fingerprint_of(module: nn.Module) -> int:
    """A checksum of the module's layers, attributes and tensors."""
    found = 0
    for name, inner in module.named_modules():
        plain = {**_plain_values(inner), **_private_values(inner)}
        values = {k: getattr(v, "__qualname__", v) for k, v in plain.items()}
        replaced = inner is not module and _is_replaced(vars(inner))
        text = f"{name} {type(inner).__module__} {type(inner).__qualname__} {replaced}"
        found = zlib.crc32(repr(sorted(values.items())).encode(), found)
        found = zlib.crc32(text.encode(), found)
        for key, tensor in (*inner._parameters.items(), *inner._buffers.items()):
            if tensor is not None:
                codes = tensor.detach().reshape(-1).contiguous().view(torch.uint8)
                found = zlib.crc32(f"{key} {tuple(tensor.shape)}".encode(), found)
                found = zlib.crc32(codes.numpy().tobytes(), found)
    objects = [vars(module).get("config"), *_objects_in(list(module.modules()))]
    return zlib.crc32(repr(list(map(_settings, objects))).encode(), found)


def is_known_hook(hook: object) -> bool:
    """Whether ``hook`` is one of those that transformers uses to collect what it is asked for."""
    return str(getattr(hook, "__module__", "")).startswith("transformers.")


#: What a forward may read off its module and compute with.
_PLAIN = (
    bool, int, float, str, type(None), torch.dtype,
    types.FunctionType, types.BuiltinFunctionType,
)  # fmt: skip


def _plain_values(module: nn.Module) -> dict[str, Any]:
    """The public attributes of ``module`` that are numbers, functions and the like.

    With them the type that int8 layers take.
    """
    found = _plain_attributes(module).items()
    return {k: v for k, v in found if not k.startswith("_") or k == "_float_type"}


def _private_values(module: nn.Module) -> dict[str, Any]:
    """The private ones, of the user's modules; ours have nothing but caches there."""
    if type(module).__module__.startswith("x86quant."):
        return {}
    return {k: v for k, v in _plain_attributes(module).items() if k.startswith("_")}


def _plain_attributes(module: nn.Module) -> dict[str, Any]:
    return {
        name: value
        for name, value in vars(module).items()
        if name not in TORCHS_OWN
        and (
            type(value) in _PLAIN
            or (type(value) is tuple and all(type(v) in _PLAIN for v in value))
        )
    }


def _settings(config: object) -> dict[str, Any]:
    """The plain entries of a configuration, which a forward may read at each call."""
    entries = vars(config) if hasattr(config, "__dict__") else {}
    # save_pretrained writes a type's name in place of the type.
    plain = {k: _type_name(v) if type(v) is torch.dtype else v for k, v in entries.items()}
    return {k: v for k, v in plain.items() if type(v) in (bool, int, float, str, type(None))}


def _type_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
