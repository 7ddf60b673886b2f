"""Which layers have to be in float, or wide, for results that a user would take."""

from __future__ import annotations

import dataclasses
import functools
import math
import warnings
from collections.abc import Callable, Mapping

from torch import nn

from x86quant.calling.wording import listed
from x86quant.dynamic import is_linear
from x86quant.errors import X86QuantWarning
from x86quant.quantization import speed
from x86quant.quantization.choices import Choices
from x86quant.quantization.deciding.no_slower import no_slower
from x86quant.quantization.deciding.noise import judged, sqnrs_with
from x86quant.quantization.deciding.trials import attempted
from x86quant.quantization.harm import rough_harms
from x86quant.quantization.judging import in_words
from x86quant.quantization.layer_products import products
from x86quant.quantization.prepared import PreparedModel

#: Below this signal to noise, in dB, layers go back to float, as many as it takes.
USABLE_DB = 10.0
#: Below this, too, if so large a share of the layers is enough.
ENOUGH_DB = 20.0
_MOST_IN_FLOAT = 0.25
#: Where results are rows of classes, this much is enough if the largest is the same so often.
_ENOUGH_FOR_CLASSES_DB, _ENOUGH_AGREEMENT = 15.0, 0.99
#: Below this, steps between products are looked at: in float they cost little time.
_CLEAN_DB = 25.0
#: What having such steps in float must gain, in dB.
_CLEAR_GAIN = 6.0
#: What layers in float must gain, in dB, where it is for their noise alone.
_WORTH_DB = 3.0
#: Such steps make most of the noise only if all of them together come so close to it, in dB.
_SLACK_DB = 3.0
#: A model is only built if the simulation comes so close, in dB, to what it must have.
_SIMULATION_IS_OFF_BY = 1.0
#: How far, in dB, the noise of layers is from the sum of what each does alone, or less.
_NOISE_ADDS_UP_WITHIN = 3.0
#: So many models are tried to find layers that bring the noise down.
_TRIALS = 8
#: Of a network that is usable as it is, all layers in float would be worth so many dB.
_ALL_IN_FLOAT_DB = 25.0


def without_costly_steps(outcome: Choices, model: nn.Module) -> tuple[Choices, nn.Module]:
    """With sums, joins and the like in float where most of the noise is theirs.

    Such is a small class token that is joined to large patches, and shares their scale.
    """
    before = min(outcome.sqnr_db, default=_CLEAN_DB)
    if before >= _CLEAN_DB or outcome.search is not None:
        return outcome, model
    prepared = outcome.prepared
    steps = {part: part.steps_between for part in prepared.parts}
    named = {name: prepared.layers[name] for name in outcome.int8_layers}
    between = [n for n, x in named.items() if x.part is not None and x.layer in steps[x.part]]
    if not between or min(sqnrs_with(prepared, between), default=-math.inf) > before + _SLACK_DB:
        return outcome, model  # the noise is not theirs
    outcome = dataclasses.replace(outcome, harm=rough_harms(prepared, between, search=True))
    costly = {name: db for name, db in outcome.harm.items() if db < _CLEAN_DB}
    if not costly:
        return outcome, model
    why = "most of the noise of int8 is theirs"
    tried = outcome.without(costly, why)
    other, _ = attempted(tried)
    if other is None:
        return outcome, model
    tried = judged(tried, other)
    clear = min(tried.sqnr_db, default=before) >= before + _CLEAR_GAIN
    enough = is_enough(tried) and not is_enough(outcome)
    return (tried, other) if clear or enough else (outcome, model)


#: Where ranges fit the data that they were chosen by, and no other.
_MORE_DATA = (
    "ranges that were chosen without the last of the calibration data fit it much worse: give more "
    "data, of all kinds that the model will see"
)


def is_enough(outcome: Choices) -> bool:
    """Whether a user would take the results for the float model's."""
    found = min(outcome.sqnr_db, default=ENOUGH_DB)
    if found >= ENOUGH_DB:
        return True
    told = outcome.agreement or outcome.integers
    share = 0.0 if told is None else told[0]
    return found >= _ENOUGH_FOR_CLASSES_DB and share >= _ENOUGH_AGREEMENT


def _narrow(outcome: Choices) -> list[str]:
    """The linears whose weights have less than 8 bits; those of static parts have 8."""
    prepared = outcome.prepared
    if prepared.weight_bits == 8:
        return []
    dynamic = [name for name in outcome.int8_layers if prepared.layers[name].part is None]
    return [name for name in dynamic if is_linear(prepared.model.get_submodule(name))]


