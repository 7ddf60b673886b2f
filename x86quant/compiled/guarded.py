"""``GuardedModule``: a compiled part that answers only the calls it was verified for.

A graph holds for the calls that it was traced with: for constants among the arguments, for ranks,
and for what torch.export had to assume about sizes. Each call is checked against that. What is
outside runs the float model, or is refused; it never gets a wrong answer.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from x86quant.compiled.baked import Aside, Baked
from x86quant.compiled.graph_inputs import as_rank, rows_of_another_rank
from x86quant.compiled.module import CompiledModule
from x86quant.compiled.watch import tensor_checksum, watch
from x86quant.errors import (
    ArgumentsError,
    ExtensionError,
    InvalidInputError,
    UnsupportedError,
    X86QuantWarning,
)
from x86quant.forms.call_form import CallForm, Structure, fits
from x86quant.forms.guard import Guard, GuardedInput
from x86quant.lowering import FloatNode
from x86quant.ops.float_type import Int8Module, in_float32, in_float_type

_OTHER_ARGUMENTS = "its arguments are not those that were given in calibration"


def _leaves(value: Any) -> list[Any]:
    """What ``value`` holds; torch's own walk takes longer than a small model."""
    if isinstance(value, torch.Tensor):
        return [value]
    if type(value) is dict:
        value = [*value.values()]
    if type(value) in (list, tuple):
        return [leaf for part in value for leaf in _leaves(part)]
    return pytree.tree_leaves(value)


def _outside_graphs(function: Callable[..., bool]) -> Callable[..., bool]:
    """``torch.compiler.disable``, at no cost until something is compiled: the graph breaks there.

    That decorator imports the compiler, which takes as long as importing torch: a process that only
    loads a model and runs it would spend most of its start on it.
    """
    disabled: list[Any] = []  # once there is a compiler

    @functools.wraps(function)
    def call(*args: Any) -> bool:
        if "torch._dynamo" not in sys.modules:
            return function(*args)
        if not disabled:
            disabled.append(torch.compiler.disable(function))  # type: ignore[no-untyped-call]
        return bool(disabled[0](*args))

    # What torch.compiler.disable writes on its functions, and the compiler reads.
    call._torchdynamo_disable = True  # type: ignore[attr-defined]
    return call


#: Makes of a tensor of a call what its input is to be, where that is only a matter of conversion.
Convert = Callable[[GuardedInput, Any], Any]


class GuardedGraph(nn.Module):
    """A graph, how the module that it stands for is called, and the calls that it holds for.

    Who has it decides what becomes of other calls: a ``GuardedModule`` runs the float model or
    raises, ``BlockGraphs`` run the module's own code.

    Attributes:
        compiled: the part in int8, from tensors to tensors.
        form: how the module is called.
        results: the structure of its result.
        guard: which tensors the compiled part holds for.
    """

    def __init__(
        self, compiled: CompiledModule, form: CallForm, results: Structure, guard: Guard
    ) -> None:
        super().__init__()
        self.compiled = compiled
        self.form = form
        self.results = results
        self.guard = guard
        self._row_rank = compiled.row_rank
        self.eval()

    def taken(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], convert: Convert
    ) -> tuple[list[Any] | None, str]:
        """The tensors of a call that the graph holds for, or None and why it does not."""
        given = self.form.tensors(args, kwargs)
        if given is None:
            return None, _OTHER_ARGUMENTS
        tensors = list(map(convert, self.guard.inputs, given))
        checked = tensors
        if self._row_rank is not None:
            rows = rows_of_another_rank(tensors, self._row_rank)  # which are taken as they are
            checked = tensors if rows is None else [as_rank(rows, self.guard.inputs[0].rank)]
        refusal = self.guard.refusal(checked)
        return (tensors, "") if refusal is None else (None, refusal)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        # What stands for it while torch.export looks at a model around this has none.
        self._row_rank = getattr(self.compiled, "row_rank", None)


