"""Sizes of an op's input, and within which of them the choice of its kernel stays the same."""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from x86quant.spec import OpSpec
from x86quant.tables.features import Feature

if TYPE_CHECKING:
    from x86quant.hardware.cpu import Cpu


class Sizes(NamedTuple):
    """What an input's size makes of an op: the fields of ``OpSpec`` of these names."""

    batch: int | None
    rows: int
    spatial: tuple[int, ...] | None

    @classmethod
    def of_linear(cls, output: Sequence[int]) -> Sizes:
        """Those of a linear with this output."""
        return cls(None, math.prod(output[:-1]), None)

    @classmethod
    def of_conv(cls, x: Sequence[int], output: Sequence[int]) -> Sizes:
        """Those of a convolution from ``x`` to this output."""
        return cls(output[0], output[0] * math.prod(output[2:]), tuple(x[2:]))

    def of(self, spec: OpSpec) -> OpSpec:
        """``spec`` with these sizes."""
        return spec.replace(batch=self.batch, rows=self.rows, spatial=self.spatial)


@dataclasses.dataclass(frozen=True)
class SizeRanges:
    """How the answer for an op depends on its batch, rows and spatial size.

    Attributes:
        row_breaks: the rows from which on the answer may be another, ascending.
        features: what rules and errata test besides that follows from the sizes.
        exact: every size may have an answer of its own.
    """

    row_breaks: tuple[int, ...]
    features: tuple[Feature, ...]
    exact: bool

    def key(self, spec: OpSpec, sizes: Sizes, cpu: Cpu) -> Hashable:
        """Equal for two sizes of ``spec`` only if their answers are equal."""
        if self.exact:
            return sizes
        place = bisect.bisect_right(self.row_breaks, sizes.rows)
        if not self.features:
            return place
        sized = sizes.of(spec)
        return (place, *(feature.get(sized, cpu) for feature in self.features))