def wide_enough(outcome: Choices, model: nn.Module) -> tuple[Choices, nn.Module]:
    """With 8 bits in the linears that 4 harm most, until that is enough.

    What has :data:`USABLE_DB` as it is widens a share of its linears at most.
    """
    prepared = outcome.prepared
    narrow = _narrow(outcome)
    if not narrow or prepared.bits_by_layer or outcome.search is not None:
        return outcome, model
    if is_enough(outcome):
        return outcome, model
    order = list(rough_harms(prepared, narrow))
    usable = min(outcome.sqnr_db) >= USABLE_DB
    most = max(1, int(_MOST_IN_FLOAT * len(order))) if usable else len(order)
    best, size = (outcome, model), min(1, len(order))
    while size:
        tried = dataclasses.replace(outcome, prepared=prepared.with_eight_bits(order[:size]))
        other, _ = attempted(tried)
        if other is not None:
            note = f"{size} of {len(order)} linears have weights of 8 bits, which 4 harm most: "
            best = (judged(tried, other).noting(note + listed(order[:size])), other)
        if size == most or is_enough(best[0]):
            break
        size = min(2 * size, most)
    return best


def good_enough(
    outcome: Choices, model: nn.Module, *, at_any_cost: bool = False
) -> tuple[Choices, nn.Module]:
    """With the worst layers in float until every output has :data:`ENOUGH_DB`, if that helps.

    What has :data:`USABLE_DB` as it is gives up a share of its layers at most, and products in
    proportion to what is gained, unless that may come ``at_any_cost``.
    """
    if is_enough(outcome) or outcome.search is not None or not outcome.int8_layers:
        return outcome, model
    before = min(outcome.sqnr_db)
    if before >= USABLE_DB and _narrow(outcome):
        return outcome, model  # that much is lost by 4 bits as a rule
    prepared = outcome.prepared
    # By ranges that have seen all data no layer is at fault: those are whose ranges do not hold.
    unsteady = before >= USABLE_DB and min(outcome.fitted_db, default=before) >= ENOUGH_DB
    known = {} if unsteady else outcome.harm
    new = [name for name in outcome.int8_layers if name not in known]
    harm = {**known, **rough_harms(prepared, new, held_back=unsteady, search=True)}
    harm = {name: harm[name] for name in sorted(outcome.int8_layers, key=harm.__getitem__)}
    order = list(harm)
    usable = before >= USABLE_DB
    most = max(1, int(_MOST_IN_FLOAT * len(order))) if usable else len(order)
    best = (outcome, model)
    shares = _shares(prepared) if usable and not at_any_cost else {}
    noise = [10 ** (-db / 10) for db in harm.values()]

    def hoped_for(size: int) -> float:
        """What is expected, without a run, where the noise of layers adds up."""
        if before <= 0:  # more noise than signal: some layer makes what is no number, say
            return math.inf
        return before - 10 * math.log10(max(sum(noise[size:]) / sum(noise), 1e-20))

    @functools.cache
    def expected_of(size: int) -> float:
        left = outcome.without(order[:size], "").int8_layers
        return min(sqnrs_with(prepared, left, held_back=unsteady), default=math.inf)

    # Where the most is not enough, less is not either.
    hopeless = not prepared.has_budget and expected_of(most) < ENOUGH_DB - _SIMULATION_IS_OFF_BY
    size = most if hopeless else 1
    for _ in range(0 if prepared.has_budget else _TRIALS):  # which one in float would exceed
        size = min(size, most)
        why = f"the model has {before:.1f} dB with it in int8"
        least = USABLE_DB if size > _MOST_IN_FLOAT * len(order) else ENOUGH_DB
        # What is not enough is better than nothing where it is clearly better.
        wanted = min(least, before + _WORTH_DB) if size == most else least
        if size < most and hoped_for(size) < wanted - _NOISE_ADDS_UP_WITHIN:
            size *= 2
            continue
        # What takes more time has to gain more.
        gain = _ALL_IN_FLOAT_DB * sum(shares.get(name, 0.0) for name in order[:size])
        tried = outcome.without(order[:size], why)
        if expected_of(size) >= max(wanted, before + gain) - _SIMULATION_IS_OFF_BY:
            other, _ = attempted(tried)
            if other is not None:
                tried = judged(tried, other)
                found = min(tried.sqnr_db, default=least)
                if (found >= wanted or is_enough(tried)) and found >= before + gain:
                    best = (tried, other)
                    break
        if size == most:
            break
        size *= 2
    outcome, model = best
    if unsteady and not is_enough(outcome):
        outcome = outcome.noting(_MORE_DATA)
    _say_what_is_lost(outcome, before, harm)
    return outcome, model


