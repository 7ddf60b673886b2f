"""What every choice is made from, gathered once: the CPU, the rules in force, errata."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping

import torch

from x86quant.hardware.cpu import Cpu, cpu
from x86quant.kernels import Kernel
from x86quant.routing.in_force import current_overrides, current_rules
from x86quant.routing.router import Choice, Override, choose, choose_by_rows, refusals
from x86quant.spec import OpSpec
from x86quant.tables.errata import Erratum, read_errata
from x86quant.tables.table import RuleTable

#: The choice for each range of rows: its upper bound (None: no bound) and the choice.
RowRanges = tuple[tuple[int | None, Choice], ...]

#: How an unbounded range is told to C++.
NO_ROW_LIMIT = -1


@dataclasses.dataclass(frozen=True)
class Routing:
    """Everything that a choice depends on but the op itself.

    Attributes:
        cpu: what it runs on.
        table: the rules in force.
        kernels: the kernels to choose among, by name.
        overrides: the user's, first one that matches wins.
        errata: kernels to deny.
    """

    cpu: Cpu
    table: RuleTable
    kernels: Mapping[str, Kernel]
    overrides: tuple[Override, ...] = ()
    errata: tuple[Erratum, ...] = ()

    @classmethod
    def in_force(cls, kernels: Mapping[str, Kernel]) -> Routing:
        """As it is now, on this machine, among ``kernels``."""
        return cls(cpu(), current_rules(cpu()), kernels, current_overrides(), _errata())

    def choose(self, spec: OpSpec) -> Choice:
        """The kernel for ``spec``; see :func:`x86quant.routing.router.choose`."""
        return choose(
            spec,
            cpu=self.cpu,
            table=self.table,
            kernels=self.kernels,
            overrides=self.overrides,
            errata=self.errata,
        )

    def choose_by_rows(self, spec: OpSpec) -> RowRanges:
        """The kernels for every number of rows, for weights packed before rows are known."""
        return choose_by_rows(
            spec,
            cpu=self.cpu,
            table=self.table,
            kernels=self.kernels,
            overrides=self.overrides,
            errata=self.errata,
        )

    def refusals(self, spec: OpSpec) -> dict[str, tuple[str, ...]]:
        """The kernels that cannot, or must not, run ``spec``, with all reasons."""
        return refusals(spec, self.cpu, self.kernels, self.errata)


@functools.cache
def _errata() -> tuple[Erratum, ...]:
    return read_errata(torch.__version__)


def row_limits(ranges: RowRanges) -> list[int]:
    """The upper bounds of ``ranges`` as C++ takes them."""
    return [NO_ROW_LIMIT if rows is None else rows for rows, _ in ranges]


def kernel_names_of(ranges: RowRanges) -> list[str]:
    """The kernel of each range."""
    return [choice.kernel for _, choice in ranges]


def ranges_record(ranges: RowRanges) -> str:
    """The choices as the JSON that a pack keeps and ``explain`` reads."""
    return json.dumps([[rows, choice.to_json()] for rows, choice in ranges])
