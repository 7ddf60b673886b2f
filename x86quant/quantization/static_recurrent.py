"""Recurrent networks: static int8 in place of dynamic where that is faster and close to float.

Which of both is better is not seen from layers. Of small ones the products, which is all that is
dynamic, take less time than what is between them; large inputs may be no good with one range.
With convolutions around them, static ones make one graph of what would be several parts.
"""

from __future__ import annotations

import dataclasses
import logging
import warnings
from collections.abc import Sequence
from typing import Any

from x86quant.calling.call import Call
from x86quant.calling.state import state_kept
from x86quant.capture.variants import smallest
from x86quant.dynamic import is_recurrent
from x86quant.errors import UnsupportedError, X86QuantWarning, first_line
from x86quant.quantization import speed
from x86quant.quantization.choices import Choices
from x86quant.quantization.deciding.layers_in_float import ENOUGH_DB
from x86quant.quantization.deciding.noise import sqnrs_with
from x86quant.quantization.harm import rough_harms
from x86quant.quantization.no_worse import checked_by_effort
from x86quant.quantization.prepared import PreparedModel
from x86quant.quantization.preparing import prepare
from x86quant.quantization.recurrent_alone import recurrent_alone
from x86quant.quantization.settings import Settings

_log = logging.getLogger("x86quant.quantization")

#: What was found first must take so many times the time of static int8.
_CLEARLY = 1.1
#: Dynamic int8 comes closer to float as a rule: below so many dB it must take so many times.
_CLOSE_DB, _MUCH = 25.0, 1.5


def may_be_static(prepared: PreparedModel, settings: Settings) -> bool:
    """Whether it was left to us that a recurrent network is dynamic, and both can be timed."""
    scheme = prepared.scheme
    return (
        settings.mode == "auto"
        and settings.effort != "fast"
        and settings.speed_check
        and bool(prepared.sample)
        and scheme.dynamic
        and any(is_recurrent(module) for module in prepared.reference.modules())
        and speed.can_tell()
    )


def static_if_better(found: Any, prepared: PreparedModel, settings: Settings) -> Any:
    """``found``, which is dynamic, or the model in static int8, by the batches that were kept."""
    static = dataclasses.replace(settings, mode="static", progress=False)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", X86QuantWarning)
        try:
            alone = recurrent_alone(prepared.reference, prepared.sample[0])
            if alone is not None and gained(found, alone, prepared.sample[:1]) is None:
                return found  # nor would all of a static model, of which these layers are a part
            choices = Choices(prepare(prepared.reference, prepared.sample, static), {})
            if not _may_be_close(choices):
                return found
            other = checked_by_effort(choices, static)
        except UnsupportedError as error:
            _log.info("not static: %s", first_line(error))
            return found
    summary = other.quantization
    close = min(summary.sqnr_db, default=0.0)
    if not summary.int8_layers or close < ENOUGH_DB:
        return found
    gain = gained(found, other, (prepared.sample[0], smallest(prepared.sample)))
    if gain is None or gain < (_CLEARLY if close >= _CLOSE_DB else _MUCH):
        return found
    for one in told:
        warnings.warn(one.message, X86QuantWarning, stacklevel=3)
    why = f"a recurrent network: any other way takes {gain:.1f} times as long here"
    other.quantization = dataclasses.replace(summary, why=why)
    return other


def _may_be_close(choices: Choices) -> bool:
    """Whether a simulation comes close enough to float, be it with the worse half of layers in it.

    Often it is the first of the recurrent layers alone whose inputs no one range is good for.
    """
    prepared, names = choices.prepared, list(choices.int8_layers)

    def close(left: Sequence[str]) -> bool:
        return min(sqnrs_with(prepared, left), default=0.0) >= ENOUGH_DB

    return close(names) or close(list(rough_harms(prepared, names, search=True))[len(names) // 2 :])


def gained(found: Any, other: Any, calls: Sequence[Call]) -> float | None:
    """How many times as long ``found`` takes as ``other``, if clearly longer on all ``calls``."""
    ratios = []
    for call in calls:
        with state_kept(found), state_kept(other):
            for model in (other, found):
                call(model)  # of a size that it may not have had yet
            ratio = speed.slower(other, found, call)
        if ratio is None or ratio < _CLEARLY:
            return None
        ratios.append(ratio)
    return min(ratios)
