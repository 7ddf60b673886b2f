"""Was a table measured on a CPU like this one? Where it was not, its choices may be slow."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Literal

from x86quant.tables.table import RuleTable

if TYPE_CHECKING:
    from x86quant.hardware.cpu import Cpu

#: What makes CPUs alike, in this order: the names are those of a table's provenance.
_IDENTITY = ("vendor", "family", "model")
#: How near a table may be to a CPU, the nearest first.
DEGREES = ("same", "family", "other", "unknown")


@dataclasses.dataclass(frozen=True)
class Likeness:
    """How near the CPU that a table was measured on is to another.

    Attributes:
        degree: "same": vendor, family, model and ISA level are the same; "family": all but the
            model; "other"; or "unknown", for a table that does not say, such as one by hand.
        measured: the CPU that it was measured on, in words.
    """

    degree: Literal["same", "family", "other", "unknown"]
    measured: str = ""

    def __str__(self) -> str:
        if self.degree == "unknown":
            return "not fitted to measurements, or it does not say on which CPU"
        found = f"measured on {self.measured}"
        if self.degree == "same":
            return f"{found}, a CPU like this one"
        what = "another model than this CPU" if self.degree == "family" else "not a CPU like this"
        return f"{found}, {what}: `x86quant tune --quick` corrects it in a minute"


def likeness(table: RuleTable, cpu: Cpu) -> Likeness:
    """How near the CPU that ``table`` was measured on is to ``cpu``."""
    said = {name: str(table.provenance.get(name, "")) for name in (*_IDENTITY, "isa")}
    if not all(said.values()):
        return Likeness("unknown")
    words = f"{said['vendor']} family {said['family']} model {said['model']} at {said['isa']}"
    here = {"vendor": cpu.vendor, "family": str(cpu.family), "model": str(cpu.model)}
    if said["isa"] != cpu.isa or any(said[name] != here[name] for name in ("vendor", "family")):
        return Likeness("other", words)
    return Likeness("same" if said["model"] == here["model"] else "family", words)
