"""Measurements in files: one CSV file a run, one line a candidate.

The file begins with lines ``# key = value`` that say what was measured with (the keys of
``PROVENANCE``), then come the columns of ``COLUMNS``.

Whatever is wrong with a file is a MeasurementError naming the file, line, column and remedy.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import math
import operator
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NoReturn, get_args

from x86quant.errors import MeasurementError
from x86quant.files import write_aside
from x86quant.hardware.isa import LEVELS
from x86quant.spec import OpSpec, lookup_spec
from x86quant.tuning.layer_shapes import nonsense
from x86quant.tuning.measurements import (
    Cache,
    Caller,
    Case,
    Measurement,
    MeasurementSet,
    Status,
    order_of,
)

COLUMNS = (
    "machine",
    "isa",
    "caller",
    "threads",
    "op",
    "net",
    "count",
    "in_channels",
    "out_channels",
    "groups",
    "kernel",
    "stride",
    "padding",
    "dilation",
    "output_padding",
    "transposed",
    "dynamic",
    "post_op",
    "batch",
    "rows",
    "spatial",
    "kernel_name",
    "status",
    "median_us",
    "low_us",
    "high_us",
    "min_us",
    "rounds",
    "cache",
    "tie",
    "note",
    "bits",
    "each",
    "weight_group",
)
#: Of embedding tables and of weights with groups: files of other ops alone may lack them.
_OF_SOME_OPS = ("bits", "each", "weight_group")
#: Those that say what came of a case, rather than what it is.
_RESULTS = frozenset(
    ("kernel_name", "status", "median_us", "low_us", "high_us", "min_us", "rounds", "tie", "note")
)

#: What the head of a file must say. More is kept.
PROVENANCE = (
    "cpu",
    "vendor",
    "family",
    "model",
    "stepping",
    "microcode",
    "isa",
    "caches",
    "torch",
    "onednn",
    "fbgemm",
    "x86quant",
    "date",
)


# ---------------------------------------------------------------------------- writing


def write(path: str | os.PathLike[str], measured: MeasurementSet) -> None:
    """Write a CSV file whole or not at all; the same set gives the same bytes."""
    missing = [key for key in PROVENANCE if key not in measured.provenance]
    if missing:
        raise MeasurementError(f"{os.fspath(path)}: the provenance lacks {', '.join(missing)}")
    text = io.StringIO()
    for key, value in measured.provenance.items():
        text.write(f"# {key} = {' '.join(value.split())}\n")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for measurement in sorted(measured.measurements, key=order_of):
        writer.writerow(to_cells(measurement).values())
    write_aside(Path(path), text.getvalue())


def to_cells(measurement: Measurement) -> dict[str, str]:
    """A measurement as column -> text."""
    cells = case_to_cells(measurement.case) | _result_to_cells(measurement)
    return {column: cells[column] for column in COLUMNS}


def case_to_cells(case: Case) -> dict[str, str]:
    """The columns that say what a case is."""
    spec = case.spec
    return {
        "machine": case.machine,
        "isa": case.isa,
        "caller": case.caller,
        "threads": str(spec.threads),
        "op": spec.op,
        "net": ";".join(net for net, _ in case.nets),
        "count": ";".join(str(count) for _, count in case.nets),
        "in_channels": str(spec.in_channels),
        "out_channels": str(spec.out_channels),
        "groups": str(spec.groups),
        "kernel": _by(spec.kernel),
        "stride": _by(spec.stride),
        "padding": _by(spec.padding),
        "dilation": _by(spec.dilation),
        "output_padding": _by(spec.output_padding),
        "transposed": _yes(spec.transposed),
        "dynamic": _yes(bool(spec.dynamic)),
        "post_op": spec.post_op or "",
        "batch": "" if spec.batch is None else str(spec.batch),
        "rows": str(spec.rows),
        "bits": "" if spec.bits is None else str(spec.bits),
        "each": "" if spec.each is None else str(spec.each),
        "weight_group": "" if spec.weight_group is None else str(spec.weight_group),
        "spatial": _by(spec.spatial or ()),
        "cache": case.cache,
    }


def _result_to_cells(m: Measurement) -> dict[str, str]:
    return {
        "kernel_name": m.kernel_name,
        "status": m.status,
        "median_us": _microseconds(m.median_us),
        "low_us": _microseconds(m.low_us),
        "high_us": _microseconds(m.high_us),
        "min_us": _microseconds(m.min_us),
        "rounds": str(m.rounds),
        "tie": _yes(m.tie),
        "note": " ".join(m.note.split()),
    }


def _by(sides: tuple[int, ...]) -> str:
    return "x".join(map(str, sides))


def _yes(value: bool) -> str:
    return str(value).lower()


def _microseconds(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


# ---------------------------------------------------------------------------- reading


def read(path: str | os.PathLike[str]) -> MeasurementSet:
    """Read and check a CSV file.

    Raises:
        MeasurementError: it cannot be read, or a line of it is wrong.
    """
    where = os.fspath(path)
    lines = read_lines(path)
    provenance = _read_provenance(lines, where)
    measurements: list[Measurement] = []
    seen: dict[tuple[int, str, bool], int] = {}
    # Reading a case, and its hash, take longest, and each has many lines.
    cases: dict[tuple[str, ...], tuple[Case, int]] = {}
    numbers: dict[Case, int] = {}
    required = tuple(column for column in COLUMNS if column not in _OF_SOME_OPS)
    cells_of_case = operator.itemgetter(*(c for c in COLUMNS if c not in _RESULTS))
    for row in rows(lines, where, required, optional=_OF_SOME_OPS):
        cells = cells_of_case(row.cells)
        if cells not in cases:
            case = case_from_cells(row)
            cases[cells] = case, numbers.setdefault(case, len(numbers))
        case, number = cases[cells]
        measurement = from_cells(row, case)
        key = (number, measurement.kernel_name, measurement.narrow_weights)
        if key in seen:
            row.fail(
                "kernel_name",
                f"{measurement.kernel_name} was measured on this case in line {seen[key]} already; "
                "delete one of the two lines",
            )
        seen[key] = row.line
        measurements.append(measurement)
    return MeasurementSet(tuple(measurements), provenance, where)


def read_lines(path: str | os.PathLike[str]) -> list[str]:
    """The lines of a text file; MeasurementError when it cannot be read."""
    try:
        # Not universal newlines: a quoted cell may hold one of the odd ones that splitlines() cuts.
        return Path(path).read_text(encoding="utf-8-sig").split("\n")
    except OSError as error:
        raise MeasurementError(f"{os.fspath(path)}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise MeasurementError(
            f"{os.fspath(path)}: not UTF-8 text ({error.reason} at byte {error.start}); "
            "save it as UTF-8 CSV"
        ) from None


def _read_provenance(lines: list[str], where: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        if not line.startswith("#"):
            break
        key, equals, value = line.removeprefix("#").partition("=")
        if not equals or not key.strip():
            raise MeasurementError(f"{where}:{number}: write '# key = value', not {line.strip()!r}")
        found[key.strip()] = value.strip()
    missing = [key for key in PROVENANCE if key not in found]
    if missing:
        raise MeasurementError(
            f"{where}:1: no {', '.join(missing)} among the '# key = value' lines at the head; "
            "say what was measured with, 'unknown' if need be"
        )
    return found


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of a CSV file, and how to complain about it."""

    where: str
    line: int
    cells: Mapping[str, str]

    def fail(self, column: str, message: str) -> NoReturn:
        """Raise MeasurementError with the place in front of ``message``."""
        raise MeasurementError(f"{self.where}:{self.line}: column {column}: {message}") from None

    def text(self, column: str, legal: Iterable[str] = ()) -> str:
        """The cell; one of ``legal`` if any are given."""
        value, legal = self.cells[column].strip(), tuple(legal)
        if legal and value not in legal:
            self.fail(column, f"{value!r} is not one of {', '.join(map(repr, legal))}")
        return value

    def integer(self, column: str, default: int | None = None) -> int:
        """A whole number; an empty cell is ``default`` where there is one."""
        value = self.cells[column].strip()
        if not value and default is not None:
            return default
        # Digits only: int() would take "1_0" and " ٣".
        if not (value.isascii() and value.isdigit() and len(value) <= 12):
            self.fail(column, f"{value!r} is no whole number")
        return int(value)

    def sides(self, column: str) -> tuple[int, ...]:
        """Numbers joined by "x"; none for an empty cell."""
        value = self.cells[column].strip()
        parts = value.split("x") if value else []
        if not all(part.isascii() and part.isdigit() and len(part) <= 12 for part in parts):
            self.fail(column, f"{value!r} is not like 3x3")
        return tuple(map(int, parts))

    def flag(self, column: str) -> bool:
        """``true`` or ``false``."""
        return self.text(column, ("true", "false")) == "true"

    def number(self, column: str) -> float | None:
        """A positive number; None for an empty cell."""
        value = self.cells[column].strip()
        if not value:
            return None
        try:
            number = float(value)
        except ValueError:
            self.fail(column, f"{value!r} is no number")
        if not (math.isfinite(number) and number > 0):
            self.fail(column, f"{value} is no positive number")
        return number


