"""What a library of a version that nobody put on record does on this machine: tried out once, kept.

A kernel is legal where its record says so. For versions without a record this makes one: each
family of layers is asked which products share a sum, and layers drawn at random are held against
the reference, in another process, since a wrong kernel may end it. What was wrong, ended the
process or was not asked is not legal. The answers are kept in the user's cache folder.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from x86quant.errors import X86QuantWarning
from x86quant.files import write_aside
from x86quant.hardware.cpu import Cpu, cpu
from x86quant.tables.user import user_folder

from . import libraries

#: How often a process that died is started again, for the parts behind the one it died in.
_STARTS = 6
_SECONDS = 180.0
_SCHEMA = 1


@dataclasses.dataclass(frozen=True)
class TriedLibrary:
    """What was seen of one library.

    Attributes:
        library: its name and version, for people.
        layouts: (family, instructions) -> which products share a sum.
        wrong: (op, family) -> what was wrong, or how the process ended.
        failed: why nothing could be tried, where that is so.
    """

    library: str
    layouts: Mapping[tuple[str, str], str] = dataclasses.field(default_factory=dict)
    wrong: Mapping[tuple[str, str], str] = dataclasses.field(default_factory=dict)
    failed: str | None = None

    def why_not(self, op: str, family: str, instructions: str) -> str | None:
        """Why layers of ``family`` may not run, None where they were right."""
        about = f"{self.library} is not on record"
        if self.failed:
            return f"{about}, and could not be tried out: {self.failed}"
        if (family, instructions) not in self.layouts:
            more = self.wrong.get(("sums", family), "their sums were not seen")
            return f"{about}, and its {family} layers may not be right: {more}"
        if (op, family) in self.wrong:
            return f"{about}, and was seen to be wrong: {self.wrong[op, family]}"
        return None


_trusting = False
_lock = threading.Lock()


@contextlib.contextmanager
def everything_trusted() -> Iterator[None]:
    """In the block kernels are legal whatever is known of them: it is what tries them."""
    global _trusting
    _trusting = True
    try:
        yield
    finally:
        _trusting = False


def trusted() -> bool:
    """Whether no record is needed, because this is the process that tries."""
    return _trusting


def of(library: str) -> TriedLibrary | None:
    """What is known of ``library`` from trying it here; None where its version is on record."""
    if libraries.on_record(library):
        return None
    with _lock:
        return _tried(library, cpu())


@functools.cache
def _tried(library: str, here: Cpu) -> TriedLibrary:
    """The trial on record in the cache folder, or a new one, which is then kept."""
    name = f"{library} {libraries.version(library)} (torch {torch.__version__})"
    file = user_folder() / "trials" / f"{_key(name, here)}.json"
    kept = _read(file)
    if kept is None:
        warnings.warn(
            f"{name} is newer than what x86quant was tested with: its kernels are tried out now, "
            "once, for some seconds",
            X86QuantWarning,
            stacklevel=2,
        )
        kept, failed = _ask(library)
        if failed:
            return TriedLibrary(name, failed=failed)
        with contextlib.suppress(OSError, RuntimeError):  # the next process asks again
            file.parent.mkdir(parents=True, exist_ok=True)
            write_aside(file, json.dumps({"schema": _SCHEMA, "library": name, "parts": kept}))
    return _as_trial(name, kept)


def _key(name: str, here: Cpu) -> str:
    """What the answers depend on; whatever caps a library shows in ``here``."""
    text = f"{_SCHEMA} {name} {here.name} {here.isa} {sorted(here.withheld)}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _read(file: Path) -> list[dict[str, Any]] | None:
    """What ``file`` holds; None where there is none, or where it is no such file."""
    try:
        data = json.loads(file.read_text())
    except (OSError, ValueError, RuntimeError):
        return None
    parts = data.get("parts") if isinstance(data, dict) and data.get("schema") == _SCHEMA else None
    sound = isinstance(parts, list) and all(
        isinstance(part, dict)
        and isinstance(part.get("part"), str)
        and all(isinstance(value, str) for value in part.values())
        for part in parts
    )
    return parts if sound else None


def _ask(library: str) -> tuple[list[dict[str, Any]], str | None]:
    """The answers of processes that try ``library``; or why there are none."""
    if not sys.executable or getattr(sys, "frozen", False):
        return [], "there is no Python interpreter to start"
    answers: list[dict[str, Any]] = []
    # The package is found as it was found here.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    for _ in range(_STARTS):
        done = [answer["part"] for answer in answers]
        command = [sys.executable, "-W", "ignore", "-m", "x86quant.kernels.probing"]
        try:
            ended = subprocess.run(
                [*command, library, *done],
                capture_output=True,
                text=True,
                timeout=_SECONDS,
                env=environment,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return [], f"it took longer than {_SECONDS:.0f} s"
        except OSError as error:
            return [], str(error)
        lines = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")]
        answers += [line for line in lines if "part" in line]
        if ended.returncode == 0:
            return answers, None
        if not lines or "begins" not in lines[-1]:
            words = ended.stderr.strip().splitlines()[-1:] or [f"exit code {ended.returncode}"]
            return [], words[0]
        how = f"a process that ran them ended with code {ended.returncode}"
        answers.append({"part": lines[-1]["begins"], "why": how})
    return [], f"it ended {_STARTS} processes"


def _as_trial(name: str, parts: list[dict[str, Any]]) -> TriedLibrary:
    layouts, wrong = {}, {}
    for part in parts:
        kind, *where = part["part"].split(" ")
        if "why" in part:
            key = ("sums", where[0]) if kind == "sums" else (where[0], where[1])
            wrong[key] = part["why"]
        elif kind == "sums":
            layouts[where[0], part["instructions"]] = part["layout"]
    return TriedLibrary(name, layouts, wrong)
