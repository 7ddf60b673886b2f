"""Calibration data beside what the model was trained on, as its batch norms remember it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn

from x86quant.calling.call import Call
from x86quant.calling.running import feed

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
