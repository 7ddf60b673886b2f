"""From a calibrated model to the one that is returned: built, run, compared, timed.

Nothing is returned that has not run as a user would call it. What fails stays in float, and so do
the layers that cost too much accuracy, and what is slower in int8.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from x86quant.calling.call import Call
from x86quant.calling.running import run, tensors_in
from x86quant.calling.state import state_kept
from x86quant.calling.wording import listed
from x86quant.capture.variants import smallest, takes, variants
from x86quant.compiled import CompiledModule
from x86quant.compiled.guarded import GuardedModule
from x86quant.dynamic import is_linear, note_in_config
from x86quant.errors import UnsupportedError, X86QuantWarning, first_line
from x86quant.forms.call_form import Structure, take_apart
from x86quant.quantization import layer_times, speed
from x86quant.quantization.arguments import argument, padding_mask, unpadded
from x86quant.quantization.choices import Choices
from x86quant.quantization.graphs.given_graphs import give_graphs, wants_graphs
from x86quant.quantization.harm import rough_harms, sqnr_between
from x86quant.quantization.judging import (
    ChannelGroup,
    half_agreement,
    in_words,
    top_agreement,
    worst_group,
)
from x86quant.quantization.layer_products import products
from x86quant.quantization.perplexity import Scored, is_causal_lm, perplexity
from x86quant.quantization.prepared import PreparedModel
from x86quant.quantization.settings import Settings
from x86quant.quantization.tracing.memory_reads import sees_other_memory
from x86quant.unforeseen import described, is_own

_log = logging.getLogger("x86quant.quantization")

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
#: The whole is compared on at most so many batches.
_BATCHES = 4
#: A model is only built if the simulation comes so close, in dB, to what it must have.
_SIMULATION_IS_OFF_BY = 1.0
#: How far, in dB, the noise of layers is from the sum of what each does alone, or less.
_NOISE_ADDS_UP_WITHIN = 3.0
#: So many models are tried to find layers that bring the noise down.
_TRIALS = 8
#: Of a network that is usable as it is, all layers in float would be worth so many dB.
_ALL_IN_FLOAT_DB = 25.0


def checked(outcome: Choices, settings: Settings) -> Any:
    """The model that ``quantize`` returns: ``outcome``, mended where that is needed."""
    outcome, model = _that_runs(outcome)
    sample = outcome.prepared.sample
    if sample:
        outcome = _judged(outcome, model)
        outcome, model = _without_costly_steps(outcome, model)
        outcome, model = _wide_enough(outcome, model)
        outcome, model = _good_enough(outcome, model, at_any_cost=settings.effort == "best")
        if settings.speed_check:
            outcome, model = _no_slower(outcome, model, sample)
            if settings.effort == "best" and speed.can_tell():
                outcome, model = _where_float_is_cheap(outcome, model)
        if not outcome.int8_layers:
            outcome = outcome.without_figures()
        _say_what_is_decided_otherwise(outcome)
    for x in model.parameters():
        x.detach_()  # of a copied ScriptModule they are computed, by clones
    model.requires_grad_(False)
    note_in_config(model, settings.fuse_blocks)
    result: Any = model.eval()
    if sample and _wants_graphs(outcome, result, settings, sample[0]):
        tried = variants(sample, functools.partial(takes, result))
        for note in give_graphs(result, tried, settings.fuse_blocks):
            outcome = outcome.noting(note)
    result.quantization = outcome.summary()
    return result


def _wants_graphs(outcome: Choices, model: nn.Module, settings: Settings, call: Call) -> bool:
    """Whether blocks of dynamic layers are to run as graphs."""
    if settings.fuse_blocks == "auto" and not settings.speed_check:
        return False
    dynamic = outcome.prepared.scheme.dynamic and outcome.int8_layers
    return bool(dynamic) and wants_graphs(model, settings.fuse_blocks, call)


# --- it runs ---


def _that_runs(outcome: Choices) -> tuple[Choices, nn.Module]:
    """The first form of ``outcome`` that runs on calibration data: with all of it in int8, with
    attributes of the float parts at hand, or without the parts that fail.
    """
    model, reason = _tried(outcome)
    if model is not None:
        return outcome, model
    guarded = dataclasses.replace(outcome, guarded=True)
    model, _ = _tried(guarded)
    if model is not None:
        return guarded, model
    units = guarded.units()

    def fails(names: Collection[str]) -> bool:
        rest = set().union(*(units[name] for name in units if name not in names))
        return _tried(guarded.without(rest, ""))[0] is None

    wrong = _culprits(list(units), fails)
    layers = set().union(*(units[name] for name in wrong))
    why = f"in int8 the model fails: {reason}"
    left = guarded.without(layers, why)
    model, _ = _tried(left)
    if model is None:
        left = guarded.without(set(guarded.int8_layers), why)
        model = left.build()
    warnings.warn(
        f"{listed(sorted(name or 'the whole model' for name in wrong))} stays in float: {reason}",
        X86QuantWarning,
        stacklevel=4,
    )
    return left, model


def _culprits(units: list[str], fails: Callable[[Collection[str]], bool]) -> list[str]:
    """Those of ``units``, which fail together, that fail by themselves or in small groups."""
    if len(units) <= 1:
        return units
    half = len(units) // 2
    found = [
        name
        for group in (units[:half], units[half:])
        if fails(group)
        for name in _culprits(group, fails)
    ]
    return found or units


def _tried(outcome: Choices) -> tuple[nn.Module | None, str]:
    """The model, if it runs on the sample and returns what the float model does; else why not."""
    try:
        model = outcome.build()
    except UnsupportedError as error:
        return None, first_line(error)
    except Exception as error:
        if not is_own(error):
            raise
        return None, described(error)
    prepared = outcome.prepared
    for call in (*prepared.sample[:1], *prepared.halves.calls[1:2]):
        expected = outcome.prepared.exact.of(call)
        try:
            actual = _result(model, call)
        except Exception as error:  # whatever the model's own code raises
            return None, first_line(error)
        if (reason := _unlike(expected, actual)) is not None:
            return None, reason
    if outcome.prepared.parts and not isinstance(model, CompiledModule | GuardedModule):
        for call in outcome.prepared.sample[:1]:
            paths = {part.path for part in outcome.prepared.parts} | set(outcome.units())
            reason = sees_other_memory(outcome.prepared.reference, model, paths, call)
            if reason is not None:
                return None, reason
    return model, ""


def _result(model: nn.Module, call: Call) -> Any:
    with state_kept(model):
        return run(model, call)


def _unlike(expected: Any, actual: Any) -> str | None:
    """How the kind of a result differs, or None; its values are not looked at."""
    try:
        structure, exact = take_apart(expected)
        other, found = take_apart(actual)
    except UnsupportedError:  # the user's own class
        return None if type(expected) is type(actual) else f"it returns {type(actual).__name__}"
    if _without_numbers(structure) != _without_numbers(other):
        return "it returns another structure"
    for x, y in zip(exact, found, strict=True):
        if x.dtype is not y.dtype or x.dim() != y.dim():
            return f"it returns {y.dtype} {tuple(y.shape)}, not {x.dtype} {tuple(x.shape)}"
    return None


def _without_numbers(structure: Structure) -> Structure:
    """``structure`` whose numbers may be any: what the model's own code reads off its results."""
    parts = tuple(map(_without_numbers, structure.parts))
    value = None if structure.kind in (int, float, complex) else structure.value
    return dataclasses.replace(structure, parts=parts, value=value)


