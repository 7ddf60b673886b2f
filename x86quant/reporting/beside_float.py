"""What a report says of the float model beside the int8 one.

Both times, in turn; how long each layer takes in float; how far each output agrees, in its own
terms; the samples that differ most; and which layers make the noise, what each would gain in
float, and what that would cost.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from x86quant.calling.call import Call
from x86quant.calling.running import run, tensors_in
from x86quant.profiling.timing import Timing, interleaved
from x86quant.quantization.harm import sqnr_between
from x86quant.quantization.layer_times import module_times
from x86quant.reporting.output_terms import agreement, outcome
from x86quant.reporting.pictures import class_map, is_map, is_picture, picture

#: So many samples are shown.
_SAMPLES = 4


@dataclasses.dataclass(frozen=True, slots=True)
class OutputAgreement:
    """One output over all calls: which, signal to noise, and in words."""

    number: int
    sqnr_db: float
    told: str


@dataclasses.dataclass(frozen=True, slots=True)
class ShownSample:
    """One sample, what both models say of it, and pictures: of what, and as a data URL."""

    number: int
    sqnr_db: float
    exact: str
    actual: str
    pictures: tuple[tuple[str, str], ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class NoiseShare:
    """What one layer alone does.

    Attributes:
        layer: its name.
        kind: what it is.
        share: of all the noise that layers make one by one.
        gain_db: about what the whole would gain with it in float.
        cost_us: what that would cost in time; None if it is not known.
    """

    layer: str
    kind: str
    share: float
    gain_db: float
    cost_us: float | None


@dataclasses.dataclass(frozen=True)
class BesideFloat:
    """All of it."""

    float_time: Timing | None
    int8_time: Timing | None
    layer_us: Mapping[str, float]
    outputs: tuple[OutputAgreement, ...]
    samples: tuple[ShownSample, ...]
    noise: tuple[NoiseShare, ...] = ()


def beside_float(
    float_model: nn.Module, int8: nn.Module, calls: Sequence[Call], runs: int = 20
) -> BesideFloat:
    """Run both models on ``calls``, and time both on the first unless ``runs`` is 0."""
    with torch.no_grad():
        times = (
            interleaved(
                {
                    "float": lambda: run(float_model, calls[0]),
                    "int8": lambda: run(int8, calls[0]),
                },
                rounds=runs,
                warmup=2,
            )
            if runs
            else {}
        )
        names = [name for name, _ in float_model.named_modules() if name]
        layer_us = module_times(float_model, names, calls[0]) if runs else {}
        pairs = [(_floats(run(float_model, c)), _floats(run(int8, c))) for c in calls]
    alike = all(_alike(*pair) for pair in pairs)
    return BesideFloat(
        times.get("float"),
        times.get("int8"),
        layer_us,
        _outputs(pairs) if alike else (),
        _worst(calls, pairs) if alike else (),
    )


def noise_shares(
    alone_db: Mapping[str, tuple[str, float]],
    float_us: Mapping[str, float],
    us: Mapping[str, float],
) -> tuple[NoiseShare, ...]:
    """The layers that make noise, the loudest first.

    Args:
        alone_db: kind and signal to noise of the whole with one layer in int8, by layer.
        float_us: microseconds of a layer in float.
        us: and in int8.
    """
    noise = {name: 10 ** (-db / 10) for name, (_, db) in alone_db.items()}
    total = sum(noise.values())
    found = []
    for name, one in sorted(noise.items(), key=lambda item: -item[1]):
        share = one / total if total else 0.0
        rest = max(1.0 - share, 1e-12)
        known = name in float_us and name in us
        cost = float_us[name] - us[name] if known else None
        found.append(NoiseShare(name, alone_db[name][0], share, -10 * math.log10(rest), cost))
    return tuple(found)


def _floats(result: object) -> list[torch.Tensor]:
    return [x.detach() for x in tensors_in(result) if x.is_floating_point() and x.numel()]


def _alike(exact: Sequence[torch.Tensor], actual: Sequence[torch.Tensor]) -> bool:
    return [x.shape for x in exact] == [x.shape for x in actual]


_Pair = tuple[list[torch.Tensor], list[torch.Tensor]]


def _outputs(pairs: Sequence[_Pair]) -> tuple[OutputAgreement, ...]:
    found = []
    for number in range(len(pairs[0][0])):
        exact = [pair[0][number] for pair in pairs]
        actual = [pair[1][number] for pair in pairs]
        db = sqnr_between(exact, actual)
        joined = (
            [torch.cat(side) for side in (exact, actual)]
            if exact[0].dim() and len({x.shape[1:] for x in exact}) == 1
            else [exact[0], actual[0]]
        )
        found.append(OutputAgreement(number, db, agreement(joined[0], joined[1], db)))
    return tuple(found)


def _worst(calls: Sequence[Call], pairs: Sequence[_Pair]) -> tuple[ShownSample, ...]:
    """The samples whose first output is furthest from the float model's, if calls have rows."""
    found: list[tuple[float, int, torch.Tensor, torch.Tensor, torch.Tensor]] = []
    number = 0
    for call, (exact, actual) in zip(calls, pairs, strict=True):
        inputs = [x for x in call.leaves if x.dim()]
        if not exact or not exact[0].dim() or not inputs:
            return ()
        rows = exact[0].shape[0]
        if any(x.shape[0] != rows for x in inputs[:1]):
            return ()
        for row in range(rows):
            one, other = exact[0][row], actual[0][row]
            found.append((sqnr_between([one], [other]), number, inputs[0][row], one, other))
            number += 1
    found.sort(key=lambda item: item[:2])
    return tuple(_sample(*item) for item in found[:_SAMPLES])


def _sample(
    db: float, number: int, given: torch.Tensor, exact: torch.Tensor, actual: torch.Tensor
) -> ShownSample:
    pictures: list[tuple[str, str]] = []
    if is_picture(given):
        pictures.append(("input", picture(given)))
    draw = picture if is_picture(exact) else class_map if is_map(exact) else None
    if draw is not None:
        pictures += [("float", draw(exact)), ("int8", draw(actual))]
    return ShownSample(number, db, outcome(exact), outcome(actual), tuple(pictures))
