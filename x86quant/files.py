"""Writing files such that a reader, or a crash, never sees half of one."""

from __future__ import annotations

import os
import uuid
from pathlib import Path


def write_aside(target: Path, content: str | bytes) -> None:
    """Write ``content`` to a file beside ``target`` and move it into place."""
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
    try:
        with open(temporary, "xb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
