"""Writing files such that a reader, or a crash, never sees half of one.

What is no regular file is written through, never replaced: a device, a pipe. A link stays a link,
and what it points to is written.
"""

from __future__ import annotations

import errno
import os
import stat
import uuid
from pathlib import Path
from typing import IO

from x86quant.errors import InvalidInputError

#: Of the disk, or of what the user may have of it.
_FULL = (errno.ENOSPC, errno.EDQUOT)


def check_target(target: Path, what: str = "") -> None:
    """Raise InvalidInputError where ``write_aside`` could not write to ``target``.

    ``what`` names the option that gave it.
    """
    _resolved(target, f"{what}: " if what else "")


def write_aside(target: Path, content: str | bytes) -> None:
    """Write ``content`` to ``target``: a regular file as a whole or not at all.

    Raises:
        OSError: it cannot be written, because the disk is full for instance.
        InvalidInputError: ``target`` is nothing that can be written to.
    """
    data = content.encode() if isinstance(content, str) else content
    file = _resolved(target, "")
    if file is None:
        with open(os.open(target, os.O_WRONLY), "wb") as opened:
            opened.write(data)
        return
    temporary = file.with_name(f".{file.name}.{uuid.uuid4().hex}")
    try:
        if not _written_unnamed(temporary, data):
            with open(temporary, "xb") as opened:
                _fill(opened, data)
        if file.exists():
            os.chmod(temporary, stat.S_IMODE(file.stat().st_mode))
        os.replace(temporary, file)
    except OSError as error:
        if error.errno not in _FULL:
            raise
        kept = "what was there before is untouched" if file.exists() else "nothing was written"
        raise OSError(error.errno, f"the disk is full, {kept}", str(target)) from error
    finally:
        temporary.unlink(missing_ok=True)


def _written_unnamed(temporary: Path, data: bytes) -> bool:
    """Write ``data`` to a file that gets its name last: a process killed meanwhile leaves nothing.

    False, and nothing was written, where the system has no such files.
    """
    unnamed = getattr(os, "O_TMPFILE", None)
    if unnamed is None:
        return False
    try:
        with open(os.open(temporary.parent, unnamed | os.O_WRONLY, 0o666), "wb") as opened:
            _fill(opened, data)
            # Given a descriptor, whichever, Python follows the link to what is open.
            os.link(f"/proc/self/fd/{opened.fileno()}", temporary, src_dir_fd=opened.fileno())
    except OSError as error:
        if error.errno in _FULL:
            raise
        return False
    return True


def _fill(opened: IO[bytes], data: bytes) -> None:
    opened.write(data)
    opened.flush()
    os.fsync(opened.fileno())


def _resolved(target: Path, told: str) -> Path | None:
    """The file to write, behind all links; None if ``target`` is to be written as it stands."""
    folder = InvalidInputError(f"{told}{target} is a folder: give the name of a file in it")
    if not target.name:
        raise folder
    try:
        kind = target.stat().st_mode
    except FileNotFoundError:
        kind = None
    except OSError as error:  # a circle of links, a name too long
        raise InvalidInputError(f"{told}{target} cannot be written: {error.strerror}") from error
    if kind is not None and stat.S_ISDIR(kind):
        raise folder
    if kind is not None and stat.S_ISSOCK(kind):
        raise InvalidInputError(f"{told}{target} is a socket, which cannot be written as a file")
    # /dev/stdout is a file where it is redirected to one, and still nothing to replace.
    if target.absolute().parts[1:2] in (("dev",), ("proc",)) and kind is not None:
        return None
    if kind is not None and not stat.S_ISREG(kind):
        return None
    file = Path(os.path.realpath(target)) if target.is_symlink() else target
    if not file.absolute().parent.is_dir():
        raise InvalidInputError(f"{told}there is no folder {file.absolute().parent}")
    return file
