"""``GuardedModule``: a compiled part that answers only the calls it was verified for.

A graph holds for the calls that it was traced with: for constants among the arguments, for ranks,
and for what torch.export had to assume about sizes. Each call is checked against that. What is
outside runs the float model, or is refused; it never gets a wrong answer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import warnings
import zlib
from collections.abc import Callable, Sequence
from types import CodeType
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from x86quant.compiled.baked import Baked
from x86quant.compiled.module import CompiledModule
from x86quant.compiled.outside_graphs import outside_graphs
from x86quant.compiled.row_rank import as_in, as_rank
from x86quant.compiled.structure import CallForm, Structure
from x86quant.compiled.watch import watch
from x86quant.errors import ExtensionError, InvalidInputError, UnsupportedError, X86QuantWarning
from x86quant.ops.float_type import Int8Module, in_float32, in_float_type

#: What a condition on sizes may be made of.
_CONDITION = re.compile(r"(s\[\d+\]\[\d+\]|\d+|//|[-+*%(),<>=!\s]|\b(?:and|or|not|min|max)\b)*")
_FUNCTIONS: dict[str, Any] = {"__builtins__": {}, "min": min, "max": max}


@dataclasses.dataclass(frozen=True, slots=True)
class GuardedInput:
    """What one tensor of a call must be.

    Attributes:
        name: what it is called in messages.
        dtype: its type.
        rank: how many dimensions it has.
        fixed: dimensions that have only one size, and that.
        single: the other dimensions in which size 1 was verified; None if it need not be.
    """

    name: str
    dtype: torch.dtype
    rank: int
    fixed: tuple[tuple[int, int], ...] = ()
    single: frozenset[int] | None = None

    def refusal(self, x: Any) -> str | None:
        """Why ``x`` is not such a tensor, or None."""
        if x.dtype is not self.dtype:
            return f"{self.name} is {x.dtype}, not {self.dtype}"
        if x.dim() != self.rank:
            return f"{self.name} has {x.dim()} dimensions, not {self.rank}"
        if x.layout is not torch.strided or x.device.type != "cpu":
            return f"{self.name} is not a dense tensor on the CPU"
        shape = x.shape
        for dim, size in self.fixed:
            if shape[dim] != size:
                return f"{self.name} has size {shape[dim]} in dimension {dim}, not {size}"
        if self.single is not None:
            fixed = [dim for dim, _ in self.fixed]
            for dim, size in enumerate(shape):
                if size < 2 and dim not in fixed and (size == 0 or dim not in self.single):
                    return f"{self.name} has size {size} in dimension {dim}"
        return None


@dataclasses.dataclass(frozen=True, slots=True)
class Guard:
    """Which tensors a graph holds for.

    Attributes:
        inputs: what each tensor must be.
        conditions: relations between sizes, of ``s[input][dimension]``.
    """

    inputs: tuple[GuardedInput, ...]
    conditions: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for condition in self.conditions:
            if _CONDITION.fullmatch(condition) is None:
                raise UnsupportedError(f"a condition that cannot be checked: {condition}")

    @property
    def is_trivial(self) -> bool:
        """Whether it asks for types and ranks alone."""
        return not self.conditions and all(not x.fixed and x.single is None for x in self.inputs)

    def compiled(self) -> CodeType | None:
        """The conditions as one piece of code."""
        if not self.conditions:
            return None
        return compile(" and ".join(f"({c})" for c in self.conditions), "<guard>", "eval")

    def refusal(self, tensors: Sequence[Any], code: CodeType | None) -> str | None:
        """Why the graph does not hold for ``tensors``, or None."""
        for spec, x in zip(self.inputs, tensors, strict=True):
            if (reason := spec.refusal(x)) is not None:
                return reason
        if code is not None:
            sizes = [x.shape for x in tensors]
            if not _holds(code, sizes):
                wrong = next(c for c in self.conditions if not _holds(c, sizes))
                return f"sizes {[tuple(s) for s in sizes]} do not meet {wrong}"
        return None


def _holds(condition: str | CodeType, sizes: Sequence[torch.Size]) -> bool:
    try:
        return bool(eval(condition, _FUNCTIONS, {"s": sizes}))
    except ZeroDivisionError:  # what it asks about has no meaning at such sizes
        return False


def _leaves(value: Any) -> list[Any]:
    """What ``value`` holds; torch's own walk takes longer than a small model."""
    if isinstance(value, torch.Tensor):
        return [value]
    if type(value) is dict:
        value = [*value.values()]
    if type(value) in (list, tuple):
        return [leaf for part in value for leaf in _leaves(part)]
    return pytree.tree_leaves(value)