# --- it is good ---


def sqnrs(prepared: PreparedModel, model: nn.Module, calls: Sequence[Call]) -> tuple[float, ...]:
    """Signal to noise in dB of each float tensor in the result, over all of ``calls``.

    If the model fails on rounded values, the result counts as pure noise.

    Where an attention mask is given, what the model makes of padding does not count.
    """
    results = _results(prepared, model, calls)
    if isinstance(results, int):
        return (-math.inf,) * results
    return _levels(_pairs(prepared, results))


def _levels(pairs: _Pairs) -> tuple[float, ...]:
    """Signal to noise in dB of each of ``pairs``."""
    return tuple(_level(pair)[0] for pair in pairs)


def _level(pair: _Pair) -> tuple[float, ChannelGroup | None]:
    """Signal to noise in dB of one result: of all of it, or of channels that have much less."""
    db = sqnr_between(*pair)
    group = worst_group(*pair, db)
    return (db, None) if group is None else (group.sqnr_db, group)


#: One float tensor of the result in each of some calls: the float model's, and the other's.
_Pair = tuple[list[torch.Tensor], list[torch.Tensor]]
_Pairs = list[_Pair]


#: A call, and the float tensors of the float model's result and of the other's.
_Results = list[tuple[Call, list[torch.Tensor], list[torch.Tensor]]]


