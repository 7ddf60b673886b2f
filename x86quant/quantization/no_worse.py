"""``effort="best"`` is never further from float than the default, on data fitted to by neither.

What the best effort chooses or learns is judged step by step, on few batches; and where not all
that is needed can be in float, a little more noise may decide that nothing is. So at the end both
results are at hand, and the closer one is returned.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import warnings
from collections.abc import Collection
from typing import Any

from x86quant.errors import UnsupportedError, X86QuantWarning, first_line
from x86quant.quantization.choices import Choices
from x86quant.quantization.deciding.layers_in_float import ENOUGH_DB
from x86quant.quantization.outcome import checked
from x86quant.quantization.prepared import AS_ASKED
from x86quant.quantization.preparing import prepare
from x86quant.quantization.settings import Settings

_log = logging.getLogger("x86quant.quantization")


def checked_by_effort(
    outcome: Choices, settings: Settings, float_layers: Collection[str | type] = ()
) -> Any:
    """The model that ``outcome`` becomes, or with ``effort="best"`` that of the default effort,
    on the same batches, where it is closer to float.

    Args:
        float_layers: what stays in float, as asked.
    """
    prepared = outcome.prepared
    static = any(prepared.layers[name].part is not None for name in outcome.int8_layers)
    if settings.effort != "best" or outcome.search is not None or not static:
        return checked(outcome, settings)
    found, told = _made(outcome, settings)
    default = dataclasses.replace(settings, effort="default", progress=False)
    try:
        with warnings.catch_warnings():  # of the model and the data, which were told of before
            warnings.simplefilter("ignore", X86QuantWarning)
            other = prepare(prepared.reference, prepared.sample, default)
        kept = dict.fromkeys(other.layers_in(float_layers), AS_ASKED)
        plain, told_of_plain = _made(Choices(other, kept), default)
    except UnsupportedError as error:
        _log.info("nothing to compare with: %s", first_line(error))
        plain, told_of_plain = found, told
    if _level(plain) > _level(found):
        note = f'effort="best" found {_level(found):.1f} dB: this is what the default found'
        summary = plain.quantization
        plain.quantization = dataclasses.replace(summary, notes=(*summary.notes, note))
        found, told = plain, told_of_plain
    for one in told:
        warnings.warn(one.message, X86QuantWarning, stacklevel=4)
    return found


def _made(outcome: Choices, settings: Settings) -> tuple[Any, list[warnings.WarningMessage]]:
    """The model that ``outcome`` becomes, and what there is to say of it."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", X86QuantWarning)
        return checked(outcome, settings), told


def _level(model: Any) -> float:
    """Signal to noise of a model's worst result, in dB; the float model is worth one that does."""
    summary = model.quantization
    return min(summary.sqnr_db, default=-math.inf if summary.int8_layers else ENOUGH_DB)
