"""What each layer alone does to the model's output when it becomes int8."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterator

import torch

from x86quant.calling.call import Call, dense
from x86quant.calling.running import outputs
from x86quant.capture.variants import halved
from x86quant.observing.observer import LARGEST
from x86quant.quantization.kit.simulation import FloatValues
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
    power = {name: _Power() for name in names}
    calls = prepared.sample
    # Call by call: what all layers have in common is then known for one at a time.
    for call in calls[:-1]:
        for _ in _measured(prepared, power, call):
            pass
    for call in calls[-1:]:
        for name in _measured(prepared, power, call):
            yield Harm(name, power[name].sqnr_db())


#: Layers that together do this share of the noise are looked at more closely.
_MOST = 0.5
#: On how many calls: each takes a run of the model for each layer.
_RANKED_BY = 2


def rough_harms(
    prepared: PreparedModel, names: Collection[str], *, held_back: bool = False
) -> dict[str, float]:
    """The harm of each layer named, in dB, worst first.

    It is measured on a call or two, of half the size where they are large: on the second only for
    those that do most. With ``held_back`` on all calls held back, by ranges from before.
    """
    power = {name: _Power() for name in names}
    measured = power
    calls = prepared.held_back if held_back else prepared.sample[:_RANKED_BY]
    for call in calls:
        for _ in _measured(prepared, measured, halved(call, prepared.takes), held_back):
            pass
        if not held_back:  # of which a single call may be the one that ranges do not hold for
            measured = _worst(measured)
    found = {name: sums.sqnr_db() for name, sums in power.items()}
    return dict(sorted(found.items(), key=lambda item: item[1]))


def _worst(power: dict[str, _Power]) -> dict[str, _Power]:
    """Those that fail or do :data:`_MOST` of the noise, in the order they had."""
    worst = {name for name, sums in power.items() if sums.fails}
    noise = {name: sums.noise for name, sums in power.items() if not sums.fails}
    left = _MOST * sum(noise.values())
    for name, one in sorted(noise.items(), key=lambda item: -item[1]):
        if left > 0:
            worst.add(name)
        left -= one
    return {name: sums for name, sums in power.items() if name in worst}


def _measured(
    prepared: PreparedModel, power: dict[str, _Power], call: Call, held_back: bool = False
) -> Iterator[str]:
    """Add what each layer does in ``call``; the names, each when that is done."""
    (exact,) = outputs(prepared.model, [call])
    known = FloatValues()
    for name, sums in power.items():
        if not sums.fails:
            with prepared.simulated([name], known=known, held_back=held_back) as model:
                try:
                    sums.add(exact, *outputs(model, [call]))
                except Exception:  # the model's own code may not take what rounding makes
                    sums.fails = True
        yield name


@dataclasses.dataclass
class _Power:
    """Of a signal and of the noise on it, over some tensors.

    Values without bounds in the signal, such as logits masked with -inf, do not count where they
    have none in the result either. Where the signal is not a number, the result may be anything;
    a result that is none, or infinite, where the signal is one fails: a division by what rounds to
    zero.
    """

    signal: float = 0.0
    noise: float = 0.0
    fails: bool = False

    def add(self, exact: torch.Tensor, actual: torch.Tensor) -> None:
        if exact.shape != actual.shape:  # another number of found objects, say
            self.fails = True
            return
        exact, actual = dense(exact.detach()), dense(actual.detach())
        bounded = exact.abs() < LARGEST
        if not bounded.all():
            unbounded = exact.abs() >= LARGEST
            self.fails |= not bool((actual[unbounded].abs() >= LARGEST).all())
            exact, actual = exact[bounded], actual[bounded]
        if not actual.isfinite().all():
            self.fails = True
            return
        self.signal += float(exact.double().square().sum())
        self.noise += float((actual.double() - exact.double()).square().sum())

    def sqnr_db(self) -> float:
        if self.fails:
            return -_PERFECT
        if self.noise == 0 or self.signal == 0:
            return _PERFECT if self.noise == 0 else -_PERFECT
        return min(10 * math.log10(self.signal / self.noise), _PERFECT)


def sqnr_between(
    exact: Collection[torch.Tensor], actual: Iterator[torch.Tensor] | Collection[torch.Tensor]
) -> float:
    """Signal to noise in dB of ``actual`` against ``exact``, over all of their tensors."""
    power = _Power()
    for x, y in zip(exact, actual, strict=True):
        power.add(x, y)
    return power.sqnr_db()
