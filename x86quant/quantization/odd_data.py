"""Calibration data that does not look like data: what is odd about it, in sentences."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn

from x86quant.calling.call import Call, dense
from x86quant.calling.running import feed, run, watched

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
    tables = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag)
        and module.num_embeddings >= _LARGE_TABLE
    }
    asked: dict[str, list[torch.Tensor]] = {}

    def note(name: str, asking: Call) -> None:
        ids = asking.args[0] if asking.args else None
        # Tables of positions are asked for a size by some.
        if not isinstance(ids, torch.Tensor):
            return
        if any(x.shape == ids.shape and torch.equal(x, ids) for x in given):
            asked.setdefault(name, []).append(ids.flatten())

    with watched(tables, before=note):
        for call in sample[:_LOOKED_AT] if tables and given else ():
            run(model, call)
    for name, found in asked.items():
        values, rows = torch.cat(found), int(tables[name].num_embeddings)
        most = int(values.max())
        if values.numel() >= _MANY_VALUES and most < _FEW_CLASSES * rows and _is_dense(values):
            yield (
                f"the integers of the calibration data are 0 to {most}, and {name!r} has "
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


# --- beside what the model was trained on, as its batch norms remember it ---

#: Other pictures or sounds of the same kind differ by less; pixels up to 255 by more.
_FACTOR = 8
_FEWEST_VALUES = 64
_CALLS = 2


class _Enough(BaseException):
    """Ends a run at the first norm; no ``except Exception`` of the model is to catch it."""


def unlike_training(model: nn.Module, sample: Sequence[Call]) -> Iterator[str]:
    """What a user should be told: data of another scale than in training, or next to none.

    Batch norms keep the mean and the variance of what they were trained on. The first one that
    runs is looked at, before which no layer's own norm hides the scale of the data.
    """
    norms: dict[str, nn.Module] = {
        path: module
        for path, module in model.named_modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm)
        and module.running_mean is not None
        and bool(module.running_mean.any())
    }
    if not norms:
        return
    floats = [x for call in sample for x in call.leaves if x.is_floating_point()]
    if len(sample) == 1 and floats and floats[0].dim() > 2 and len(floats[0]) == 1:
        yield (
            "the calibration data are a single sample: ranges fit it, and perhaps nothing else; "
            "give some tens that differ"
        )
    found = _first_input(model, sample[:_CALLS], norms)
    if found is None:
        return
    path, values = found
    scale, shift = _against(norms[path], values)
    if max(scale, 1 / scale) > _FACTOR or shift > _FACTOR:
        how = f"{scale:.3g} times as large as" if shift <= _FACTOR else "far from where they were"
        low, high = min(float(x.min()) for x in floats), max(float(x.max()) for x in floats)
        yield (
            f"the values that reach {path} are {how} in training: the calibration data, from "
            f"{low:.3g} to {high:.3g}, are not scaled as the training data were"
        )


def _first_input(
    model: nn.Module, sample: Sequence[Call], norms: Mapping[str, nn.Module]
) -> tuple[str, torch.Tensor] | None:
    """The first of ``norms`` that runs, and what reaches it, as [channels, values]."""
    seen: list[tuple[str, torch.Tensor]] = []

    def show(path: str, call: Call) -> None:
        x = call.leaves[0]
        rows = x.transpose(0, 1) if x.dim() > 1 else x[None]
        seen.append((path, rows.flatten(1).float().clone()))
        raise _Enough

    for call in sample:
        with contextlib.suppress(_Enough):
            feed(model, [call], {path: functools.partial(show, path) for path in norms})
    same = [values for path, values in seen if path == seen[0][0]]
    if not same or sum(x.shape[1] for x in same) < _FEWEST_VALUES:
        return None
    return seen[0][0], torch.cat(same, 1)


def _against(norm: nn.Module, values: torch.Tensor) -> tuple[float, float]:
    """How many times as wide ``values`` are as those of the training, and how far off in widths.

    Both are those of the middle channel.
    """
    variance: torch.Tensor = norm.running_var  # type: ignore[assignment]
    mean: torch.Tensor = norm.running_mean  # type: ignore[assignment]
    width = variance.double().clamp_min(1e-12).sqrt()
    alive = width > 1e-3 * width.median()
    scale = (values.double().std(1) / width)[alive].median().clamp_min(1e-12)
    shift = ((values.double().mean(1) - mean).abs() / width / scale.clamp_min(1))[alive].median()
    return float(scale), float(shift)
