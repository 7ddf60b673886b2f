"""Without what is slower in int8 than in float."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from torch import nn

from x86quant.calling.call import Call
from x86quant.calling.running import run
from x86quant.calling.state import state_kept
from x86quant.capture.variants import smallest
from x86quant.errors import X86QuantWarning
from x86quant.quantization import layer_times, speed
from x86quant.quantization.choices import Choices
from x86quant.quantization.deciding.noise import judged
from x86quant.quantization.deciding.trials import attempted


def no_slower(
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
                    return no_slower(*found, sample, by_layer=False)
                by_layer = False  # nor would any be found in what is left: timed once
            left = outcome
            for name, ratio in slow.items():
                left = left.without(units[name], f"int8 takes {ratio:.2f} times as long here")
            in_doubt = bool(slow)
            if slow and left.int8_layers:
                other, _ = attempted(left)
                if other is not None:
                    outcome, model = judged(left, other), other
        loss, where = slower_than(reference, model, sample, in_doubt=in_doubt)
        if loss and by_layer and (found := _without_slow_layers(outcome, model)):
            return no_slower(*found, sample, by_layer=False)
    if loss is None:
        return outcome, model
    why = f"int8 takes {loss:.2f} times as long as float{where}"
    outcome = outcome.without(set(outcome.int8_layers), why).noting(
        f"this is the float model: {why} (speed_check=False returns the int8 model all the same)"
    )
    return outcome, outcome.build()


def slower_than(
    reference: nn.Module, model: nn.Module, sample: Sequence[Call], *, in_doubt: bool = False
) -> tuple[float | None, str]:
    """How many times as long ``model`` clearly takes as float, and on what, if not the first call.

    The smallest call counts as well.
    """
    call, small = sample[0], smallest(sample)
    loss = speed.slower(reference, model, call, in_doubt=in_doubt)
    if loss is None and str(small) != str(call) and _both_run(reference, model, small):
        return speed.slower(reference, model, small, in_doubt=in_doubt), f" on {small}"
    return loss, ""


def _without_slow_layers(outcome: Choices, model: nn.Module) -> tuple[Choices, nn.Module] | None:
    """With the layers in float that take much longer in int8; None if there are none."""
    slow = layer_times.much_slower(outcome.prepared, model, outcome.int8_layers)
    left = outcome
    for name, ratio in slow.items():
        left = left.without([name], f"int8 takes {ratio:.2f} times as long here")
    if not slow or not left.int8_layers:
        return None
    other, _ = attempted(left)
    return None if other is None else (judged(left, other), other)


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