def _results(prepared: PreparedModel, model: nn.Module, calls: Sequence[Call]) -> _Results | int:
    """Both results of each call; how many tensors there are, where the model fails."""
    found: _Results = []
    for call in calls:
        exact = _floats(prepared.exact.of(call))
        try:
            actual = _floats(_result(model, call))
        except Exception as error:
            _log.info("in int8 the model fails: %s", first_line(error))
            return len(exact)
        found.append((call, exact, actual))
    return found


def _pairs(prepared: PreparedModel, results: _Results) -> _Pairs:
    """Each float tensor of ``results``, of real tokens alone."""
    pairs: _Pairs = []
    for call, *both in results:
        mask = padding_mask(prepared.reference, call)
        exact, actual = ([unpadded(x, mask) for x in one] for one in both)
        if [x.shape for x in exact] != [x.shape for x in actual]:
            continue  # a number of found objects, say
        for number, (x, y) in enumerate(zip(exact, actual, strict=True)):
            if number == len(pairs):
                pairs.append(([], []))
            pairs[number][0].append(x)
            pairs[number][1].append(y)
    return pairs


def _perplexities(prepared: PreparedModel, results: _Results) -> tuple[float, float] | None:
    """Of the other model and of the float model, if that is a causal language model."""
    if not is_causal_lm(prepared.reference):
        return None
    actual: list[Scored] = []
    exact: list[Scored] = []
    for call, wanted, found in results:
        ids = argument(prepared.reference, call, "input_ids")
        mask = padding_mask(prepared.reference, call)
        if ids is None or any(not x or x[0].shape[:-1] != ids.shape for x in (wanted, found)):
            return None
        actual.append((found[0], ids, mask))
        exact.append((wanted[0], ids, mask))
    both = perplexity(actual), perplexity(exact)
    return None if both[0] is None or both[1] is None else (both[0], both[1])


def _judged(outcome: Choices, model: nn.Module) -> Choices:
    """``outcome`` with the signal to noise of ``model``, which it was built as.

    Ranges fit the data that they were chosen by: where some was held back, what they would have
    been without it is tried on it, in simulation, and the lower of both figures counts.
    """
    prepared = outcome.prepared
    halves = prepared.halves
    results = _results(prepared, model, halves.unseen[: _BATCHES * halves.pieces])
    pairs = [] if isinstance(results, int) else _pairs(prepared, results)
    levels = [_level(pair) for pair in pairs]
    found = tuple(db for db, _ in levels)
    if isinstance(results, int):
        found = (-math.inf,) * results
    groups = [group for _, group in levels if group is not None]
    outcome = dataclasses.replace(
        outcome,
        fitted_db=found,
        agreement=_least(top_agreement(*pair) for pair in pairs),
        above_half=_least(half_agreement(*pair) for pair in pairs),
        worst=str(min(groups, key=lambda group: group.sqnr_db)) if groups else "",
    )
    static = [name for name in outcome.int8_layers if prepared.layers[name].part is not None]
    if static and prepared.can_hold_back:
        with prepared.simulated(outcome.int8_layers, held_back=True) as simulated:
            honest = sqnrs(prepared, simulated, halves.held_back)
        if len(honest) == len(found):
            found = tuple(map(min, found, honest))
    told = None if isinstance(results, int) else _perplexities(prepared, results)
    outcome = dataclasses.replace(outcome, sqnr_db=found, perplexity=told)
    return outcome if found or _NOT_JUDGED in outcome.notes else outcome.noting(_NOT_JUDGED)


def _least(shares: Iterable[tuple[float, int] | None]) -> tuple[float, int] | None:
    return min((one for one in shares if one is not None), default=None)


#: Where no noise can be told.
_NOT_JUDGED = (
    "what the model returns holds no floating-point tensors to compare with the float model's: "
    "try it on data of your own, or give a metric"
)


