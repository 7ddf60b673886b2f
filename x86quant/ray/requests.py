"""Requests to a served model: read and checked one by one, run in few batches, answered each."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from x86quant.artifacts.reader import Input
from x86quant.errors import InvalidInputError, UnsupportedError
from x86quant.ray.pinned import dtype_of

#: The arguments of one call, without the dimension of the batch.
Sample = dict[str, torch.Tensor]
#: A model: positional arguments, keyword arguments.
Run = Callable[[Sequence[torch.Tensor], Mapping[str, torch.Tensor]], Any]


def read_body(body: bytes, inputs: Sequence[Input]) -> Sample:
    """The sample in a JSON object: a number, or nested lists, for each input by its name.

    Raises:
        InvalidInputError: it is none; the message says what is expected.
    """
    try:
        found = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise InvalidInputError(f"this is not JSON ({error}); {_expected(inputs)}") from None
    if not isinstance(found, dict):
        raise InvalidInputError(f"this is no JSON object; {_expected(inputs)}")
    return read_sample(found, inputs)


def read_sample(values: Mapping[str, Any], inputs: Sequence[Input]) -> Sample:
    """A sample of lists, arrays or tensors by name, each turned into what the model takes.

    Raises:
        InvalidInputError: one is missing, unknown, or cannot be turned without changing values.
    """
    names = {one.name for one in inputs}
    if values.keys() != names:
        odd = ", ".join(map(repr, sorted(values.keys() ^ names)))
        raise InvalidInputError(f"missing or unknown: {odd}; {_expected(inputs)}")
    return {one.name: _read(values[one.name], one) for one in inputs}


def _read(value: Any, one: Input) -> torch.Tensor:
    wanted, dims = dtype_of(str(one.dtype)), len(one.shape or ()) - 1
    try:
        given = value if isinstance(value, torch.Tensor) else torch.as_tensor(np.array(value))
    except (ValueError, TypeError, OverflowError, RecursionError):
        raise InvalidInputError(
            f"{one.name!r} is no number, nor lists of numbers of equal lengths"
        ) from None
    if given.dim() != dims:
        raise InvalidInputError(
            f"{one.name!r} has shape {tuple(given.shape)}; a sample has {dims} dimensions, "
            f"such as {(one.shape or ())[1:]}"
        )
    taken = given.to(wanted)
    if wanted.is_floating_point:
        fits = not given.is_complex() and bool(taken.isfinite().all())
    else:
        fits = given.dtype == wanted or torch.equal(taken.double(), given.double())
    if not fits:
        raise InvalidInputError(
            f"{one.name!r} holds values that {str(wanted).removeprefix('torch.')} does not"
        )
    return taken


def _expected(inputs: Sequence[Input]) -> str:
    each = (
        f'"{one.name}": {str(one.dtype).removeprefix("torch.")} of shape {(one.shape or ())[1:]}'
        for one in inputs
    )
    return f"a request is a JSON object {{{', '.join(each)}}}"


def answer_all(run: Run, names: Sequence[str], samples: Sequence[Sample]) -> list[Any]:
    """What the model finds for each sample, or the error that it is: one never spoils another.

    Samples of equal shapes run as one batch.
    """
    answers: list[Any] = [None] * len(samples)
    groups: dict[tuple[torch.Size, ...], list[int]] = {}
    for number, sample in enumerate(samples):
        groups.setdefault(tuple(sample[name].shape for name in names), []).append(number)
    for numbers in groups.values():
        found = _answers(run, names, [samples[n] for n in numbers])
        for number, answer in zip(numbers, found, strict=True):
            answers[number] = answer
    return answers


def _answers(run: Run, names: Sequence[str], samples: Sequence[Sample]) -> list[Any]:
    try:
        result = run([torch.stack([sample[name] for sample in samples]) for name in names], {})
        return [_row(result, number, len(samples)) for number in range(len(samples))]
    except Exception as error:
        if len(samples) == 1:
            return [error]
        return [_answers(run, names, [sample])[0] for sample in samples]


def _row(result: Any, number: int, rows: int) -> Any:
    """One row of everything in ``result``, as numpy arrays."""
    if isinstance(result, torch.Tensor):
        if result.dim() == 0 or len(result) != rows:
            raise UnsupportedError(
                f"the model's result has shape {tuple(result.shape)} for a batch of {rows}: it has "
                "no part for each sample, so this model cannot be served in batches"
            )
        row = result[number]
        return (row.float() if row.dtype is torch.bfloat16 else row).numpy()
    if isinstance(result, Mapping):
        return {name: _row(part, number, rows) for name, part in result.items()}
    if hasattr(result, "_asdict"):
        return _row(result._asdict(), number, rows)
    if isinstance(result, tuple | list):
        return [_row(part, number, rows) for part in result]
    if dataclasses.is_dataclass(result):
        fields = (field.name for field in dataclasses.fields(result))
        return {name: _row(getattr(result, name), number, rows) for name in fields}
    return result


def to_json(answer: Any) -> bytes:
    """An answer as JSON.

    Raises:
        UnsupportedError: it holds NaN or infinity, which JSON does not have.
    """
    try:
        return json.dumps(answer, default=lambda array: array.tolist(), allow_nan=False).encode()
    except ValueError as error:
        raise UnsupportedError("the result holds NaN or infinity, which JSON has not") from error
