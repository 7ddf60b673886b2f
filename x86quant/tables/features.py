"""What a rule may test, in one table: name, type, how it is read off an op and a CPU.

A feature that is unknown (``None``) matches no condition. Adding a feature is adding a row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

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


def _field(name: str, type: Literal["int", "bool", "text"], doc: str, **more: Any) -> Feature:
    """What the op itself says under that name."""
    return Feature(name, type, lambda spec, _: getattr(spec, name), doc, **more)


def _conv_size(name: str, get: Callable[[OpSpec], int | None], doc: str, **more: Any) -> Feature:
    """A size of convolutions, at least 1 unless something else is said."""
    return Feature(name, "int", lambda spec, _: get(spec), doc, **{"minimum": 1, **more}, of="conv")


def _conv_flag(name: str, get: Callable[[OpSpec], bool | None], doc: str) -> Feature:
    """What is true or false of a convolution."""
    return Feature(name, "bool", lambda spec, _: get(spec), doc, of="conv")


def _level(name: str, doc: str) -> Feature:
    """Whether the CPU has an instruction set."""
    return Feature(name, "bool", lambda _, cpu: name in cpu.features, doc, of="cpu")


_FEATURES = (
    _field("in_channels", "int", "input channels", minimum=1),
    _field("out_channels", "int", "output channels", minimum=1),
    _field("groups", "int", "groups; 1 for a linear", minimum=1),
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
    _conv_flag("depthwise", lambda s: s.depthwise, "one input channel a group"),
    _conv_size(
        "depth_multiplier",
        lambda s: s.out_channels // s.groups if s.depthwise else None,
        "outputs of one input channel, where depthwise",
    ),
    _conv_size("kernel_min", lambda s: min(s.kernel, default=None), "shortest side of the kernel"),
    _conv_size("kernel_max", lambda s: max(s.kernel, default=None), "longest side of the kernel"),
    _conv_size(
        "kernel_width", lambda s: s.kernel[-1] if s.kernel else None, "last side of the kernel"
    ),
    _conv_flag(
        "equal_sides",
        lambda s: len(set(s.kernel)) == 1 if s.kernel else None,
        "all sides of the kernel are equal",
    ),
    _conv_size("stride_max", lambda s: max(s.stride, default=None), "largest stride"),
    _conv_size("padding_max", lambda s: max(s.padding, default=None), "largest padding", minimum=0),
    _conv_flag(
        "padding_past_kernel",
        _padding_past_kernel,
        "the padding is at least as long as the kernel on some side",
    ),
    _conv_size("dilation_max", lambda s: max(s.dilation, default=None), "largest dilation"),
    _conv_size(
        "output_padding_max",
        lambda s: max(s.output_padding, default=0) if s.kernel else None,
        "largest output padding",
        minimum=0,
    ),
    _conv_flag(
        "same_padding", _same_padding, "padding is dilation * (kernel - 1) / 2 on every side"
    ),
    _conv_flag(
        "transposed", lambda s: s.transposed if s.kernel else None, "a transposed convolution"
    ),
    _field("per_channel", "bool", "one weight scale a channel"),
    Feature(
        "symmetric",
        "bool",
        lambda s, _: None if s.weights is None else s.weights.symmetric,
        "every weight zero point is 0",
    ),
    _conv_size(
        "out_width",
        lambda s: s.output_size[-1] if s.output_size else None,
        "last side of the output",
        run_time=True,
    ),
    _field("dynamic", "bool", "activations are quantized at run time", run_time=True),
    _field("post_op", "text", "what is fused behind the op", run_time=True),
    _field("batch", "int", "samples in the batch", run_time=True),
    _field("rows", "int", "rows of the matrix product", per_row=True, run_time=True),
    _field(
        "multiply_adds",
        "int",
        "products of the op: rows * out_channels * in_per_group * kernel volume",
        per_row=True,
        run_time=True,
    ),
    _field("threads", "int", "threads the op runs on", minimum=1, run_time=True),
    _field(
        "caller",
        "text",
        '"stock", the operators on quantized tensors, or "graph", a compiled model',
        values=("stock", "graph"),
    ),
    _field("activation_max", "int", "largest activation code: 255, or 127 with 7 bits"),
    _field(
        "bits",
        "int",
        "bits of a code in an embedding table",
        of="table",
        minimum=1,
    ),
    Feature(
        "weight_bits",
        "int",
        lambda spec, _: None if spec.op == "embedding_bag" else spec.bits or 8,
        "bits of a code of the weight",
        minimum=1,
    ),
    _field("weight_group", "int", "input features that share a weight scale", minimum=1),
    _field(
        "pooling",
        "text",
        "how a bag of embeddings becomes one row",
        of="table",
        values=("sum", "mean", "max"),
    ),
    Feature("vnni", "bool", lambda _, c: c.vnni, "AVX512-VNNI or AVX-VNNI", of="cpu"),
    _level("avx_vnni", "AVX-VNNI (256 bits)"),
    _level("avx512", "AVX-512"),
    _level("avx512_vnni", "AVX512-VNNI"),
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