def rows(
    lines: list[str], where: str, columns: tuple[str, ...], optional: tuple[str, ...] = ()
) -> Iterator[Row]:
    """The lines below the header, whose ``columns`` must be these, in any order.

    Columns that are ``optional`` and not there read as empty cells.
    """
    head = next((n for n, line in enumerate(lines) if not line.startswith("#")), len(lines))
    reader = csv.reader([f"{line}\n" for line in lines[head:]], strict=True)
    header: list[str] | None = None
    empty = dict.fromkeys(optional, "")
    try:
        for cells in reader:
            line = head + reader.line_num
            if not any(cells):
                continue
            if header is None:
                header = _checked_header(cells, where, line, columns, optional)
                continue
            if len(cells) != len(header):
                raise MeasurementError(
                    f"{where}:{line}: {len(cells)} cells where the header has {len(header)}; "
                    "the line is cut short or holds a stray comma"
                )
            yield Row(where, line, empty | dict(zip(header, cells, strict=True)))
    except csv.Error as error:
        line = head + reader.line_num
        raise MeasurementError(
            f"{where}:{line}: not valid CSV: {error}; close the quote or save the file again"
        ) from None
    if header is None:
        raise MeasurementError(f"{where}: empty; its header must be {','.join(columns)}")


def _checked_header(
    cells: list[str],
    where: str,
    line: int,
    columns: tuple[str, ...],
    optional: tuple[str, ...],
) -> list[str]:
    names = [cell.strip() for cell in cells]
    legal = ",".join((*columns, *optional))
    for name in columns:
        if name not in names:
            raise MeasurementError(f"{where}:{line}: no column {name!r}; the columns are {legal}")
    for name in names:
        if name not in columns and name not in optional:
            raise MeasurementError(
                f"{where}:{line}: unknown column {name!r}; the columns are {legal}"
            )
        if names.count(name) > 1:
            raise MeasurementError(
                f"{where}:{line}: more than one column {name!r}; the columns are {legal}"
            )
    return names


