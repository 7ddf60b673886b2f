"""What a rule may test, in one table: name, type, how it is read off an op and a CPU.

A feature that is unknown (``None``) matches no condition. Adding a feature is adding a row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, TypeAlias

from x86quant.spec import OpSpec

if TYPE_CHECKING:
    from x86quant.hardware.cpu import Cpu

Value: TypeAlias = "int | bool | str"
Getter: TypeAlias = "Callable[[OpSpec, Cpu], Value | None]"


@dataclasses.dataclass(frozen=True, slots=True)
class Feature:
    """One thing a rule may test.

    Attributes:
        name: as written in a rule's ``when``.
        type: what its values are, and so which conditions make sense.
        get: its value for an op on a CPU; None when unknown.
        doc: one line for the reader of an error or of the docs.
        of: "op", "conv" or "table" when it belongs to the op ("conv": convolutions alone have it;
            "table": embedding tables alone), "cpu" else.
        minimum: the smallest value it can have.
        values: every text it can be; empty when that is open.
        per_row: ``value(rows) == rows * value(1)``, so that the row at which a condition on it
            flips can be computed when weights are packed.
        run_time: unknown when the weights of a stock operator are packed, known when it runs.
    """

    name: str
    type: Literal["int", "bool", "text"]
    get: Getter
    doc: str
    of: Literal["op", "conv", "table", "cpu"] = "op"
    minimum: int = 0
    values: tuple[str, ...] = ()
    per_row: bool = False
    run_time: bool = False


def _maker(cpu: Cpu) -> str:
    """The vendor in a word, for the CPUID strings that there are words for."""
    return {"GenuineIntel": "intel", "AuthenticAMD": "amd"}.get(cpu.vendor, cpu.vendor)


def _same_padding(spec: OpSpec) -> bool | None:
    if not spec.kernel:
        return None
    sides = zip(spec.kernel, spec.padding, spec.dilation, strict=True)
    return all(2 * p == d * (k - 1) for k, p, d in sides)


def _padding_past_kernel(spec: OpSpec) -> bool | None:
    if not spec.kernel:
        return None
    return any(p >= k for p, k in zip(spec.padding, spec.kernel, strict=True))


_FEATURES = (
    Feature("in_channels", "int", lambda s, _: s.in_channels, "input channels", minimum=1),
    Feature("out_channels", "int", lambda s, _: s.out_channels, "output channels", minimum=1),
    Feature("groups", "int", lambda s, _: s.groups, "groups; 1 for a linear", minimum=1),
    Feature(
        "equal_channels",
        "bool",
        lambda s, _: s.in_channels == s.out_channels,
        "as many output channels as input channels",
    ),
    Feature(
        "in_per_group",
        "int",
        lambda s, _: s.in_channels // s.groups,
        "input channels of one group",
        minimum=1,
    ),
    Feature(
        "out_per_group",
        "int",
        lambda s, _: s.out_channels // s.groups,
        "output channels of one group",
        minimum=1,
    ),
    Feature("depthwise", "bool", lambda s, _: s.depthwise, "one input channel a group", of="conv"),
    Feature(
        "depth_multiplier",
        "int",
        lambda s, _: s.out_channels // s.groups if s.depthwise else None,
        "outputs of one input channel, where depthwise",
        of="conv",
        minimum=1,
    ),
    Feature(
        "kernel_min",
        "int",
        lambda s, _: min(s.kernel, default=None),
        "shortest side of the kernel",
        of="conv",
        minimum=1,
    ),
    Feature(
        "kernel_max",
        "int",
        lambda s, _: max(s.kernel, default=None),
        "longest side of the kernel",
        of="conv",
        minimum=1,
    ),
    Feature(
        "kernel_width",
        "int",
        lambda s, _: s.kernel[-1] if s.kernel else None,
        "last side of the kernel",
        of="conv",
        minimum=1,
    ),
    Feature(
        "equal_sides",
        "bool",
        lambda s, _: len(set(s.kernel)) == 1 if s.kernel else None,
        "all sides of the kernel are equal",
        of="conv",
    ),
    Feature(
        "stride_max",
        "int",
        lambda s, _: max(s.stride, default=None),
        "largest stride",
        of="conv",
        minimum=1,
    ),
    Feature(
        "padding_max",
        "int",
        lambda s, _: max(s.padding, default=None),
        "largest padding",
        of="conv",
    ),
    Feature(
        "padding_past_kernel",
        "bool",
        lambda s, _: _padding_past_kernel(s),
        "the padding is at least as long as the kernel on some side",
        of="conv",
    ),
    Feature(
        "dilation_max",
        "int",
        lambda s, _: max(s.dilation, default=None),
        "largest dilation",
        of="conv",
        minimum=1,
    ),
    Feature(
        "output_padding_max",
        "int",
        lambda s, _: max(s.output_padding, default=0) if s.kernel else None,
        "largest output padding",
        of="conv",
    ),
    Feature(
        "same_padding",
        "bool",
        lambda s, _: _same_padding(s),
        "padding is dilation * (kernel - 1) / 2 on every side",
        of="conv",
    ),
    Feature(
        "transposed",
        "bool",
        lambda s, _: s.transposed if s.kernel else None,
        "a transposed convolution",
        of="conv",
    ),
    Feature("per_channel", "bool", lambda s, _: s.per_channel, "one weight scale a channel"),
    Feature(
        "symmetric",
        "bool",
        lambda s, _: None if s.weights is None else s.weights.symmetric,
        "every weight zero point is 0",
    ),
    Feature(
        "out_width",
        "int",
        lambda s, _: s.output_size[-1] if s.output_size else None,
        "last side of the output",
        of="conv",
        minimum=1,
        run_time=True,
    ),
    Feature(
        "dynamic",
        "bool",
        lambda s, _: s.dynamic,
        "activations are quantized at run time",
        run_time=True,
    ),
    Feature(
        "post_op", "text", lambda s, _: s.post_op, "what is fused behind the op", run_time=True
    ),
    Feature("batch", "int", lambda s, _: s.batch, "samples in the batch", run_time=True),
    Feature(
        "rows",
        "int",
        lambda s, _: s.rows,
        "rows of the matrix product",
        per_row=True,
        run_time=True,
    ),
    Feature(
        "multiply_adds",
        "int",
        lambda s, _: s.multiply_adds,
        "products of the op: rows * out_channels * in_per_group * kernel volume",
        per_row=True,
        run_time=True,
    ),
    Feature(
        "threads",
        "int",
        lambda s, _: s.threads,
        "threads the op runs on",
        minimum=1,
        run_time=True,
    ),
    Feature(
        "caller",
        "text",
        lambda s, _: s.caller,
        '"stock", the operators on quantized tensors, or "graph", a compiled model',
        values=("stock", "graph"),
    ),
    Feature(
        "activation_max",
        "int",
        lambda s, _: s.activation_max,
        "largest activation code: 255, or 127 with 7 bits",
    ),
    Feature(
        "bits",
        "int",
        lambda s, _: s.bits,
        "bits of a code in an embedding table, or in a linear's weight with scales for groups",
        of="table",
        minimum=1,
    ),
    Feature(
        "pooling",
        "text",
        lambda s, _: s.pooling,
        "how a bag of embeddings becomes one row",
        of="table",
        values=("sum", "mean", "max"),
    ),
    Feature("vnni", "bool", lambda _, c: c.vnni, "AVX512-VNNI or AVX-VNNI", of="cpu"),
    Feature(
        "avx_vnni", "bool", lambda _, c: "avx_vnni" in c.features, "AVX-VNNI (256 bits)", of="cpu"
    ),
    Feature("avx512", "bool", lambda _, c: "avx512" in c.features, "AVX-512", of="cpu"),
    Feature(
        "avx512_vnni", "bool", lambda _, c: "avx512_vnni" in c.features, "AVX512-VNNI", of="cpu"
    ),
    Feature("amx", "bool", lambda _, c: c.amx, "AMX int8 tiles", of="cpu"),
    Feature(
        "isa",
        "text",
        lambda _, c: c.isa,
        "highest instruction set level",
        of="cpu",
        values=("avx2", "avx_vnni", "avx512", "avx512_vnni", "amx_int8"),
    ),
    Feature("vendor", "text", lambda _, c: _maker(c), '"intel", "amd", …', of="cpu"),
    Feature("family", "int", lambda _, c: c.family, "CPU family", of="cpu"),
    Feature("model", "int", lambda _, c: c.model, "CPU model number", of="cpu"),
)

FEATURES: dict[str, Feature] = {feature.name: feature for feature in _FEATURES}
