"""What a running tune has measured so far: appended case by case, so that a kill loses nothing.

A file of JSON lines: the provenance, then the measurements of one op a line. Each line is on the
disk before the next op is measured; one that a kill cut short is dropped when the file is read.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from x86quant.errors import MeasurementError, TuningError
from x86quant.tuning.measurement_files import Row, from_cells, to_cells
from x86quant.tuning.measurements import Measurement

_SCHEMA = 1
#: What must be the same for measurements to go into one run.
_SAME = ("cpu", "microcode", "torch", "x86quant")


class Journal:
    """An open journal. ``measurements`` holds all that was measured, earlier runs included."""

    def __init__(self, path: Path, provenance: Mapping[str, str], *, resume: bool) -> None:
        """Begin the journal, or go on with it.

        Raises:
            TuningError: there is one already and ``resume`` is False, or it does not fit.
        """
        self.path = path
        self.measurements: list[Measurement] = []
        exists = path.exists() and path.stat().st_size > 0
        if exists and not resume:
            raise TuningError(
                f"{path} holds an unfinished run. Go on with it by --resume, or delete the file."
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        if not (exists and self._read(provenance)):
            os.ftruncate(self._file, 0)
            self._write({"schema": _SCHEMA, "provenance": dict(provenance)})

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._file)

    def add(self, measurements: Sequence[Measurement]) -> None:
        """Keep ``measurements``, for good when this returns."""
        self._write({"measurements": [to_cells(m) for m in measurements]})
        self.measurements += measurements

    def _read(self, provenance: Mapping[str, str]) -> bool:
        """Read what is there; False when not even the head is."""
        *lines, torn = self.path.read_bytes().split(b"\n")
        if torn:
            os.ftruncate(self._file, sum(len(line) + 1 for line in lines))
        if not lines:
            return False
        os.lseek(self._file, 0, os.SEEK_END)
        head = self._object(lines[0], 1)
        if head.get("schema") != _SCHEMA:
            raise TuningError(f"{self.path}:1: not a journal this version reads; delete the file")
        check_same(head["provenance"], provenance, str(self.path))
        for number, line in enumerate(lines[1:], 2):
            for cells in self._object(line, number)["measurements"]:
                self.measurements.append(from_cells(Row(str(self.path), number, cells)))
        return True

    def _object(self, line: bytes, number: int) -> dict[str, Any]:
        try:
            return {"provenance": {}, "measurements": [], **json.loads(line)}
        except (ValueError, TypeError):
            raise MeasurementError(
                f"{self.path}:{number}: damaged; delete this line, or the file"
            ) from None

    def _write(self, content: Mapping[str, object]) -> None:
        data = json.dumps(content, ensure_ascii=False).encode() + b"\n"
        size = os.fstat(self._file).st_size
        try:
            while data:
                data = data[os.write(self._file, data) :]
            os.fsync(self._file)
        except OSError as error:
            os.ftruncate(self._file, size)
            raise writing_failed(self.path, error) from error


def writing_failed(path: Path, error: OSError) -> TuningError:
    """The error for a write that failed, most likely on a full disk."""
    why = "the disk is full" if error.errno == errno.ENOSPC else error.strerror
    return TuningError(
        f"{path} cannot be written: {why}. What was measured before is kept; make room, then go "
        "on with --resume."
    )


def check_same(found: Mapping[str, str], now: Mapping[str, str], where: str) -> None:
    """Refuse to go on with measurements of another machine or other versions."""
    for key in _SAME:
        if found.get(key) != now.get(key):
            raise TuningError(
                f"{where} was measured with {key} {found.get(key)!r}, this is {now.get(key)!r}: "
                "times do not compare. Delete the file, or measure into another one with --out."
            )


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of the output ``path``; TuningError when another tune holds it.

    The system drops the lock with the process, however that ends.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = path.with_name(f".{path.name}.lock")
    with open(lock, "a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise TuningError(
                f"another tune (process {file.read().strip() or 'unknown'}) is writing {path}. "
                "Wait for it, or measure into another file with --out."
            ) from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield
