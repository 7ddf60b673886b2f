"""What follows from the shape of an op: rows, shapes of its operands, whether it makes sense."""

from __future__ import annotations

import math

from x86quant.ops.groups import GROUP_STEP
from x86quant.spec import ROUTED_KINDS, OpSpec

#: Bits of a code in an embedding table.
TABLE_BITS = (8, 4, 2)
#: Bits of a code in a weight that has scales for groups.
WEIGHT_BITS = (8, 4)


def with_rows(spec: OpSpec) -> OpSpec:
    """``spec`` with the ``rows`` that follow from its batch and spatial size."""
    return spec.replace(rows=(spec.batch or 1) * math.prod(spec.output_size or ()))


def weight_shape(spec: OpSpec) -> tuple[int, ...]:
    """Shape of the weight, in torch's order."""
    if spec.transposed:
        return (spec.in_channels, spec.out_channels // spec.groups, *spec.kernel)
    return (spec.out_channels, spec.in_channels // spec.groups, *spec.kernel)


def input_shape(spec: OpSpec) -> tuple[int, ...]:
    """Shape of the input: ``(rows, in)`` for a linear, ``(batch, in, *spatial)`` else."""
    if spec.op == "linear":
        return (spec.rows or 1, spec.in_channels)
    return (spec.batch or 1, spec.in_channels, *(spec.spatial or ()))


#: Field -> the smallest number it may hold on each side.
_SIDES = {"kernel": 1, "stride": 1, "padding": 0, "dilation": 1, "output_padding": 0}


def nonsense(spec: OpSpec) -> tuple[str, str] | None:
    """The field of a measured op that makes no sense, and why; None when all do."""
    if spec.op not in ROUTED_KINDS:
        return "op", f"{spec.op!r} is no op; use one of {', '.join(ROUTED_KINDS)}"
    for field in ("in_channels", "out_channels", "groups"):
        if getattr(spec, field) < 1:
            return field, f"{getattr(spec, field)} is too small: at least 1"
    for field in ("in_channels", "out_channels"):
        if getattr(spec, field) % spec.groups:
            return field, f"{getattr(spec, field)} channels do not divide into {spec.groups} groups"
    return _nonsense_table(spec) or _nonsense_groups(spec) or _nonsense_sizes(spec)


def _nonsense_table(spec: OpSpec) -> tuple[str, str] | None:
    """The same of what embedding tables alone have."""
    if spec.op != "embedding_bag":
        return ("each", f"a {spec.op} has none") if spec.each else None
    if spec.bits is not None and spec.bits not in TABLE_BITS:
        return "bits", f"{spec.bits} is none of {', '.join(map(str, TABLE_BITS))}"
    if spec.bits is not None and spec.out_channels * spec.bits % 8:
        return "bits", f"{spec.out_channels} codes of {spec.bits} bits do not fill bytes"
    if spec.each is not None and spec.each < 1:
        return "each", f"{spec.each} is too small: at least 1"
    return None


def _nonsense_groups(spec: OpSpec) -> tuple[str, str] | None:
    """The same of weights that have scales for groups of input features."""
    if spec.op == "embedding_bag" or spec.bits is None:
        return ("weight_group", f"a {spec.op} without bits has none") if spec.weight_group else None
    if spec.op != "linear" or not spec.dynamic:
        return "bits", "only linears on float tensors have weights with scales for groups"
    if spec.bits not in WEIGHT_BITS:
        return "bits", f"{spec.bits} is none of {', '.join(map(str, WEIGHT_BITS))}"
    if not spec.weight_group or spec.weight_group % GROUP_STEP:
        return "weight_group", f"{spec.weight_group} is no multiple of {GROUP_STEP}"
    if spec.in_channels % spec.weight_group:
        return "weight_group", f"{spec.weight_group} does not divide {spec.in_channels} features"
    return None


def _nonsense_sizes(spec: OpSpec) -> tuple[str, str] | None:
    for field, least in (*_SIDES.items(), ("spatial", 1)):
        sides = getattr(spec, field) or ()
        if len(sides) != spec.dims:
            return field, f"a {spec.op} needs {spec.dims} numbers, not {len(sides)}"
        if any(side < least for side in sides):
            return field, f"{sides} is too small: at least {least}"
    for field in ("batch", "rows", "threads"):
        value = getattr(spec, field)
        if value is not None and value < 1:
            return field, f"{value} is too small: at least 1"
    size = spec.output_size or ()
    if any(n < 1 for n in size):
        return "spatial", f"an input of {spec.spatial} leaves no output: {size}"
    return None


def bytes_touched(spec: OpSpec) -> int:
    """What one call of an op reads and writes."""
    if spec.op == "embedding_bag":
        bags = spec.rows or 1
        row = spec.out_channels * (spec.bits or 8) // 8
        return bags * ((spec.each or 1) * row + 4 * spec.out_channels)
    weight = math.prod(weight_shape(spec)) * (spec.bits or 8) // 8
    return math.prod(input_shape(spec)) + weight + math.prod(result_shape(spec))


def result_shape(spec: OpSpec) -> tuple[int, ...]:
    """Shape of the result of an op whose size is known."""
    first, *_ = input_shape(spec)
    return (first, spec.out_channels, *(spec.output_size or ()))
