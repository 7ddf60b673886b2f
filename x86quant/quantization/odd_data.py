"""Calibration data that does not look like data: what is odd about it, in sentences."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from x86quant.calling.call import Call, dense
from x86quant.calling.running import run

#: Arguments that say which tokens count, and those that say which do not.
_SHOWS = re.compile("attention_mask$")
_HIDES = re.compile("padding_mask$")
#: Fewer batches may be the same for a trial.
_FEWEST_ALIKE = 4


def what_is_odd(sample: Sequence[Call]) -> Iterator[str]:
    """What a user should be told about the calibration batches ``sample``."""
    yield from _values(sample)
    for name, masks in _by_name(sample).items():
        shows, hides = _SHOWS.search(name), _HIDES.search(name)
        if (shows and not any(bool(x.any()) for x in masks)) or (
            hides and all(x.dtype is torch.bool and bool(x.all()) for x in masks)
        ):
            yield f"{name} hides everything in all of the calibration data"


def _values(sample: Sequence[Call]) -> Iterator[str]:
    """Of the floating-point tensors: whether they differ at all."""
    floats = [dense(x) for call in sample for x in call.leaves if x.is_floating_point()]
    floats = [x for x in floats if x.numel()]
    if not floats:
        return
    if not any(bool(x.any()) for x in floats):
        yield "all values of the calibration data are zero: ranges chosen by them mean nothing"
    elif _all_constant(floats):
        yield (
            "every tensor of the calibration data holds one value throughout: ranges chosen by "
            "such data mean little"
        )
    elif len(sample) >= _FEWEST_ALIKE and _all_alike(sample):
        yield (
            f"all {len(sample)} calibration batches are the same one: ranges fit it, and perhaps "
            "nothing else"
        )


def _all_constant(floats: Sequence[torch.Tensor]) -> bool:
    large = [x for x in floats if x.numel() > 1]
    return bool(large) and all(bool((x == x.flatten()[0]).all()) for x in large)


def _all_alike(sample: Sequence[Call]) -> bool:
    first = sample[0].leaves
    return all(
        len(call.leaves) == len(first)
        and all(
            x is y or (x.shape == y.shape and torch.equal(dense(x), dense(y)))
            for x, y in zip(first, call.leaves, strict=True)
        )
        for call in sample[1:]
    )


def _by_name(sample: Sequence[Call]) -> Mapping[str, list[torch.Tensor]]:
    """The tensors that are given by name."""
    found: dict[str, list[torch.Tensor]] = {}
    for call in sample:
        for name, value in call.kwargs.items():
            if isinstance(value, torch.Tensor) and value.numel():
                found.setdefault(name, []).append(value)
    return found


#: Tables of at least so many rows are of tokens or items: every value of some data is few of them.
_LARGE_TABLE = 1000
#: Numbers of classes look like so few rows at the start of a table, in so many values.
_FEW_CLASSES, _MANY_VALUES = 1 / 100, 64
#: Of so many batches.
_LOOKED_AT = 4


def what_are_labels(model: nn.Module, sample: Sequence[Call]) -> Iterator[str]:
    """Of integers that a large table is asked for: that they look like classes and not like rows.

    The values are those of the calibration data as they are given; what the model computes from
    them, positions for example, does not count.
    """
    given = [x for call in sample for x in call.leaves if not x.is_floating_point()]
    asked: dict[nn.Module, list[torch.Tensor]] = {}

    def note(table: nn.Module, args: tuple[Any, ...]) -> None:
        if args and any(x.shape == args[0].shape and torch.equal(x, args[0]) for x in given):
            asked.setdefault(table, []).append(args[0].flatten())

    handles = [
        module.register_forward_pre_hook(note)
        for module in model.modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag)
        and module.num_embeddings >= _LARGE_TABLE
    ]
    try:
        for call in sample[:_LOOKED_AT] if handles and given else ():
            run(model, call)
    finally:
        for handle in handles:
            handle.remove()
    names = {module: name for name, module in model.named_modules()}
    for table, found in asked.items():
        values, rows = torch.cat(found), int(table.num_embeddings)  # type: ignore[arg-type]
        most = int(values.max())
        if values.numel() >= _MANY_VALUES and most < _FEW_CLASSES * rows and _is_dense(values):
            yield (
                f"the integers of the calibration data are 0 to {most}, and {names[table]!r} has "
                f"{rows} rows: are they labels, and not the model's inputs?"
            )


def _is_dense(values: torch.Tensor) -> bool:
    """Whether ``values`` are whole numbers from 0 on of which most occur, again and again."""
    different = torch.unique(values)
    return 2 * len(different) > int(different[-1]) and 4 * len(different) <= len(values)


def labels_among(call: Call) -> str:
    """A hint for a call that fails: which of its tensors look like labels; "" if none does."""
    first, *_ = call.leaves or (None,)
    for number, x in enumerate(call.args):
        if not isinstance(x, torch.Tensor) or x.is_floating_point() or first is None:
            continue
        if x.dim() == 1 and (len(call.args) == 1 or x.shape[0] == len(first)):
            return (
                f"; element {number} of the batch, {x.dtype} of shape {tuple(x.shape)}, looks like "
                "labels: give the model's inputs alone, or batches that are mappings of arguments"
            )
    return ""
