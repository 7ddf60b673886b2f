"""How close a model's results come to those of the float model."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from x86quant.calling.call import Call
from x86quant.calling.running import compared_tensors, returns_places
from x86quant.errors import first_line
from x86quant.quantization.arguments import argument, padding_mask, unpadded
from x86quant.quantization.choices import Choices
from x86quant.quantization.deciding.trials import result_of
from x86quant.quantization.harm import sqnr_between
from x86quant.quantization.judging import (
    ChannelGroup,
    half_agreement,
    place_agreement,
    top_agreement,
    worst_group,
)
from x86quant.quantization.perplexity import Scored, is_causal_lm, perplexity
from x86quant.quantization.prepared import PreparedModel

_log = logging.getLogger("x86quant.quantization")

#: The whole is compared on at most so many batches.
_BATCHES = 4


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
        exact = _floats(prepared.exact.judged(call))
        try:
            actual = _floats(result_of(model, call, prepared.exact.view))
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


def judged(outcome: Choices, model: nn.Module) -> Choices:
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
    in_places = all(returns_places(prepared.exact.judged(call)) for call in halves.unseen[:1])
    outcome = dataclasses.replace(
        outcome,
        fitted_db=found,
        agreement=_least(top_agreement(*pair) for pair in pairs),
        above_half=_least(half_agreement(*pair) for pair in pairs),
        integers=_least(place_agreement(*pair) for pair in pairs) if in_places else None,
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
    "what the model returns holds no tensors to compare with the float model's: "
    "try it on data of your own, or give a metric"
)


def _floats(result: Any) -> list[torch.Tensor]:
    return [x for x in compared_tensors(result) if x.numel()]


def sqnrs_with(
    prepared: PreparedModel, names: Sequence[str], *, held_back: bool = False
) -> tuple[float, ...]:
    """Signal to noise in dB of each float tensor with the layers named in int8, and no others.

    With ``held_back`` on calls that were held back, by the ranges from before.
    """
    calls = prepared.halves.held_back if held_back else prepared.halves.judges
    with prepared.simulated(names, held_back=held_back) as model:
        return sqnrs(prepared, model, calls)
