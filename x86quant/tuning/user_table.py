"""From measurements to the user's own rule table, in the cache folder.

The layers of a model become entries: exact shapes, above all rules. The layers of many networks
become rules, by the fit. One table an ISA level holds both; tuning again replaces the half it is
about and leaves the other.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from x86quant.errors import RuleError
from x86quant.hardware.cpu import Cpu
from x86quant.routing.in_force import shipped_table
from x86quant.spec import OpSpec
from x86quant.tables.conditions import Pattern, parse_pattern
from x86quant.tables.features import FEATURES
from x86quant.tables.table import Entry, RuleTable, shape_in_table
from x86quant.tables.table_reader import read_table
from x86quant.tables.user import install_user_table, user_folder, user_table_path
from x86quant.tuning.fit import denials_of, fit
from x86quant.tuning.journal import writing_failed
from x86quant.tuning.measurements import Case, Measurement, MeasurementSet, usual
from x86quant.version import __version__


def user_measurements_path() -> Path:
    """The user's measurements: a file for each pair of versions, whose times compare."""
    name = f"x86quant-{__version__}-torch-{torch.__version__}.csv"
    return user_folder() / "measurements" / name


def fitted(measured: MeasurementSet, cpu: Cpu) -> RuleTable:
    """The table that the fit makes of all measurements at the level of ``cpu``; entries stay."""
    return keeping_entries(rules_of(measured, cpu), cpu)


def rules_of(measured: MeasurementSet, cpu: Cpu) -> RuleTable:
    """What ``fitted`` makes where there was no table before: rules alone, for CPUs like ``cpu``."""
    table = fit(
        measured.where(lambda case: case.isa == cpu.isa),
        name=user_table_path(cpu.isa).stem,
        base=shipped_table(cpu),
    ).table
    return dataclasses.replace(table, hardware=_hardware(cpu))


def keeping_entries(table: RuleTable, cpu: Cpu) -> RuleTable:
    """``table`` with the entries of the user's table that it is to replace."""
    installed = installed_table(cpu)
    kept = installed.entries if installed and installed.fits(cpu) else ()
    return dataclasses.replace(table, entries=kept)


def with_entries(
    measured: Iterable[Measurement], cpu: Cpu, table: RuleTable | None = None
) -> RuleTable:
    """``table`` with these shapes as entries; by default the user's, or a new one."""
    here = [m for m in measured if m.case.isa == cpu.isa]
    new = entries(here)
    table = table or users_table(cpu)
    kept = tuple(e for e in table.entries if e.spec not in {entry.spec for entry in new})
    # What was measured now replaces what was said of the same kernel on the same shape.
    wrong = denials_of(m for m in here if m.status == "wrong")
    denials = {(d.spec, d.kernel): d for d in (*table.denials, *wrong)}
    return dataclasses.replace(table, entries=new + kept, denials=tuple(denials.values()))


def install(table: RuleTable, cpu: Cpu) -> Path:
    """Put ``table`` where it is found, whole or not at all."""
    try:
        return install_user_table(table, cpu.isa)
    except OSError as error:
        raise writing_failed(user_table_path(cpu.isa), error) from error


def installed_table(cpu: Cpu) -> RuleTable | None:
    """The user's table as it is; None where there is none, or a broken one to be replaced."""
    try:
        return read_table(user_table_path(cpu.isa))
    except RuleError:
        return None


def users_table(cpu: Cpu) -> RuleTable:
    """The user's table, or a new one with nothing in it that extends the shipped one."""
    installed = installed_table(cpu)
    # A folder that machines share may hold the table of another kind of CPU.
    return installed if installed and installed.fits(cpu) else empty_table(cpu)


def empty_table(cpu: Cpu) -> RuleTable:
    """A table with nothing in it, for CPUs like ``cpu``, that extends the shipped one."""
    name = user_table_path(cpu.isa).stem
    return RuleTable(
        name,
        rules=(),
        description="Shapes measured on this machine.",
        provenance={
            "cpu": cpu.name,
            "vendor": cpu.vendor,
            "family": str(cpu.family),
            "model": str(cpu.model),
            "isa": cpu.isa,
            "torch": torch.__version__,
            "x86quant": __version__,
        },
        hardware=_hardware(cpu),
        base=shipped_table(cpu),
    )


def _hardware(cpu: Cpu) -> Pattern:
    """The class of CPU: never a single machine."""
    any_op = OpSpec("linear", 1, 1)
    names = ("vendor", "family", "model", "isa")
    return Pattern(*parse_pattern("*", {n: FEATURES[n].get(any_op, cpu) for n in names}))


# ---------------------------------------------------------------------------- entries


def entries(measured: Sequence[Measurement]) -> tuple[Entry, ...]:
    """An entry for every shape, kernels best first; those of compiled models before the others.

    Stock weights are packed before rows, batch and the like are known. So a stock entry speaks for
    its shape whatever these are, unless the best kernel differs between the rows measured.
    """
    graph: dict[OpSpec, list[Measurement]] = {}
    stock: dict[OpSpec, list[Measurement]] = {}
    for m in measured:
        shape = shape_in_table(m.case.spec)
        if m.case.caller == "graph":
            # What takes float tensors or indices is packed before its threads are known.
            known = {"threads": None, "each": None} if shape.dynamic else {}
            graph.setdefault(shape.replace(caller="graph", **known), []).append(m)
        else:
            stock.setdefault(_as_packed(shape), []).append(m)
    found = [_entry(spec, of_spec) for spec, of_spec in graph.items()]
    for spec, of_spec in stock.items():
        found += _by_rows(spec, of_spec)
    return tuple(entry for entry in found if entry is not None)


def _as_packed(spec: OpSpec) -> OpSpec:
    """What is known of ``spec`` when weights are packed."""
    unknown = ("post_op", "batch", "rows", "spatial", "threads", "each")
    dynamic = spec.dynamic if spec.op == "embedding_bag" else None
    return spec.replace(**dict.fromkeys(unknown), dynamic=dynamic, caller="stock")


def _by_rows(spec: OpSpec, measured: Sequence[Measurement]) -> list[Entry | None]:
    rows = sorted({m.case.spec.rows or 0 for m in measured})
    each = [
        _entry(spec.replace(rows=n), [m for m in measured if m.case.spec.rows == n]) for n in rows
    ]
    if len({entry.use[0] for entry in each if entry is not None}) == 1:
        return [_entry(spec, measured)]
    return list(each)


def _entry(spec: OpSpec, measured: Sequence[Measurement]) -> Entry | None:
    """The kernels that ran every one of these cases, by the mean of their logarithmic times."""
    cases = {m.case for m in measured}
    logs: dict[str, dict[Case, float]] = {}
    for m in usual(measured):
        if m.median_us is not None:
            logs.setdefault(m.kernel_name, {})[m.case] = math.log(m.median_us)
    means = {
        name: sum(times.values()) / len(times)
        for name, times in logs.items()
        if times.keys() == cases
    }
    if not means:
        return None
    ranked = sorted(means, key=lambda name: (means[name], name))
    return Entry(spec, tuple(ranked), _because(ranked, means))


def _because(ranked: Sequence[str], means: dict[str, Any]) -> str:
    best, *others = ranked
    text = f"measured: {math.exp(means[best]):.1f} µs"
    if others:
        text += f", {others[0]} {math.exp(means[others[0]]):.1f}"
    return text