def _floats(result: Any) -> list[torch.Tensor]:
    leaves = tensors_in(result)
    return [x.detach() for x in leaves if x.is_floating_point() and x.numel()]


def _without_costly_steps(outcome: Choices, model: nn.Module) -> tuple[Choices, nn.Module]:
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
    other, _ = _tried(tried)
    if other is None:
        return outcome, model
    tried = _judged(tried, other)
    if min(tried.sqnr_db, default=before) < before + _CLEAR_GAIN:
        return outcome, model
    return tried, other


def sqnrs_with(
    prepared: PreparedModel, names: Sequence[str], *, held_back: bool = False
) -> tuple[float, ...]:
    """Signal to noise in dB of each float tensor with the layers named in int8, and no others.

    With ``held_back`` on calls that were held back, by the ranges from before.
    """
    calls = prepared.halves.held_back if held_back else prepared.halves.judges
    with prepared.simulated(names, held_back=held_back) as model:
        return sqnrs(prepared, model, calls)


#: Where ranges fit the data that they were chosen by, and no other.
_MORE_DATA = (
    "ranges that were chosen without the last of the calibration data fit it much worse: give more "
    "data, of all kinds that the model will see"
)


def _is_enough(outcome: Choices) -> bool:
    """Whether a user would take the results for the float model's."""
    found = min(outcome.sqnr_db, default=ENOUGH_DB)
    if found >= ENOUGH_DB:
        return True
    share = 0.0 if outcome.agreement is None else outcome.agreement[0]
    return found >= _ENOUGH_FOR_CLASSES_DB and share >= _ENOUGH_AGREEMENT


def _narrow(outcome: Choices) -> list[str]:
    """The linears whose weights have less than 8 bits; those of static parts have 8."""
    prepared = outcome.prepared
    if prepared.weight_bits == 8:
        return []
    dynamic = [name for name in outcome.int8_layers if prepared.layers[name].part is None]
    return [name for name in dynamic if is_linear(prepared.model.get_submodule(name))]


def _wide_enough(outcome: Choices, model: nn.Module) -> tuple[Choices, nn.Module]:
    """With 8 bits in the linears that 4 harm most, until that is enough.

    What has :data:`USABLE_DB` as it is widens a share of its linears at most.
    """
    prepared = outcome.prepared
    narrow = _narrow(outcome)
    if not narrow or prepared.bits_by_layer or outcome.search is not None:
        return outcome, model
    if _is_enough(outcome):
        return outcome, model
    order = list(rough_harms(prepared, narrow))
    usable = min(outcome.sqnr_db) >= USABLE_DB
    most = max(1, int(_MOST_IN_FLOAT * len(order))) if usable else len(order)
    best, size = (outcome, model), min(1, len(order))
    while size:
        tried = dataclasses.replace(outcome, prepared=prepared.with_eight_bits(order[:size]))
        other, _ = _tried(tried)
        if other is not None:
            note = f"{size} of {len(order)} linears have weights of 8 bits, which 4 harm most: "
            best = (_judged(tried, other).noting(note + listed(order[:size])), other)
        if size == most or _is_enough(best[0]):
            break
        size = min(2 * size, most)
    return best


def _good_enough(
    outcome: Choices, model: nn.Module, *, at_any_cost: bool = False
) -> tuple[Choices, nn.Module]:
    """With the worst layers in float until every output has :data:`ENOUGH_DB`, if that helps.

    What has :data:`USABLE_DB` as it is gives up a share of its layers at most, and products in
    proportion to what is gained, unless that may come ``at_any_cost``.
    """
    if _is_enough(outcome) or outcome.search is not None or not outcome.int8_layers:
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
            other, _ = _tried(tried)
            if other is not None:
                tried = _judged(tried, other)
                found = min(tried.sqnr_db, default=least)
                if (found >= wanted or _is_enough(tried)) and found >= before + gain:
                    best = (tried, other)
                    break
        if size == most:
            break
        size *= 2
    outcome, model = best
    if unsteady and not _is_enough(outcome):
        outcome = outcome.noting(_MORE_DATA)
    _say_what_is_lost(outcome, before, harm)
    return outcome, model


