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
    power: dict[_Group, _Power] = {(name,): _Power() for name in names}
    calls = prepared.sample
    # Call by call: what all layers have in common is then known for one at a time.
    for call in calls[:-1]:
        for _ in _Measured(prepared, call).add(power):
            pass
    for call in calls[-1:]:
        for group in _Measured(prepared, call).add(power):
            yield Harm(group[0], power[group].sqnr_db())


#: Layers that together do this share of the noise are looked at more closely.
_MOST = 0.5
#: On how many calls: each takes a run of the model for each layer.
_RANKED_BY = 2


def rough_harms(
    prepared: PreparedModel,
    names: Collection[str],
    *,
    held_back: bool = False,
    search: bool = False,
) -> dict[str, float]:
    """The harm of each layer named, in dB, worst first.

    It is measured on a call or two, of half the size where they are large: on the second only for
    those that do most. With ``held_back`` on all calls held back, by ranges from before. With
    ``search`` those of many layers that do most are searched for (``_searched``).
    """
    power: dict[_Group, _Power] = {}
    measured = power
    halves = prepared.halves
    calls = halves.held_back if held_back else (halves.calls or prepared.sample)[:_RANKED_BY]
    for call in calls:
        run = _Measured(prepared, halved(call, prepared.takes), held_back)
        if not power:
            most = _MOST_RUNS if search else len(names)
            power = measured = _searched(run, list(names), most)
        else:
            for _ in run.add(measured):
                pass
        if not held_back:  # of which a single call may be the one that ranges do not hold for
            measured = _worst(measured)
    found = {
        name: sums.sqnr_db(share=len(group)) for group, sums in power.items() for name in group
    }
    return dict(sorted(found.items(), key=lambda item: item[1]))


#: Layers that are in int8 together, in the order of the network.
_Group = tuple[str, ...]
#: Each measurement is a run of the model: of more layers than these, groups are measured.
_MOST_RUNS = 48
#: How many of them at first.
_FIRST_GROUPS = 16
#: What does less than this share of the noise is not looked at more closely.
_LITTLE = 0.02


def _searched(run: _Measured, names: list[str], most: int) -> dict[_Group, _Power]:
    """What layers do, each by itself, or of more than ``most`` those that do most and groups.

    The group that does most is halved until the runs are used up: noise of a few layers is found,
    and of what is spread over all it matters little where it is.
    """
    size = 1 if len(names) <= most else math.ceil(len(names) / _FIRST_GROUPS)
    new: list[_Group] = [tuple(names[at : at + size]) for at in range(0, len(names), size)]
    found: dict[_Group, _Power] = {}
    runs = 0
    while new:
        power = {group: _Power() for group in new}
        for _ in run.add(power):
            runs += 1
        found |= power
        several = [group for group in found if len(group) > 1]
        least = _LITTLE * sum(sums.noise for sums in found.values())
        worst = max(several, key=lambda group: found[group].size(), default=())
        if not worst or runs >= most or found[worst].size() < least:
            break
        del found[worst]
        new = [worst[: len(worst) // 2], worst[len(worst) // 2 :]]
    return found


def _worst(power: dict[_Group, _Power]) -> dict[_Group, _Power]:
    """Those that fail or do :data:`_MOST` of the noise, in the order they had."""
    worst = {group for group, sums in power.items() if sums.fails}
    noise = {group: sums.noise for group, sums in power.items() if not sums.fails}
    left = _MOST * sum(noise.values())
    for group, one in sorted(noise.items(), key=lambda item: -item[1]):
        if left > 0:
            worst.add(group)
        left -= one
    return {group: sums for group, sums in power.items() if group in worst}


class _Measured:
    """Runs a model on ``call`` with some of its layers in int8."""

    def __init__(self, prepared: PreparedModel, call: Call, held_back: bool = False) -> None:
        self._prepared, self._call, self._held_back = prepared, call, held_back
        self._flat = prepared.exact.even(prepared.halves.judges).flat
        self._view = prepared.exact.view
        (self._exact,) = outputs(self._view(prepared.model), [call], self._flat)
        self._known = FloatValues()

    def add(self, power: dict[_Group, _Power]) -> Iterator[_Group]:
        """Add what each group of layers does; the groups, each when that is done."""
        for group, sums in power.items():
            if not sums.fails:
                with self._prepared.simulated(
                    group, known=self._known, held_back=self._held_back
                ) as model:
                    try:
                        sums.add(self._exact, *outputs(self._view(model), [self._call], self._flat))
                    except Exception:  # the model's own code may not take what rounding makes
                        sums.fails = True
            yield group


#: The sizes of values whose squares, and those of noise that counts, float32 can add.
_EXACT_SQUARES = (1e-10, 1e15)


def _size(x: torch.Tensor) -> float:
    """Of the largest of ``x``, whatever its sign; NaN where there is one."""
    if not x.numel():
        return 0.0
    low, high = torch.aminmax(x)
    return float(torch.maximum(-low, high))


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
        if not _size(exact) < LARGEST:
            bounded, unbounded = exact.abs() < LARGEST, exact.abs() >= LARGEST
            self.fails |= not bool((actual[unbounded].abs() >= LARGEST).all())
            exact, actual = exact[bounded], actual[bounded]
        size, other = _size(exact), _size(actual)
        if not math.isfinite(other):
            self.fails = True
            return
        # Squares of others leave what float32 holds.
        quick = exact.dtype == actual.dtype == torch.float32
        if quick and _EXACT_SQUARES[0] <= size and max(size, other) <= _EXACT_SQUARES[1]:
            self.signal += float(torch.linalg.vector_norm(exact)) ** 2
            self.noise += float(torch.linalg.vector_norm(actual - exact)) ** 2
        else:
            self.signal += float(exact.double().square().sum())
            self.noise += float((actual.double() - exact.double()).square().sum())

    def size(self) -> float:
        """How much noise there is; without end where the result is none."""
        return math.inf if self.fails else self.noise

    def sqnr_db(self, share: int = 1) -> float:
        """Signal to noise in dB, or to an equal share of the noise."""
        if self.fails:
            return -_PERFECT
        if self.noise == 0 or self.signal == 0:
            return _PERFECT if self.noise == 0 else -_PERFECT
        return min(10 * math.log10(share * self.signal / self.noise), _PERFECT)


def sqnr_between(
    exact: Collection[torch.Tensor], actual: Iterator[torch.Tensor] | Collection[torch.Tensor]
) -> float:
    """Signal to noise in dB of ``actual`` against ``exact``, over all of their tensors."""
    power = _Power()
    for x, y in zip(exact, actual, strict=True):
        power.add(x, y)
    return power.sqnr_db()
