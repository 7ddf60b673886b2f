"""The bytes of a wheel: files added to it, and everything in one order, at one time.

A wheel is a zip file, whose entries carry times, modes and an order that differ from build to
build. Written again by ``rewrite``, the same files give the same bytes.
"""

from __future__ import annotations

import base64
import hashlib
import os
import time
import zipfile
from collections.abc import Mapping
from pathlib import Path

#: Where zip's calendar begins: the time of files where SOURCE_DATE_EPOCH is not set.
EARLIEST = (1980, 1, 1, 0, 0, 0)
_FILE, _EXECUTABLE = 0o100644 << 16, 0o100755 << 16


def info_folder(names: list[str]) -> str:
    """The folder ``.dist-info`` of a wheel that holds files of these names."""
    (record,) = [name for name in names if name.endswith(".dist-info/RECORD")]
    return record.rpartition("/")[0]


def contents(wheel: Path) -> dict[str, bytes]:
    """The files of ``wheel``."""
    with zipfile.ZipFile(wheel) as archive:
        return {
            entry.filename: archive.read(entry)
            for entry in archive.infolist()
            if not entry.is_dir()
        }


def rewrite(wheel: Path, added: Mapping[str, bytes]) -> None:
    """Write ``wheel`` again with ``added``: paths in it, and what they hold."""
    files = {**contents(wheel), **added}
    info = info_folder(list(files))
    files[f"{info}/RECORD"] = record(files, f"{info}/RECORD")
    # Programs that stream a wheel want the description of it last.
    order = sorted(files, key=lambda name: (name.startswith(info), name))
    aside = wheel.with_suffix(".new")
    with zipfile.ZipFile(aside, "w") as archive:
        for name in order:
            entry = zipfile.ZipInfo(name, time_of_files())
            entry.create_system = 3  # Unix, so that the modes count
            entry.external_attr = _EXECUTABLE if name.endswith(".so") else _FILE
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, files[name], compresslevel=9)
    aside.replace(wheel)


def record(files: Mapping[str, bytes], itself: str) -> bytes:
    """The text of RECORD for ``files``: a path, a hash and a size a line."""
    lines = [
        f"{name},sha256={_base64(hashlib.sha256(data).digest())},{len(data)}"
        for name, data in sorted(files.items())
        if name != itself
    ]
    return "".join(f"{line}\n" for line in [*lines, f"{itself},,"]).encode()


def time_of_files() -> tuple[int, int, int, int, int, int]:
    """The time that all files of a wheel get: SOURCE_DATE_EPOCH, or the earliest there is."""
    epoch = os.environ.get("SOURCE_DATE_EPOCH")
    if not epoch:
        return EARLIEST
    at = time.gmtime(int(epoch))
    return max(EARLIEST, (at.tm_year, at.tm_mon, at.tm_mday, at.tm_hour, at.tm_min, at.tm_sec))


def _base64(digest: bytes) -> str:
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
