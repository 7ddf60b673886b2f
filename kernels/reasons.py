"""The one vocabulary of refusals: every kernel says the same thing in the same words.

Each function answers with a list, empty when there is nothing to refuse, so that a kernel's
``not_supported_reasons`` is the sum of what it cannot do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from x86quant import extension

from . import saturation
from .probing import trial

if TYPE_CHECKING:
    from x86quant.spec import OpSpec


def common(spec: OpSpec) -> list[str]:
    """What no compiled kernel can do: run on nothing, or past int32."""
    found = []
    if spec.in_channels == 0 or spec.out_channels == 0:
        # oneDNN divides by zero and ends the process; FBGEMM returns unset memory.
        found.append(f"the weight is empty: {spec.in_channels}→{spec.out_channels} channels")
    return found + accumulator_overflow(spec)


def stock_part() -> list[str]:
    """What is not compiled into the main part: see ``x86quant/extension.py``."""
    reason = extension.why_no_stock()
    return [] if reason is None else [reason]


def accumulator_overflow(spec: OpSpec) -> list[str]:
    """Sums that can leave int32."""
    if spec.weights is None:
        return []
    low, high = spec.weights.pair_extremes(saturation.CHANNEL)
    if not saturation.can_overflow((low, high), spec.activation_max):
        return []
    return [
        f"32-bit sums can overflow: activations to {spec.activation_max} times "
        f"weights of one output channel summing to {low}..{high}"
    ]


def pair_saturation(spec: OpSpec, layout: str) -> list[str]:
    """Neighbouring products whose sum can leave int16."""
    if spec.weights is None:
        return []
    low, high = spec.weights.pair_extremes(layout)
    if not saturation.can_saturate((low, high), spec.activation_max):
        return []
    return [
        f"16-bit sums can saturate: activations to {spec.activation_max} times "
        f"neighbouring weights summing to {low}..{high}"
    ]


def shared_sums(kernel: str, family: str, instructions: str, spec: OpSpec) -> list[str]:
    """Products that share a 16-bit sum which can leave int16, or of which nothing is known.

    In a version of the library that is on record, the record tells; in any other it is tried out.
    """
    if trial.trusted():
        return []
    layout = saturation.probed_layout(kernel, family, instructions)
    if layout is None:
        return [
            f"nobody has seen which {instructions} sums of its {family} layers are exact "
            "(benchmarks.shared_sums finds out)"
        ]
    tried = trial.of(kernel)
    if tried is not None:
        if (why := tried.why_not(spec.op, family, instructions)) is not None:
            return [why]
        seen = tried.layouts[family, instructions]
        layout = max(layout, seen, key=saturation.LAYOUTS.index)
    return [] if layout == saturation.NONE else pair_saturation(spec, layout)


def dynamic_convolution(spec: OpSpec) -> list[str]:
    """A convolution of the stock operators that quantizes its input as it runs."""
    if spec.op == "linear" or not spec.dynamic:
        return []
    return ["its dynamic convolutions cut the output off at the range of the input"]


def groups_of_features(spec: OpSpec) -> list[str]:
    """A linear whose weight has scales for groups of input features."""
    if spec.op != "linear" or spec.bits is None:
        return []
    return [f"weights of {spec.bits} bits with scales for groups of features are not supported"]


def one_range(spec: OpSpec) -> list[str]:
    """Several rows of a linear on float tensors, each of which has a range of its own."""
    if spec.rows == 1:
        return []
    return ["quantizes all rows by one range, where each row has its own"]


def whole_tensors_only(spec: OpSpec) -> list[str]:
    """What a library called on whole tensors of a compiled model has no arguments for."""
    found = []
    if spec.transposed:
        found.append("transposed convolutions of compiled models are not supported")
    if spec.post_op == "add":
        found.append("a sum behind the layer is not supported")
    if spec.post_op == "slopes":
        found.append("slopes of channels behind the layer are not supported")
    return found


def asymmetric_weights(spec: OpSpec) -> list[str]:
    """A weight zero point other than 0."""
    if spec.weights is None or spec.weights.symmetric:
        return []
    return ["weights with a zero point other than 0 are not supported"]


def per_channel_transposed(spec: OpSpec) -> list[str]:
    """One scale an output channel on a transposed convolution."""
    if not (spec.transposed and spec.per_channel):
        return []
    return ["per-channel weights of a transposed convolution are not supported"]


def output_padding(spec: OpSpec) -> list[str]:
    """Output padding of a transposed convolution."""
    if not any(spec.output_padding):
        return []
    return [f"output padding {spec.output_padding} is not supported"]
