"""The user's own rule tables: files in the cache folder, found and used without being named.

``x86quant tune`` writes one an ISA level; any other table put there counts too, if its
``[hardware]`` says that it is for this CPU.
"""

from __future__ import annotations

import os
from pathlib import Path

from x86quant.tables.shipped import find_table, shipped_tables
from x86quant.tables.table import RuleTable
from x86quant.tables.table_writer import write_table


def user_folder() -> Path:
    """What belongs to the user: ``$XDG_CACHE_HOME/x86quant``, by default under ``~/.cache``."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "x86quant"


def user_rules_dir() -> Path:
    """Where the user's tables are."""
    return user_folder() / "rules"


def user_table_path(isa: str) -> Path:
    """The table that tuning writes for CPUs at this level."""
    return user_rules_dir() / f"tuned-{isa}.toml"


def user_tables() -> dict[str, Path]:
    """The user's tables by name, whether or not they can be read."""
    try:
        return {path.stem: path for path in sorted(user_rules_dir().glob("*.toml"))}
    except (OSError, RuntimeError):  # a folder that may not be read; a user without a home
        return {}


def find_any_table(name_or_path: str | os.PathLike[str]) -> Path:
    """The file of a table: a shipped one's name, a user's, or a path.

    Raises:
        RuleError: there is none.
    """
    name, own = os.fspath(name_or_path), user_tables()
    return own[name] if name in own and name not in shipped_tables() else find_table(name)


def is_user_table(table: RuleTable) -> bool:
    """Whether ``table`` was read from the user's folder."""
    return Path(table.path) in user_tables().values()


def install_user_table(table: RuleTable, isa: str) -> Path:
    """Put ``table`` where it is found from now on, whole or not at all; returns where.

    Raises:
        OSError: it cannot be written; what was there before is untouched.
    """
    path = user_table_path(isa)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_table(table, path)
    return path
