"""The tables that come with x86quant, and how a table is named."""

from __future__ import annotations

import importlib.resources
import os
from pathlib import Path

from x86quant.errors import RuleError
from x86quant.tables.conditions import did_you_mean

#: Where the shipped tables are: the folder rules/, installed or in place.
SHIPPED = Path(str(importlib.resources.files("x86quant.rules")))


def shipped_tables() -> dict[str, Path]:
    """The tables that come with x86quant, by name."""
    return {p.stem: p for p in sorted(SHIPPED.glob("*.toml")) if p.stem != "errata"}


def find_table(name_or_path: str | os.PathLike[str]) -> Path:
    """The file of a shipped table's name, or of a path."""
    text = os.fspath(name_or_path)
    shipped = shipped_tables()
    if text in shipped:
        return shipped[text]
    if not text.endswith(".toml") and os.sep not in text:
        raise RuleError(
            f"unknown rule table {text!r}; {did_you_mean(text, shipped)}, "
            "or give the path of a .toml file"
        )
    if not Path(text).is_file():
        raise RuleError(f"{text}: there is no such rule table; give the path of a .toml file")
    return Path(text)
