"""``BlockGraphs``: a forward that runs proved graphs of a module's int8 layers, where they hold.

The module stays what it is: its class, layers, state and attributes. Its graphs are made of the
same tensors and are quicker than calling layer by layer. They are a cache: a call that none of them
was proved for, and any call once something in the module was replaced, written to or hooked, runs
the module's own code.
"""

from __future__ import annotations

import dataclasses
import inspect
import operator
import warnings
from collections.abc import Mapping, Sequence
from types import CodeType
from typing import Any

import torch
from torch import nn

from x86quant.compiled.guarded import Guard
from x86quant.compiled.module import CompiledModule
from x86quant.compiled.structure import CallForm, Structure
from x86quant.compiled.watch import Watch
from x86quant.dynamic.layers import is_plain
from x86quant.errors import X86QuantWarning


@dataclasses.dataclass(frozen=True, eq=False)
class BlockGraph:
    """A graph that stands for a module's forward.

    Attributes:
        compiled: from tensors to a tuple of tensors.
        form: how the module is called.
        results: the structure of its result.
        guard: which tensors the graph holds for.
    """

    compiled: CompiledModule
    form: CallForm
    results: Structure
    guard: Guard

    def tensors(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any] | None:
        """The inputs of the graph, or None if it does not hold for this call."""
        tensors = self.form.tensors(args, kwargs)
        if tensors is None or not all(map(is_plain, tensors)):
            return None
        if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
            return None
        return tensors if self.guard.refusal(tensors, self._code) is None else None

    @property
    def _code(self) -> CodeType | None:
        if "code" not in self.__dict__:
            self.__dict__["code"] = self.guard.compiled()
        found: CodeType | None = self.__dict__["code"]
        return found

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "code"}


class BlockGraphs:
    """Stands at ``module.forward``.

    Attributes:
        module: whose forward it is.
        graphs: what it runs; empty once the module was changed.
    """

    def __init__(self, module: nn.Module, graphs: Sequence[BlockGraph]) -> None:
        self.module = module
        self.graphs = tuple(graphs)
        self.__signature__ = inspect.signature(module.forward)
        self._watch: _BlockWatch | None = _BlockWatch(module)

    def attach(self) -> None:
        """Let calls of the module come here."""
        self.module.forward = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the module's own forward returns."""
        plain = not torch.compiler.is_compiling() and not torch.is_autocast_enabled("cpu")
        for graph in self.graphs if plain else ():
            tensors = graph.tensors(args, kwargs)
            if tensors is not None and self._holds():
                return graph.results.fill(graph.compiled.run(tuple(tensors)))
        return type(self.module).forward(self.module, *args, **kwargs)

    def _holds(self) -> bool:
        """Whether the module is as it was when the graphs were made; if not, they go."""
        if self._watch is None:  # a copy: its tensors are those of the original, copied
            self._watch = _BlockWatch(self.module)
        if self._watch.trains():
            return False
        if self._watch.holds():
            return True
        if self.graphs:
            warnings.warn(
                f"{type(self.module).__name__} was changed after it was quantized, so its layers "
                "run one by one from now on, which is slower; quantize it again to mend that",
                X86QuantWarning,
                stacklevel=5,
            )
        self.graphs = ()
        return False

    def __getstate__(self) -> dict[str, Any]:
        # A copy of a module that was changed must not take its graphs for current ones.
        if self._watch is not None and not self._watch.holds():
            return {**self.__dict__, "graphs": (), "_watch": None}
        return {**self.__dict__, "_watch": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


_training = operator.attrgetter("training")


class _BlockWatch:
    """Tells whether a module's code would still do what a graph of it does."""

    def __init__(self, module: nn.Module) -> None:
        self._tensors = Watch(module)
        self._modules = list(module.modules())
        inner = self._modules[1:]  # hooks of the module itself are around its forward
        self._hooks = [d for m in inner for d in (m._forward_pre_hooks, m._forward_hooks)]
        self._counts = list(map(len, self._hooks))
        self._config = vars(module).get("config")
        self._settings = _settings(self._config)

    def trains(self) -> bool:
        """Whether some of it is in training mode."""
        return any(map(_training, self._modules))

    def holds(self) -> bool:
        """Whether nothing was replaced, written to or hooked."""
        return (
            self._tensors.holds()
            and (list(map(len, self._hooks)) == self._counts or self._only_known_hooks())
            and _settings(self._config) == self._settings
        )

    def _only_known_hooks(self) -> bool:
        """transformers puts hooks of its own on modules, which do nothing unless it asks."""
        return all(map(is_known_hook, (hook for d in self._hooks for hook in d.values())))


def is_known_hook(hook: object) -> bool:
    """Whether ``hook`` is one of those that transformers uses to collect what it is asked for."""
    return str(getattr(hook, "__module__", "")).startswith("transformers.")


def _settings(config: object) -> dict[str, Any]:
    """The plain entries of a configuration, which a forward may read at each call."""
    entries = vars(config) if hasattr(config, "__dict__") else {}
    return {k: v for k, v in entries.items() if type(v) in (bool, int, float, str, type(None))}
