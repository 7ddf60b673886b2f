"""What one quantized op looks like: the value that rules match and kernels accept or refuse.

Data flows ``OpSpec -> Choice -> packed weight``. A field that is ``None`` is unknown, and a
rule that tests an unknown feature does not match.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

OpKind = Literal["linear", "conv1d", "conv2d", "conv3d", "embedding_bag"]

#: The products, which every table has a rule for.
OP_KINDS: tuple[OpKind, ...] = ("linear", "conv1d", "conv2d", "conv3d")
#: All that rules choose kernels for, and ``x86quant tune`` measures.
ROUTED_KINDS: tuple[OpKind, ...] = (*OP_KINDS, "embedding_bag")


@dataclasses.dataclass(frozen=True, slots=True)
class WeightFacts:
    """What the saturation proof needs to know of a layer's int8 weights.

    A kernel that multiplies two neighbouring u8 x s8 products into 16 bits saturates when their
    sum leaves int16. Which weights are neighbours depends on the kernel's packed layout, so the
    extremes are kept for each layout a kernel may use. ``(lowest, highest)`` are the extreme
    sums over all pairs of ``min(w0, 0) + min(w1, 0)`` and of ``max(w0, 0) + max(w1, 0)``.

    Attributes:
        pairs: layout name -> (lowest negative sum, highest positive sum).
        symmetric: every weight zero point is 0.
    """

    pairs: tuple[tuple[str, tuple[int, int]], ...]
    symmetric: bool = True

    def pair_extremes(self, layout: str) -> tuple[int, int]:
        """The extreme neighbour sums under ``layout``."""
        return dict(self.pairs)[layout]


@dataclasses.dataclass(frozen=True, slots=True)
class OpSpec:
    """A frozen description of one quantized op.

    ``linear`` has empty spatial tuples. ``conv{n}d`` has tuples of length n. ``rows`` is the
    number of rows of the matrix product: for a linear all leading dimensions multiplied. An
    ``embedding_bag`` has the rows of its table as ``in_channels``, the values of a row as
    ``out_channels``, and its bags as ``rows``.
    """

    op: OpKind
    in_channels: int
    out_channels: int
    groups: int = 1
    kernel: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    padding: tuple[int, ...] = ()
    dilation: tuple[int, ...] = ()
    output_padding: tuple[int, ...] = ()
    transposed: bool = False
    per_channel: bool = True
    bias: bool = True
    # Unknown (None) when weights are packed, known when measured or run.
    dynamic: bool | None = None
    post_op: str | None = None
    batch: int | None = None
    rows: int | None = None
    spatial: tuple[int, ...] | None = None
    threads: int | None = None
    # What runs it: "stock", the operators on quantized tensors, or "graph", a compiled model.
    caller: str | None = None
    # Largest activation code that can occur: 255, or 127 with 7-bit activations.
    activation_max: int = 255
    weights: WeightFacts | None = None
    # The bits of a code in an embedding_bag, or in a linear's weight that has scales for groups of
    # input features; None in a linear with one scale an output.
    bits: int | None = None
    # Of such a linear: how many input features share a scale.
    weight_group: int | None = None
    # Of an embedding_bag alone: how a bag becomes one row, whether the rows are as the "stock"
    # operators make them or "other", and whether some index counts for nothing.
    pooling: str | None = None
    row_format: str | None = None
    skips: bool = False
    # Indices of each bag: known when measured, never when a kernel is chosen.
    each: int | None = None

    @property
    def dims(self) -> int:
        """Number of spatial dimensions: 0 for a linear."""
        return int(self.op[4]) if self.op.startswith("conv") else 0

    @property
    def depthwise(self) -> bool:
        """One input channel a group (with any depth multiplier)."""
        return self.groups > 1 and self.groups == self.in_channels

    @property
    def output_size(self) -> tuple[int, ...] | None:
        """Spatial size of the output, empty for a linear; None where the input's is unknown."""
        if not self.dims:
            return ()
        if self.spatial is None:
            return None
        sides = zip(
            self.spatial, self.kernel, self.stride, self.padding, self.dilation, strict=True
        )
        if self.transposed:
            more = self.output_padding or (0,) * self.dims
            return tuple(
                (n - 1) * s - 2 * p + d * (k - 1) + 1 + extra
                for (n, k, s, p, d), extra in zip(sides, more, strict=True)
            )
        return tuple((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in sides)

    @property
    def multiply_adds(self) -> int | None:
        """Products of the op; None where its size is unknown.

        A transposed convolution multiplies each input, not each output, with every tap.
        """
        if self.op == "embedding_bag":
            return None
        positions = self.rows
        if self.transposed:
            sizes = (self.batch, self.spatial)
            positions = None if None in sizes else (self.batch or 0) * math.prod(self.spatial or ())
        if positions is None:
            return None
        return (
            positions
            * self.out_channels
            * (self.in_channels // self.groups)
            * math.prod(self.kernel)
        )

    def replace(self, **changes: object) -> OpSpec:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]

    def __str__(self) -> str:
        if self.op == "embedding_bag":
            text = f"{self.op} {self.in_channels}×{self.out_channels}, {self.bits} bits"
            text += f", {self.pooling}"
            if self.each is not None:
                text += f" of {self.each}"
        elif self.op == "linear":
            text = f"linear {self.in_channels}→{self.out_channels}"
            if self.bits is not None:
                text += f" {self.bits} bits in groups"
                text += f" of {self.weight_group}" if self.weight_group else ""
        else:
            by = "×".join(map(str, self.kernel))
            name = self.op.replace("conv", "conv_transpose") if self.transposed else self.op
            text = f"{name} {self.in_channels}→{self.out_channels} k{by}"
            for label, value, usual in (
                ("s", self.stride, 1),
                ("p", self.padding, 0),
                ("d", self.dilation, 1),
                ("op", self.output_padding, 0),
            ):
                if any(v != usual for v in value):
                    text += f" {label}{'×'.join(map(str, value))}"
            if self.groups > 1:
                text += f" g{self.groups}"
        if self.rows is not None:
            text += f" rows={self.rows}"
        if self.dynamic and self.op != "embedding_bag":
            text += " dynamic"
        return text


def lookup_spec(
    rows: int,
    dim: int,
    bits: int | None,
    pooling: str,
    *,
    stock_rows: bool,
    skips: bool = False,
    caller: str | None = "graph",
) -> OpSpec:
    """A table of ``rows`` of ``dim`` values, whose bags are pooled so."""
    return OpSpec(
        "embedding_bag",
        rows,
        dim,
        bias=False,
        per_channel=False,
        dynamic=True,
        caller=caller,
        bits=bits,
        pooling=pooling,
        row_format="stock" if stock_rows else "other",
        skips=skips,
    )