class GuardedModule(Baked, Int8Module):
    """A compiled part behind the signature of the module that it stands for.

    Attributes:
        compiled: the part in int8, from tensors to tensors.
        form: how the module is called.
        results: the structure of its result.
        guard: which tensors the compiled part holds for.
        strict: whether other calls raise; if not, the float module runs.
        outside: how many calls the float module has answered.
        quantization: what ``quantize`` did to make it, a ``quantization.summary.Summary``.
    """

    def __init__(
        self,
        compiled: nn.Module,
        original: nn.Module | None,
        form: CallForm,
        results: Structure,
        guard: Guard,
        *,
        strict: bool = False,
    ) -> None:
        super().__init__()
        self.compiled = compiled
        self.form = form
        self.results = results
        self.guard = guard
        self.strict = strict
        self.outside = 0
        self.quantization: Any = None
        # Not a submodule: its weights are no part of the int8 model's.
        self.__dict__["_original"] = None if original is None else _Aside(original)
        self._made = _fingerprint(compiled)
        self._prepare()
        self.eval()

    def _prepare(self) -> None:
        self._code = self.guard.compiled()
        self._unchanged: Callable[[], bool] | None = None
        self._row_rank = (
            self.compiled.row_rank if isinstance(self.compiled, CompiledModule) else None
        )

    @property
    def original(self) -> nn.Module | None:
        """The float module that answers calls outside of the guard."""
        aside: _Aside | None = self.__dict__["_original"]
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
        tensors = self.form.tensors(args, kwargs)
        rows = None if tensors is None else self._rows_of_another_rank(tensors)
        if rows is not None:
            tensors = [as_rank(rows, self.guard.inputs[0].rank)]
        if tensors is None:
            reason: str | None = "its arguments are not those that were given in calibration"
        else:
            tensors = [
                self._as_given(*pair) for pair in zip(self.guard.inputs, tensors, strict=True)
            ]
            reason = self.guard.refusal(tensors, self._code)
        if reason is not None:
            return in_float_type(self._run_float(reason, args, kwargs), self._float_type)
        assert tensors is not None
        found = self.compiled(*tensors)
        if rows is not None:
            found = as_in(rows, found)
        return self.results.fill(in_float_type(found, self._float_type))

    def _rows_of_another_rank(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """The tensor of a call, if it holds rows that need only be put into the example's rank."""
        if self._row_rank is None or len(tensors) != 1:
            return None
        return None if tensors[0].dim() in (0, self._row_rank) else tensors[0]

    def _as_given(self, spec: GuardedInput, x: Any) -> Any:
        """``x`` in the type that the graph takes, where that is only a matter of conversion."""
        return x.float() if spec.dtype is torch.float32 and self._converts(x) else x

    def _run_float(self, reason: str, args: Any, kwargs: Any) -> Any:
        leaves = _leaves((args, kwargs))
        if any(isinstance(x, torch.fx.Proxy) for x in leaves):
            raise _untraceable()
        original = self.original
        if self.strict or original is None:
            raise InvalidInputError(f"the quantized model does not hold for this call: {reason}")
        if not self._is_as_made():
            raise InvalidInputError(
                f"the quantized model does not hold for this call: {reason}; nor can the float "
                "model answer it, which has other weights since the int8 ones were changed: change "
                "the float model instead and quantize it again"
            )
        if not self.outside:
            warnings.warn(
                f"a call runs in float, since the int8 graph does not hold for it: {reason}; "
                "calibrate with such inputs, or set strict=True to have it raise",
                X86QuantWarning,
                stacklevel=4,
            )
        vars(self)["outside"] += 1  # nn.Module takes longer than the rest of this
        if any(map(self._converts, leaves)):
            args, kwargs = in_float32((args, kwargs))
        return original.forward(*args, **kwargs)  # its hooks are this module's

    @outside_graphs
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
            return getattr(original.module, name)

    def extra_repr(self) -> str:
        """What ``quantize`` did."""
        return "" if self.quantization is None else str(self.quantization)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_code": None, "_unchanged": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._prepare()


def _fingerprint(module: nn.Module) -> int:
    """A checksum of the module's tensors."""
    found = 0
    for name, tensor in sorted(module.state_dict().items()):
        if not isinstance(tensor, torch.Tensor):
            continue
        codes = tensor.detach().reshape(-1).contiguous().view(torch.uint8)
        found = zlib.crc32(codes.numpy().tobytes(), zlib.crc32(name.encode(), found))
    return found


def _untraceable() -> Exception:
    """For torch.fx, which would trace the float module instead."""
    return torch.fx.proxy.TraceError(
        "torch.fx cannot trace a GuardedModule, whose conditions are about real tensors"
    )


class _Aside:
    """Holds a module that is no submodule."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module


def graph_of(module: nn.Module) -> nn.Module:
    """The compiled module itself, without a guard around it."""
    return module.compiled if isinstance(module, GuardedModule) else module
