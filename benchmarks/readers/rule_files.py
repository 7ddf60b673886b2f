"""Rule tables and measurements."""

from __future__ import annotations

from pathlib import Path

from benchmarks.readers.changes import text_changes
from benchmarks.readers.reader import Depth, Reader, in_file, refused
from x86quant.errors import MeasurementError, RuleError
from x86quant.tables.shipped import shipped_tables
from x86quant.tables.table_reader import read_table
from x86quant.tables.table_text import read_text
from x86quant.tables.table_writer import dumps
from x86quant.tuning import measurement_files as of_tuning

_SAMPLES = Path(__file__).parents[2] / "rules" / "measurements"
_LINES = 60


def table(folder: Path) -> Reader:
    """TOML files of rules."""

    def read(path: Path) -> Depth:
        try:
            found = read_table(path)
        except RuleError as error:
            return refused(error, ("tables.table_text:read_text", "tables.table_text:parse_toml"))
        dumps(found)  # what was read can be written
        return Depth.READ

    samples = [read_text(path).encode() for path in shipped_tables().values()]
    return Reader(samples, text_changes, in_file(folder, "rules.toml", read))


def measurements(folder: Path) -> Reader:
    """CSV files of measurements."""

    def read(path: Path) -> Depth:
        try:
            found = of_tuning.read(path)
        except MeasurementError as error:
            return refused(error, ("tuning.measurements:read_lines",))
        of_tuning.write(folder / "again.csv", found)
        return Depth.READ

    samples = [
        b"".join(path.read_bytes().splitlines(keepends=True)[:_LINES])
        for path in sorted(_SAMPLES.glob("*.csv"))
    ]
    readable = [x for x in samples if in_file(folder, "sample.csv", read)(x) is Depth.READ]
    return Reader(readable, text_changes, in_file(folder, "measured.csv", read))