def _shares(prepared: PreparedModel) -> dict[str, float]:
    """The share of each layer in the products of all."""
    counts = products(prepared)
    total = max(sum(counts.values()), 1)
    return {name: counts.get(name, 0) / total for name in prepared.layers}


def _where_float_is_cheap(outcome: Choices, model: nn.Module) -> tuple[Choices, nn.Module]:
    """With the layers that make most of the noise in float, if that takes hardly more time.

    Such is the first convolution of a transformer, whose other layers quantize each token.
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
        other, _ = _tried(tried)
        if other is None or speed.slower(model, other, prepared.sample[0]) is not None:
            continue
        tried = _judged(tried, other)
        gains = min(tried.sqnr_db, default=before) >= min(outcome.sqnr_db) + _WORTH_DB
        if gains and _no_slower(tried, other, prepared.sample)[0].reasons == tried.reasons:
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
    elif not _is_enough(outcome):
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


def _say_what_is_decided_otherwise(outcome: Choices) -> None:
    """Warn of what is close enough as a whole, and still decides otherwise now and then."""
    close = min(outcome.sqnr_db, default=_DECIDED_DB) >= _DECIDED_DB
    if close or outcome.search is not None or not _is_enough(outcome):
        return
    kinds = (
        (outcome.agreement, "the largest value is another one in {} of {} rows"),
        (outcome.above_half, "only one of both models finds {} of {} probabilities above one half"),
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


# --- it is fast ---


def _no_slower(
    outcome: Choices, model: nn.Module, sample: Sequence[Call], *, by_layer: bool = True
) -> tuple[Choices, nn.Module]:
    """Without what is slower in int8 than in float, on the first call or on the smallest.

    That is single layers if they are to blame, then parts, then all of it.
    """
    weight_only = outcome.prepared.scheme.weight_only
    if not outcome.int8_layers or weight_only or not speed.can_tell():
        return outcome, model
    reference = outcome.prepared.reference
    in_doubt = False
    call = sample[0]
    with state_kept(model), state_kept(reference):
        units = outcome.units()
        if set(units) != {""}:
            ratios = speed.by_part(outcome.prepared.model, model, call, list(units))
            slow = {name: ratio for name, ratio in ratios.items() if ratio is not None}
            if slow and by_layer:
                if found := _without_slow_layers(outcome, model):
                    return _no_slower(*found, sample, by_layer=False)
                by_layer = False  # nor would any be found in what is left: timed once
            left = outcome
            for name, ratio in slow.items():
                left = left.without(units[name], f"int8 takes {ratio:.2f} times as long here")
            in_doubt = bool(slow)
            if slow and left.int8_layers:
                other, _ = _tried(left)
                if other is not None:
                    outcome, model = _judged(left, other), other
        loss, where = speed.slower(reference, model, call, in_doubt=in_doubt), ""
        small = smallest(sample)
        if loss is None and str(small) != str(call) and _both_run(reference, model, small):
            loss, where = speed.slower(reference, model, small, in_doubt=in_doubt), f" on {small}"
        if loss and by_layer and (found := _without_slow_layers(outcome, model)):
            return _no_slower(*found, sample, by_layer=False)
    if loss is None:
        return outcome, model
    why = f"int8 takes {loss:.2f} times as long as float{where}"
    outcome = outcome.without(set(outcome.int8_layers), why).noting(
        f"this is the float model: {why} (speed_check=False returns the int8 model all the same)"
    )
    return outcome, outcome.build()


def _without_slow_layers(outcome: Choices, model: nn.Module) -> tuple[Choices, nn.Module] | None:
    """With the layers in float that take much longer in int8; None if there are none."""
    slow = layer_times.much_slower(outcome.prepared, model, outcome.int8_layers)
    left = outcome
    for name, ratio in slow.items():
        left = left.without([name], f"int8 takes {ratio:.2f} times as long here")
    if not slow or not left.int8_layers:
        return None
    other, _ = _tried(left)
    return None if other is None else (_judged(left, other), other)


def _both_run(exact: nn.Module, int8: nn.Module, call: Call) -> bool:
    """Whether both take a call of a size that calibration may not have had, and int8 is int8."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", X86QuantWarning)  # that it runs in float
            for model in (exact, int8):
                run(model, call)
    except Exception:  # whatever the model's own code raises
        return False
    return True