class GuardedModule(Baked, Int8Module, GuardedGraph):
    """A compiled part behind the signature of the module that it stands for.

    Attributes:
        others: graphs for calls of other forms or sizes, in the order of trying.
        strict: whether other calls raise; if not, the float module runs.
        quantization: what ``quantize`` did to make it, a ``quantization.summary.Summary``.
    """

    def __init__(
        self,
        compiled: CompiledModule,
        original: nn.Module | None,
        form: CallForm,
        results: Structure,
        guard: Guard,
        *,
        strict: bool = False,
        others: Sequence[GuardedGraph] = (),
    ) -> None:
        super().__init__(compiled, form, results, guard)
        self.others = nn.ModuleList(others)
        self.strict = strict
        self._outside = 0
        self.quantization: Any = None
        # Not a submodule: its weights are no part of the int8 model's.
        self.__dict__["_original"] = None if original is None else Aside(original)
        self._made = None if original is None else _fingerprint(compiled)
        self._prepare()

    def _prepare(self) -> None:
        self.__signature__ = self.form.signature
        self._unchanged: Callable[[], bool] | None = None

    @property
    def outside(self) -> int:
        """How many calls the float module has answered."""
        return self._outside

    @property
    def float_nodes(self) -> tuple[FloatNode, ...]:
        """The nodes of the graph that still run as torch float ops, each with its reason."""
        return self.compiled.float_nodes

    @property
    def original(self) -> nn.Module | None:
        """The float module that answers calls outside of the guard."""
        aside: Aside | None = self.__dict__["_original"]
        return None if aside is None else aside.module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the compiled part if the call is within the guard, else the float module."""
        if isinstance(args, torch.fx.Proxy):
            raise _untraceable()
        if torch._C._get_tracing_state() is not None and not self.guard.is_trivial:
            raise UnsupportedError(
                "torch.jit.trace cannot record what this model checks at every call; use "
                "torch.export, or trace its .compiled, which holds for such inputs as calibrated"
            )
        graph, tensors, reason = self._answering(args, kwargs)
        if graph is None:
            return in_float_type(self._run_float(reason, args, kwargs), self._float_type)
        found = graph.compiled(*tensors)
        return graph.results.fill(in_float_type(found, self._float_type))

    def _answering(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[GuardedGraph | None, Sequence[Any], str]:
        """The graph that holds for a call, and its tensors; or why none does."""
        reason = _OTHER_ARGUMENTS
        for graph in self.graphs():
            tensors, refusal = graph.taken(args, kwargs, self._as_given)
            if tensors is not None:
                return graph, tensors, ""
            # That of the first graph which is for such arguments.
            reason = refusal if reason is _OTHER_ARGUMENTS else reason
        return None, (), reason

    def graphs(self) -> Iterator[GuardedGraph]:
        """Its own graph, and those for other calls."""
        yield self
        for other in self.others:
            assert isinstance(other, GuardedGraph)
            yield other

    @classmethod
    def of(cls, graphs: Sequence[GuardedGraph]) -> GuardedModule:
        """``graphs`` in the order of trying, without a float model: other calls raise."""
        first, *others = graphs
        return cls(
            first.compiled, None, first.form, first.results, first.guard, strict=True, others=others
        )

    def alone(self) -> GuardedGraph:
        """Its own graph, for who decides otherwise about calls that it does not hold for."""
        return GuardedGraph(self.compiled, self.form, self.results, self.guard)

    def takes_form(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether one of the graphs is for calls with such arguments, whatever their sizes."""
        return any(graph.form.tensors(args, kwargs) is not None for graph in self.graphs())

    def graph_call(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[CompiledModule, tuple[torch.Tensor, ...]]:
        """The graph that answers a call, and its inputs.

        Raises:
            InvalidInputError: no graph holds for the call.
        """
        graph, tensors, reason = self._answering(args, kwargs)
        if graph is None:
            raise self._refused(reason, args, kwargs)
        return graph.compiled, tuple(tensors)

    def _refused(self, reason: str, args: Any, kwargs: Any) -> InvalidInputError:
        remedy = "calibrate with such inputs"
        if self.original is None:
            remedy = (
                "save it with example_inputs like these, or give the model's class to "
                "load(path, model=...)"
            )
        told = self._told(reason, args, kwargs)
        kind = ArgumentsError if reason is _OTHER_ARGUMENTS else InvalidInputError
        return kind(f"the quantized model does not hold for this call: {told}; {remedy}")

    def _told(self, reason: str, args: Any, kwargs: Any) -> str:
        """``reason`` with what is different, which takes longer to find."""
        if reason is not _OTHER_ARGUMENTS:
            return reason
        return f"{reason} ({self.form.refusal(args, kwargs)})"

    def _as_given(self, spec: GuardedInput, x: Any) -> Any:
        """``x`` in the type that the graph takes, where that is only a matter of conversion."""
        if x.dtype is spec.dtype:
            return x
        if spec.dtype is torch.float32 and self._converts(x):
            return x.float()
        # Ids, to torch alike; but a float model that is there takes them as they are.
        ids = spec.dtype is torch.int64 and x.dtype is torch.int32 and self.original is None
        return x.long() if ids else x

    def _run_float(self, reason: str, args: Any, kwargs: Any) -> Any:
        leaves = _leaves((args, kwargs))
        if any(isinstance(x, torch.fx.Proxy) for x in leaves):
            raise _untraceable()
        original = self.original
        if self.strict or original is None:
            raise self._refused(reason, args, kwargs)
        if not self._is_as_made():
            raise InvalidInputError(
                f"the quantized model does not hold for this call: {reason}; nor can the float "
                "model answer it, which has other weights since the int8 ones were changed: change "
                "the float model instead and quantize it again"
            )
        if fits(original.forward, args, kwargs):  # else it is the float model that refuses them
            if not self._outside:
                warnings.warn(
                    "a call runs in float, since the int8 graph does not hold for it: "
                    f"{self._told(reason, args, kwargs)}; "
                    "calibrate with such inputs, or set strict=True to have it raise",
                    X86QuantWarning,
                    stacklevel=4,
                )
            vars(self)["_outside"] += 1  # nn.Module takes longer than the rest of this
        if any(map(self._converts, leaves)):
            args, kwargs = in_float32((args, kwargs))
        return original.forward(*args, **kwargs)  # its hooks are this module's

    @_outside_graphs
    def _is_as_made(self) -> bool:
        """Whether the int8 weights are still those that were made of the float model."""
        if self._unchanged is None or not self._unchanged():
            if _fingerprint(self.compiled) != self._made:
                return False
            with contextlib.suppress(ExtensionError):  # then every such call looks closely
                self._unchanged = watch(self.compiled)
        return True

    def train(self, mode: bool = True) -> GuardedModule:
        """Stay in evaluation mode: there is nothing to train."""
        return super().train(False)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            original = self.__dict__.get("_original")
            if original is None or name.startswith("__"):
                raise
            return self._answer(original.module, name)

    def extra_repr(self) -> str:
        """What ``quantize`` did."""
        return "" if self.quantization is None else str(self.quantization)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_unchanged": None, "__signature__": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._prepare()


def _fingerprint(module: nn.Module) -> int:
    """A checksum of the module's tensors."""
    state = sorted(module.state_dict().items())
    return tensor_checksum((name, x) for name, x in state if isinstance(x, torch.Tensor))


def _untraceable() -> Exception:
    """For torch.fx, which would trace the float module instead."""
    return torch.fx.proxy.TraceError(
        "torch.fx cannot trace a GuardedModule, whose conditions are about real tensors"
    )
