"""Lookups as they are measured: one embedding table, and bags of indices drawn at random.

Kernels differ for sums alone: the stock operators have nothing else. A state of the caches is one
of the rows that a call reads, so calls in turn read other rows of the same table.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from x86quant import extension
from x86quant.dynamic.embedding_bag import WeightOnlyEmbeddingBag, quantize_rows_of_table
from x86quant.packing.embedding_tables import pack_embedding
from x86quant.routing.in_force import override
from x86quant.spec import OpSpec

#: Of the stock operators' quantized tensors, by the bits of a code.
_DTYPES = {8: torch.quint8, 4: torch.quint4x2}
_STOCK_OPERATORS = {8: "byte", 4: "4bit"}
# Bags at the beginning, in the middle and at the end whose sums are compared.
_COMPARED = 64
# Sums of float products in another order differ by this share of the largest one at most.
_TOLERANCE = 1e-3


@dataclasses.dataclass(frozen=True)
class LookupOperands:
    """A table, and where the first call's indices come from.

    Attributes:
        spec: the lookup.
        codes: uint8 [rows of the table, values of one].
    """

    spec: OpSpec
    codes: Tensor

    @property
    def bits(self) -> int:
        """Of a code."""
        assert self.spec.bits is not None
        return self.spec.bits

    @functools.cached_property
    def weight(self) -> Tensor:
        """The float table that quantizes to these codes."""
        return (self.codes.float() - self._zero) * self._scale

    @property
    def _zero(self) -> int:
        return 1 << (self.bits - 1)

    @property
    def _scale(self) -> float:
        return 1 / self._zero  # a power of two: float16 holds it

    def quantized_weight(self) -> Tensor:
        """The table as the stock prepack takes it."""
        rows = len(self.codes)
        scales, zeros = (
            torch.full((rows,), self._scale, dtype=torch.float32),
            torch.full((rows,), float(self._zero), dtype=torch.float32),
        )
        made: Tensor = torch.quantize_per_channel(self.weight, scales, zeros, 0, _DTYPES[self.bits])
        return made

    def call(self, number: int) -> tuple[Tensor, Tensor]:
        """Indices and offsets of one call; the same each time."""
        bags, each = self.spec.rows or 1, self.spec.each or 1
        generator = torch.Generator().manual_seed(number)
        indices = torch.randint(0, self.spec.in_channels, (bags * each,), generator=generator)
        return indices, torch.arange(0, bags * each, each)

    def difference(self, y: Tensor) -> str | None:
        """How the result of the first call differs from sums in float64; None when it is right."""
        bags, each = self.spec.rows or 1, self.spec.each or 1
        if tuple(y.shape) != (bags, self.spec.out_channels):
            return f"the result has shape {tuple(y.shape)}"
        compared = torch.linspace(0, bags - 1, min(bags, _COMPARED), dtype=torch.float32).long()
        indices = self.call(0)[0].view(bags, each)[compared]
        want = self.weight[indices].double().sum(1)
        worst = float((y[compared] - want).abs().max() / want.abs().max().clamp(min=1e-6))
        return None if worst <= _TOLERANCE else f"off by {worst:.2%} of the largest result"


def make_lookup(spec: OpSpec, weights: tuple[int, int] = (0, 0)) -> LookupOperands:
    """A table for ``spec``, the same each time; codes have no ``weights`` to be narrow."""
    generator = torch.Generator().manual_seed(0)
    top = 2 ** (spec.bits or 8)
    shape = (spec.in_channels, spec.out_channels)
    codes = torch.randint(0, top, shape, generator=generator, dtype=torch.uint8)
    codes[:, 0], codes[:, -1] = 0, top - 1  # so that quantizing the rows finds them again
    return LookupOperands(spec, codes)


class _LookupRunner:
    """What the runners share: calls of ``run`` on indices."""

    def __init__(self, operands: LookupOperands, run: Callable[[Tensor, Tensor], Tensor]) -> None:
        self._operands, self._run = operands, run
        self._calls = [operands.call(0)]

    def result(self) -> Tensor:
        """See ``Runner``."""
        return self._run(*self._calls[0])

    def spread(self, copies: int) -> None:
        """See ``Runner``: other indices, of the same table."""
        self._calls += map(self._operands.call, range(len(self._calls), copies))

    def seconds(self, calls: int, *, rotated: bool) -> float:
        """See ``Runner``."""
        found = self._calls if rotated else self._calls[:1]
        order = list(itertools.islice(itertools.cycle(found), calls))
        run = self._run
        start = perf_counter()
        for indices, offsets in order:
            run(indices, offsets)
        return (perf_counter() - start) / calls


class StockLookupRunner(_LookupRunner):
    """A stock operator on a packed table routed to one kernel."""

    def __init__(self, operands: LookupOperands, kernel: str) -> None:
        extension.need_stock()
        with override(kernel, op="embedding_bag"):
            pack = pack_embedding(operands.quantized_weight())
        name = f"embedding_bag_{_STOCK_OPERATORS[operands.bits]}"
        op: Any = getattr(torch.ops.quantized, name)
        super().__init__(operands, lambda indices, offsets: op(pack, indices, offsets))


class GraphLookupRunner(_LookupRunner):
    """The module of quantized models, with one kernel."""

    def __init__(self, operands: LookupOperands, kernel: str) -> None:
        rows = quantize_rows_of_table(operands.weight, operands.bits)
        module = WeightOnlyEmbeddingBag(rows, "sum", bits=operands.bits)
        with override(kernel, op="embedding_bag"):
            assert {choice.kernel for choice in module.routes.choices} == {kernel}
        super().__init__(operands, module)