def _shares(prepared: PreparedModel) -> dict[str, float]:
    """The share of each layer in the products of all."""
    counts = products(prepared)
    total = max(sum(counts.values()), 1)
    return {name: counts.get(name, 0) / total for name in prepared.layers}


def where_float_is_cheap(
    outcome: Choices,
    model: nn.Module,
    as_graphs: Callable[[Choices, nn.Module], tuple[Choices, nn.Module] | None] | None = None,
) -> tuple[Choices, nn.Module]:
    """With the layers that make most of the noise in float, if that takes hardly more time.

    Such is the first convolution of a transformer, whose other layers quantize each token.

    Args:
        outcome: what is decided so far.
        model: made of it.
        as_graphs: gives other models graphs, if ``model`` has some; None from it if that is slow.
    """
    prepared = outcome.prepared
    decided = outcome.search is not None or prepared.has_budget
    if decided or not outcome.int8_layers or not outcome.sqnr_db:
        return outcome, model
    before = min(sqnrs_with(prepared, outcome.int8_layers))
    order = list(rough_harms(prepared, outcome.int8_layers))
    size = 1
    while size <= _MOST_IN_FLOAT * len(order):
        why = "most of the noise is theirs, and in float they take hardly more time"
        tried = outcome.without(order[:size], why)
        size *= 2
        if min(sqnrs_with(prepared, tried.int8_layers)) < before + _WORTH_DB:
            continue
        other, _ = attempted(tried)
        if other is not None and as_graphs is not None:
            tried, other = as_graphs(tried, other) or (tried, None)
        if other is None or speed.slower(model, other, prepared.sample[0]) is not None:
            continue
        tried = judged(tried, other)
        gains = min(tried.sqnr_db, default=before) >= min(outcome.sqnr_db) + _WORTH_DB
        if gains and as_graphs is not None:
            return tried, other
        if gains and no_slower(tried, other, prepared.sample)[0].reasons == tried.reasons:
            return tried, other
    return outcome, model


def _say_what_is_lost(outcome: Choices, before: float, harm: Mapping[str, float]) -> None:
    """Warn unless the results are close enough to the float model's."""
    worst = listed([f"{name} ({db:.1f} dB alone)" for name, db in harm.items()])
    if not outcome.int8_layers:
        warnings.warn(
            f"this is the float model: in int8 it has {before:.1f} dB against float, and no layer "
            f"could stay in int8; those that harm it most: {worst}",
            X86QuantWarning,
            stacklevel=5,
        )
    elif not is_enough(outcome):
        found = min(outcome.sqnr_db)
        warnings.warn(
            f"the int8 model has {found:.1f} dB against float ({in_words(found)}); the layers that "
            f"harm it most: {worst}; keep them in float with float_layers, or give a metric",
            X86QuantWarning,
            stacklevel=5,
        )


#: Of a metric half a point is noticed. From so many dB on decisions that change are those that are
#: open in float as well. One or two mean nothing.
_NOTICED, _DECIDED_DB, _CHANCE = 0.005, 30.0, 2


def say_what_is_decided_otherwise(outcome: Choices) -> None:
    """Warn of what is close enough as a whole, and still decides otherwise now and then."""
    close = min(outcome.sqnr_db, default=_DECIDED_DB) >= _DECIDED_DB
    if close or outcome.search is not None or not is_enough(outcome):
        return
    kinds = (
        (outcome.agreement, "the largest value is another one in {} of {} rows"),
        (outcome.above_half, "only one of both models finds {} of {} probabilities above one half"),
        (outcome.integers, "{} of {} integers returned are others"),
    )
    for shared, told in kinds:
        if shared is None:
            continue
        changed, noticed = round((1 - shared[0]) * shared[1]), _NOTICED * shared[1]
        if changed > max(_CHANCE, noticed + 2 * math.sqrt(noticed)):
            warnings.warn(
                f"of the calibration data, {told.format(changed, shared[1])} "
                f"({1 - shared[0]:.1%}): "
                'a metric may change by as much; try effort="best", or give a metric',
                X86QuantWarning,
                stacklevel=4,
            )
