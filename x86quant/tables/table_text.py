"""The text of a table: reading it, and saying where in it something is wrong."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NoReturn

from x86quant.errors import RuleError
from x86quant.tables.conditions import did_you_mean

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found,unused-ignore]


class TableText:
    """A table's text, and where in it things stand: TOML parsers keep no line numbers."""

    _HEADER = re.compile(r"\s*\[+\s*([\w.\-]+)\s*\]")

    def __init__(self, text: str, path: str) -> None:
        self.path = path
        self._lines = text.splitlines()
        self._headers = self._find_headers()

    def _find_headers(self) -> list[tuple[str, int]]:
        headers, quoted = [], False
        for number, line in enumerate(self._lines, 1):
            match = None if quoted else self._HEADER.match(line)
            if match:
                headers.append((match[1], number))
            # An odd number of triple quotes opens or closes a text of several lines.
            quoted ^= (line.count('"""') + line.count("'''")) % 2 == 1
        return headers

    def line(self, section: str = "", index: int = 0, key: str | None = None) -> int:
        """The line of ``key`` in the ``index``-th ``section``, or of its header."""
        if key is not None and not section:
            headers = [number for name, number in self._headers if name == key]
            if headers:
                return headers[0]
        starts = [number for name, number in self._headers if name == section]
        start = starts[index] if index < len(starts) else 1
        if key is None:
            return start
        ends = [
            number
            for name, number in self._headers
            if number > start and not name.startswith(f"{section}.")
        ]
        end = min(ends, default=len(self._lines) + 1)
        first = start if section else 1
        pattern = re.compile(rf"""(^|[\s{{,.\["']){re.escape(key)}["']?\s*(=|\])""")
        for number in range(first, end if section or ends else len(self._lines) + 1):
            if pattern.search(self._lines[number - 1]):
                return number
        return start

    def fail(
        self, message: str, section: str = "", index: int = 0, key: str | None = None
    ) -> NoReturn:
        """Raise RuleError with the place in front of ``message``."""
        raise RuleError(f"{self.path}:{self.line(section, index, key)}: {message}") from None

    def check_keys(
        self, found: Mapping[str, Any], legal: Collection[str], section: str = "", index: int = 0
    ) -> None:
        """Refuse keys that are not ``legal``."""
        for key in found:
            if key not in legal:
                self.fail(f"unknown key {key!r}; {did_you_mean(key, legal)}", section, index, key)

    def text(self, found: Mapping[str, Any], key: str, section: str, index: int) -> str:
        """The text under ``key``; empty when it is not there."""
        value = found.get(key, "")
        if not isinstance(value, str):
            self.fail(f"{key} must be a text, not {value!r}", section, index, key)
        return value


def parse_toml(text: str, path: str) -> dict[str, Any]:
    """``text`` as TOML; a syntax error is a RuleError with its line."""
    try:
        data: dict[str, Any] = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        found = re.search(r"\(at line (\d+), column \d+\)", str(error))
        line = found[1] if found else len(text.splitlines())
        why = re.sub(r" \(at .*\)$", "", str(error))
        raise RuleError(f"{path}:{line}: not valid TOML: {why}; correct the syntax there") from None
    return data


def read_text(path: str | os.PathLike[str]) -> str:
    """A table's text; RuleError when the file cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise RuleError(f"{os.fspath(path)}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise RuleError(
            f"{os.fspath(path)}: not UTF-8 text ({error.reason} at byte {error.start}); "
            "save it as UTF-8"
        ) from None
