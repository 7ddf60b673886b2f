"""Calibration data of every shape users have it in, as a stream of calls of the model."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn

from x86quant.calling.call import Call, dense
from x86quant.errors import InvalidInputError, X86QuantWarning
from x86quant.ops.float_type import OTHER_FLOATS
from x86quant.quantization.sentences import takes_sentences, tokenized
from x86quant.terminal.progress import counted

#: Names of optional arguments that are targets.
_TARGET = re.compile("target|label|^y$")
#: Names of those that may be classes to condition on: of these somebody has to be told.
_CONDITION = re.compile("^(y|c|cond.*|class.*)$")
#: Names of those that may be how long each row is.
_LENGTHS = re.compile("len(gth)?s?$")
#: What ``calibration`` and ``data`` arguments may be.
Data: TypeAlias = torch.Tensor | Iterable[Any]

#: One large tensor is fed in pieces of this many rows, so that memory does not depend on its size.
_ROWS = 32
#: Steps that need data again take it from the first batches: at most so many, of so many bytes.
_KEPT_BATCHES = 16
_KEPT_BYTES = 64 << 20


class Calibration:
    """Calibration data, read once as a stream; the first batches are kept for steps after it.

    Attributes:
        sample: the first batches.
    """

    def __init__(
        self,
        data: Data,
        model: nn.Module,
        *,
        example_inputs: Sequence[Any] | None = None,
        single: bool = False,
        show: bool = False,
    ) -> None:
        """Read ``data``, batches as users have them, or calls; ``single``, in float32."""
        self._show = show
        self._length = _length(data)
        calls = iter(_calls(data, model, example_inputs))
        self._calls = map(_in_float32, calls) if single else calls
        self.sample = self._take_sample()
        self._used = False

    @property
    def example(self) -> Call:
        """The first batch."""
        return self.sample[0]

    def stream(self, sample: Sequence[Call] | None = None) -> Iterator[Call]:
        """Every batch, the sample's first, in that order or as the calls given instead.

        The rest of them can be read only once.
        """
        first = self.sample if sample is None else sample
        length = self._length and self._length + len(first) - len(self.sample)
        calls = itertools.chain(first, self._calls)
        yield from counted(calls, length, "calibrating", shown=self._show)

    def _take_sample(self) -> tuple[Call, ...]:
        kept: list[Call] = []
        size = 0
        while len(kept) < _KEPT_BATCHES and (not kept or size < _KEPT_BYTES):
            call = next(self._calls, None)
            if call is None:
                break
            kept.append(call)
            size += sum(x.numel() * x.element_size() for x in call.leaves)
        if not kept:
            raise InvalidInputError(
                "the calibration data is empty: give at least one batch "
                "(and if it is a generator, one that has not been used up)"
            )
        return tuple(kept)


def _length(data: Data) -> int | None:
    if isinstance(data, torch.Tensor):
        return -(-len(data) // _ROWS) if data.dim() else None
    try:
        return len(data)  # type: ignore[arg-type]
    except TypeError:  # a generator, or a loader over a stream
        return None


def _calls(data: Data, model: nn.Module, example_inputs: Sequence[Any] | None) -> Iterator[Call]:
    if isinstance(data, torch.Tensor):
        if data.dim() == 0 or len(data) == 0:
            raise InvalidInputError(
                f"the calibration tensor of shape {tuple(data.shape)} holds no samples: its first "
                "dimension must be the batch"
            )
        data = torch.split(data, _ROWS)
    elif isinstance(data, str | bytes | Mapping) or not _is_iterable(data):
        raise InvalidInputError(
            "calibration must be a tensor, a DataLoader or an iterable of batches, "
            f"not {type(data).__name__}"
        )
    if takes_sentences(model):
        data = tokenized(data, model)
    return _checked(data, _Signature.of(model, example_inputs))


def _in_float32(call: Call) -> Call:
    return call.mapped(lambda x: x.float() if x.dtype in OTHER_FLOATS else x)


def _is_iterable(data: object) -> bool:
    """Whether one can loop over ``data``; a Dataset may only have ``__getitem__``."""
    return isinstance(data, Iterable) or (hasattr(data, "__getitem__") and hasattr(data, "__len__"))


def _checked(data: Iterable[Any], signature: _Signature) -> Iterator[Call]:
    for number, batch in enumerate(data):
        call = signature.call(batch, number)
        for x in call.leaves:
            if x.is_nested:
                raise InvalidInputError(
                    "the calibration data hold nested tensors, which no int8 graph takes: give "
                    "padded ones, x.to_padded_tensor(0.0)"
                )
            if x.is_floating_point() and not bool(torch.isfinite(dense(x)).all()):
                raise InvalidInputError(
                    f"calibration batch {number} holds NaN or infinity: leave it out"
                )
        yield call


@dataclasses.dataclass(frozen=True, slots=True)
class _Signature:
    """How many of a batch's elements are inputs, their names, the only one required, and what
    elements behind them might be besides targets."""

    inputs: int | None
    names: frozenset[str] | None
    only: str | None = None
    optional: tuple[inspect.Parameter, ...] = ()

    @staticmethod
    def of(model: nn.Module, example_inputs: Sequence[Any] | None) -> _Signature:
        parameters = inspect.signature(model.forward).parameters.values()
        takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
        names = None if takes_any else frozenset(p.name for p in parameters)
        if example_inputs is not None:
            return _Signature(len(example_inputs), names)
        if any(p.kind is p.VAR_POSITIONAL for p in parameters):
            return _Signature(None, names)
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        known = [p for p in parameters if p.kind in positional]
        required = [p for p in known if p.default is p.empty]
        only = required[0].name if len(required) == 1 else None
        inputs = max(len(required), 1)
        return _Signature(inputs, names, only, tuple(known[inputs:]))

    def call(self, batch: Any, number: int) -> Call:
        """``batch`` as the model takes it: targets, which come last, are left out."""
        if isinstance(batch, Call):
            return batch
        if isinstance(batch, torch.Tensor):
            return Call((batch,))
        if isinstance(batch, Mapping):
            known = self.names
            if self.only is not None and self.only not in batch:
                return Call((batch,))  # a mapping may be the one argument itself
            return Call((), {k: v for k, v in batch.items() if known is None or k in known})
        if isinstance(batch, tuple | list) and batch:
            if len(batch) == self.inputs == 1 and isinstance(batch[0], tuple | list):
                return Call(tuple(batch))  # the one argument is a list
            if isinstance(batch[0], tuple | list | Mapping):  # (inputs, target)
                return self.call(batch[0], number)
            return Call(tuple(batch[: self._inputs_of(batch, number)]))
        raise InvalidInputError(
            f"calibration batch {number} is {type(batch).__name__}: a batch must be a tensor, a "
            "tuple of inputs (and targets), or a mapping of keyword arguments"
        )

    def _inputs_of(self, batch: Sequence[Any], number: int) -> int | None:
        """How many elements of ``batch`` are inputs, clearly optional ones among them."""
        count = self.inputs
        if count is None:
            return None
        for parameter, element in zip(self.optional, batch[count:], strict=False):
            if not _is_meant_for(parameter, element, batch[0]):
                if number == 0 and not _is_target(parameter, element):
                    self._tell_what_is_left_out(len(batch), count, parameter.name)
                break
            count += 1
        return count

    @staticmethod
    def _tell_what_is_left_out(elements: int, inputs: int, name: str) -> None:
        warnings.warn(
            f"calibration batches have {elements} elements, of which {inputs} are taken for inputs "
            f"and the others for targets; if the next one is {name}, give example_inputs, or "
            "batches that are mappings of arguments",
            X86QuantWarning,
            stacklevel=8,
        )


def _is_meant_for(parameter: inspect.Parameter, element: Any, first: Any) -> bool:
    """Whether ``element``, which may be a target, is clearly an optional argument."""
    if _TARGET.search(parameter.name):
        return False
    if _are_lengths(parameter, element, first):
        return True
    if not isinstance(element, torch.Tensor):
        return isinstance(element, bool | int | float) and type(element) is type(parameter.default)
    if parameter.default is not None or element.dim() < 2:
        return False
    return "mask" in parameter.name or element.is_floating_point()


def _are_lengths(parameter: inspect.Parameter, element: Any, first: Any) -> bool:
    """Whether ``element`` says how long each row of ``first`` is: some of them nearly fill it."""
    if not _LENGTHS.search(parameter.name) or not isinstance(first, torch.Tensor):
        return False
    if not isinstance(element, torch.Tensor) or element.is_floating_point() or first.dim() < 2:
        return False
    if element.shape != first.shape[:1] or not len(element) or int(element.min()) < 1:
        return False
    longest = int(element.max())
    return any(size // 2 < longest <= size for size in first.shape[1:])


def _is_target(parameter: inspect.Parameter, element: Any) -> bool:
    """Whether ``element`` is clearly a target: by the parameter's name or kind, or as classes."""
    if _CONDITION.search(parameter.name) or _LENGTHS.search(parameter.name):
        return False
    if not isinstance(element, torch.Tensor):
        return bool(_TARGET.search(parameter.name))
    classes = element.dim() == 1 and not element.is_floating_point()
    number = isinstance(parameter.default, bool | int | float | str)
    return classes or number or bool(_TARGET.search(parameter.name))
