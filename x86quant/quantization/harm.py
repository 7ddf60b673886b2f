"""What each layer alone does to the model's output when it becomes int8."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterator

import torch

from x86quant.calling.call import dense
from x86quant.calling.running import outputs
from x86quant.observing.observer import LARGEST
from x86quant.quantization.prepared import PreparedModel

#: What a layer gets that changes nothing at all.
_PERFECT = 200.0


@dataclasses.dataclass(frozen=True, slots=True)
class Harm:
    """The model's output with one layer in int8, against the float model's.

    Attributes:
        name: the layer.
        sqnr_db: signal to quantization noise; lower is worse.
    """

    name: str
    sqnr_db: float


def harms(prepared: PreparedModel, names: Collection[str]) -> Iterator[Harm]:
    """The harm of each layer named, over the calibration sample."""
    exact = list(outputs(prepared.model, prepared.sample))
    for name in names:
        with prepared.simulated([name]) as model:
            try:
                found = sqnr_between(exact, outputs(model, prepared.sample))
            except Exception:  # the model's own code may not take what rounding makes
                found = -_PERFECT
            yield Harm(name, found)


def sqnr_between(
    exact: Collection[torch.Tensor], actual: Iterator[torch.Tensor] | Collection[torch.Tensor]
) -> float:
    """Signal to noise in dB of ``actual`` against ``exact``, over all of their tensors.

    Values without bounds in ``exact``, such as logits masked with -inf, do not count.
    """
    signal = noise = 0.0
    for x, y in zip(exact, actual, strict=True):
        if x.shape != y.shape:  # another number of found objects, say
            return -_PERFECT
        x, y = dense(x), dense(y)
        bounded = x.abs() < LARGEST
        if not bounded.all():
            x, y = x[bounded], y[bounded].nan_to_num()
        signal += float(x.double().square().sum())
        noise += float((y.double() - x.double()).square().sum())
    if noise == 0 or signal == 0:
        return _PERFECT if noise == 0 else -_PERFECT
    return min(10 * math.log10(signal / noise), _PERFECT)
