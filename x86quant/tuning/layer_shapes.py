"""What follows from the shape of an op: output size, rows, work, and whether it makes sense."""

from __future__ import annotations

import math

from x86quant.spec import OP_KINDS, OpSpec


def output_size(spec: OpSpec) -> tuple[int, ...]:
    """Spatial size of the output of an op whose ``spatial`` is known; empty for a linear."""
    sides = zip(
        spec.spatial or (), spec.kernel, spec.stride, spec.padding, spec.dilation, strict=True
    )
    if spec.transposed:
        more = spec.output_padding or (0,) * spec.dims
        return tuple(
            (n - 1) * s - 2 * p + d * (k - 1) + 1 + extra
            for (n, k, s, p, d), extra in zip(sides, more, strict=True)
        )
    return tuple((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in sides)


def with_rows(spec: OpSpec) -> OpSpec:
    """``spec`` with the ``rows`` that follow from its batch and spatial size."""
    return spec.replace(rows=(spec.batch or 1) * math.prod(output_size(spec)))


def multiply_adds(spec: OpSpec) -> int:
    """Products of an op whose ``rows`` are known.

    A transposed convolution multiplies each input, not each output, with every tap.
    """
    rows = spec.rows or 1
    if spec.transposed:
        rows = (spec.batch or 1) * math.prod(spec.spatial or ())
    return rows * spec.out_channels * (spec.in_channels // spec.groups) * math.prod(spec.kernel)


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
    if spec.op not in OP_KINDS:
        return "op", f"{spec.op!r} is no op; use one of {', '.join(OP_KINDS)}"
    for field in ("in_channels", "out_channels", "groups"):
        if getattr(spec, field) < 1:
            return field, f"{getattr(spec, field)} is too small: at least 1"
    for field in ("in_channels", "out_channels"):
        if getattr(spec, field) % spec.groups:
            return field, f"{getattr(spec, field)} channels do not divide into {spec.groups} groups"
    return _nonsense_sizes(spec)


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
    if any(n < 1 for n in output_size(spec)):
        return "spatial", f"an input of {spec.spatial} leaves no output: {output_size(spec)}"
    return None