def from_cells(row: Row, case: Case | None = None) -> Measurement:
    """The measurement that ``to_cells`` gave; MeasurementError if something is wrong with it.

    ``case`` is what it is of, if that was read already.
    """
    measurement = Measurement(
        case or case_from_cells(row),
        row.text("kernel_name") or row.fail("kernel_name", "empty; name the kernel"),
        row.text("status", get_args(Status)),  # type: ignore[arg-type]
        median_us=row.number("median_us"),
        low_us=row.number("low_us"),
        high_us=row.number("high_us"),
        min_us=row.number("min_us"),
        rounds=row.integer("rounds"),
        tie=row.flag("tie"),
        note=row.text("note"),
    )
    _check_results(row, measurement)
    return measurement


def case_from_cells(row: Row) -> Case:
    """The case that ``case_to_cells`` gave."""
    return Case(
        row.text("machine") or row.fail("machine", "empty; write vendor-family-model"),
        row.text("isa", LEVELS),
        row.text("caller", get_args(Caller)),  # type: ignore[arg-type]
        _read_spec(row),
        row.text("cache", get_args(Cache)),  # type: ignore[arg-type]
        _read_nets(row),
    )


def _read_spec(row: Row) -> OpSpec:
    spec = _lookup_of(row) if row.text("op") == "embedding_bag" else _product_of(row)
    if problem := nonsense(spec):
        row.fail(*problem)
    return spec


def _lookup_of(row: Row) -> OpSpec:
    table = row.integer("in_channels"), row.integer("out_channels"), row.integer("bits")
    return lookup_spec(*table, "sum", stock_rows=True, caller=None).replace(
        each=row.integer("each"), rows=row.integer("rows"), threads=row.integer("threads")
    )


def _product_of(row: Row) -> OpSpec:
    transposed = row.flag("transposed")
    batch = row.integer("batch", default=0)
    linear = row.text("op") == "linear"
    return OpSpec(
        op=row.text("op"),  # type: ignore[arg-type]
        in_channels=row.integer("in_channels"),
        out_channels=row.integer("out_channels"),
        groups=row.integer("groups"),
        kernel=row.sides("kernel"),
        stride=row.sides("stride"),
        padding=row.sides("padding"),
        dilation=row.sides("dilation"),
        output_padding=row.sides("output_padding"),
        transposed=transposed,
        # Weights of transposed convolutions have one scale: stock kernels take no other.
        per_channel=not transposed,
        dynamic=row.flag("dynamic"),
        post_op=row.text("post_op") or None,
        batch=batch or None,
        rows=row.integer("rows"),
        spatial=None if linear and not row.text("spatial") else row.sides("spatial"),
        threads=row.integer("threads"),
        bits=row.integer("bits", default=0) or None,
        weight_group=row.integer("weight_group", default=0) or None,
    )


def _read_nets(row: Row) -> tuple[tuple[str, int], ...]:
    nets = [net.strip() for net in row.text("net").split(";") if net.strip()]
    counts = [count for count in row.text("count").split(";") if count]
    if len(nets) != len(counts) or not all(c.isascii() and c.isdigit() for c in counts):
        row.fail("count", f"{';'.join(counts)!r} is not one whole number for each of {nets}")
    return tuple(zip(nets, map(int, counts), strict=True))


def _check_results(row: Row, m: Measurement) -> None:
    times = (m.low_us, m.median_us, m.high_us, m.min_us)
    if m.status != "ok":
        if any(t is not None for t in times):
            row.fail("median_us", f"a time, though the status is {m.status}; leave it empty")
        if not m.note:
            row.fail("note", f"empty; say why it is {m.status}")
        return
    if m.rounds < 1:
        row.fail("rounds", "0, though the status is ok")
    for name, value in zip(("low_us", "median_us", "high_us", "min_us"), times, strict=True):
        if value is None:
            row.fail(name, "empty, though the status is ok")
    low, median, high, fastest = (t for t in times if t is not None)
    if not low <= median <= high:
        row.fail("median_us", f"{median} lies outside its interval {low}..{high}")
    if fastest > median:
        row.fail("min_us", f"{fastest} exceeds the median {median}")
