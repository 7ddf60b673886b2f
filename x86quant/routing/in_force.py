"""Which rule table and which overrides are in force.

Looked up in this order: ``with use_rules(...)`` of this thread, ``use_rules(...)`` for the
process, ``X86QUANT_RULES``, the user's own table for this CPU (``x86quant.tables.user``), the
shipped table for its ISA level or the nearest below, the table "default".

``use_rules`` and ``override`` work at once, for the whole process, and return a handle. Used in
a ``with`` statement the handle narrows the setting to the block, in this thread (or asynchronous
task) only; ``handle.undo()`` ends it otherwise.
"""

from __future__ import annotations

import functools
import importlib.metadata
import itertools
import os
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

from x86quant.errors import InvalidInputError, RuleError, X86QuantWarning
from x86quant.hardware.cpu import cpu as this_cpu
from x86quant.hardware.isa import LEVELS
from x86quant.kernels import kernel_names
from x86quant.kernels.probing import libraries
from x86quant.routing.router import Override, Routing, make_override
from x86quant.tables.conditions import did_you_mean
from x86quant.tables.errata import read_errata
from x86quant.tables.likeness import DEGREES, likeness
from x86quant.tables.shipped import shipped_tables
from x86quant.tables.table import RuleTable
from x86quant.tables.table_reader import read_table
from x86quant.tables.user import find_any_table, is_user_table, user_tables

if TYPE_CHECKING:
    from x86quant.hardware.cpu import Cpu
    from x86quant.kernels import Kernel
    from x86quant.tables.errata import Erratum

VARIABLE = "X86QUANT_RULES"

T = TypeVar("T")


#: Of settings, in the order in which they were made.
_numbers = itertools.count()


class _Stack(Generic[T]):
    """Settings in force: those of the process, and those of this context."""

    def __init__(self, name: str) -> None:
        self._lock = threading.Lock()
        self._process: tuple[Setting[T], ...] = ()
        self._scoped: ContextVar[tuple[Setting[T], ...]] = ContextVar(name, default=())

    def newest_first(self) -> tuple[T, ...]:
        settings = sorted(self._process + self._scoped.get(), key=lambda s: -s.number)
        return tuple(setting.value for setting in settings)

    def push(self, setting: Setting[T]) -> None:
        with self._lock:
            self._process += (setting,)

    def narrow(self, setting: Setting[T]) -> None:
        self._drop_from_process(setting)
        self._scoped.set((*self._scoped.get(), setting))

    def drop(self, setting: Setting[T]) -> None:
        self._drop_from_process(setting)
        self._scoped.set(tuple(s for s in self._scoped.get() if s is not setting))

    def clear(self) -> None:
        with self._lock:
            self._process = ()

    def _drop_from_process(self, setting: Setting[T]) -> None:
        # By identity: other threads may have pushed and dropped theirs in between.
        with self._lock:
            self._process = tuple(s for s in self._process if s is not setting)


class Setting(Generic[T]):
    """The handle of one setting: a context manager, or ended with ``undo()``."""

    def __init__(self, stack: _Stack[T], value: T) -> None:
        self.value = value
        self.number = next(_numbers)
        self._stack = stack
        stack.push(self)

    def undo(self) -> None:
        """End this setting; what was in force before it counts again."""
        self._stack.drop(self)

    def __enter__(self) -> T:
        self._stack.narrow(self)
        return self.value

    def __exit__(self, *_: object) -> None:
        self.undo()

    def __repr__(self) -> str:
        return f"<in force: {self.value}>"


_tables: _Stack[RuleTable] = _Stack("x86quant_rules")
_overrides: _Stack[Override] = _Stack("x86quant_overrides")


def use_rules(name_or_path: str | os.PathLike[str] | RuleTable) -> Setting[RuleTable]:
    """Put a rule table in force, by name, path, or as a value.

    Without ``with`` it holds for the whole process::

        use_rules("pytorch-2.0")

    With it, for the block, in this thread::

        with use_rules("mine.toml"):
            ...

    Args:
        name_or_path: the name of a shipped table or of the user's, the path of a .toml file, or a
            table; it may name registered kernels only.

    Raises:
        RuleError: the table cannot be found, or is wrong; nothing has changed then.
    """
    known = kernel_names()
    if isinstance(name_or_path, RuleTable):
        table = name_or_path
        table.check_kernels(known)
    else:
        table = read_table(find_any_table(name_or_path), known)
    return Setting(_tables, table)


def override(kernel: str, *, op: str = "*", **features: object) -> Setting[Override]:
    """Run the ops that match on ``kernel``, whatever the table says; the newest one counts.

    Conditions are written as in a rule table::

        override("fbgemm", op="conv2d", groups="> 1", in_per_group=[4, 8])

    It is a kernel of the stock operators that is named: one that cannot run a matching op there is
    an error when that op is routed. In compiled models and linears on float tensors, whose kernels
    are others of the same names, the table decides where the kernel cannot run, or where there is
    none of this name; write ``caller="graph"`` to have an error there too.

    ``override(...).undo()`` ends it; in a ``with`` statement it ends with the block.
    """
    known = kernel_names()
    if kernel not in known:
        raise InvalidInputError(
            f"override: unknown kernel {kernel!r}; {did_you_mean(kernel, known)}"
        )
    return Setting(_overrides, make_override(kernel, op, **features))


def current_rules(cpu: Cpu | None = None) -> RuleTable:
    """The table in force on ``cpu``, by default the one this runs on.

    Raises:
        RuleError: X86QUANT_RULES names a table that cannot be found or is wrong.
    """
    tables = _tables.newest_first()
    if tables:
        return tables[0]
    return _table_of_environment() or automatic_table(cpu or this_cpu())


def current_overrides() -> tuple[Override, ...]:
    """The overrides in force, the newest first."""
    return _overrides.newest_first()


def routing_in_force(kernels: Mapping[str, Kernel]) -> Routing:
    """What choices among ``kernels`` depend on now, on this machine."""
    here = this_cpu()
    return Routing(here, current_rules(here), kernels, current_overrides(), _errata())


@functools.cache
def _errata() -> tuple[Erratum, ...]:
    return read_errata(libraries.judged_as(importlib.metadata.version("torch")))


def reset() -> None:
    """End every process-wide table and override, and read X86QUANT_RULES again."""
    _tables.clear()
    _overrides.clear()
    _table_of_environment.cache_clear()
    automatic_table.cache_clear()
    shipped_table.cache_clear()
    _told.clear()


@functools.cache
def _table_of_environment() -> RuleTable | None:
    """The table that X86QUANT_RULES names; the variable is read once."""
    wanted = os.environ.get(VARIABLE)
    if not wanted:
        return None
    try:
        table = read_table(find_any_table(wanted), kernel_names())
    except RuleError as error:
        raise RuleError(f"{VARIABLE}={wanted}: {error}") from None
    return table


@functools.cache
def automatic_table(cpu: Cpu) -> RuleTable:
    """The table for ``cpu`` that nobody named: the user's own, else the shipped one.

    A broken one, unless it is "default", is skipped with a warning: it must not break a model.
    """
    for table in _readable(user_tables().values()):
        if table.fits(cpu):
            return table
    return shipped_table(cpu)


@functools.cache
def shipped_table(cpu: Cpu) -> RuleTable:
    """The shipped table for the ISA level of ``cpu`` or the nearest below, else "default".

    Where a level has tables of several CPUs, it is the one measured on the CPU most like this one.
    """
    shipped = shipped_tables()
    default = shipped.pop("default")
    tables = [table for table in _readable(shipped.values()) if table.hardware.when]
    for level, needs in reversed(LEVELS.items()):
        if not needs.features <= cpu.features:
            continue
        here = cpu.capped(level)
        if fitting := [table for table in tables if table.fits(here)]:
            return min(fitting, key=lambda t: DEGREES.index(likeness(t, here).degree))
    return read_table(default, kernel_names())


def _readable(paths: Iterable[Path]) -> Iterator[RuleTable]:
    """The tables in these files; a warning, once, for each that is broken."""
    for path in paths:
        try:
            yield read_table(path, kernel_names())
        except RuleError as error:
            _tell(f"broken {path}", f"rule table skipped: {error}")


def stale(table: RuleTable) -> str | None:
    """In which versions the table's measurements differ from what is installed, and the remedy.

    Such a table may be slow, never wrong: ``x86quant info`` and ``x86quant rules check`` say so.
    """
    differ = [
        f"{name} {measured}, not {installed}"
        for name, measured, installed in _versions(table)
        if libraries.release(installed)
        not in {libraries.release(part) for part in measured.split(" | ")}
    ]
    if not differ:
        return None
    return (
        f"was measured with {' and '.join(differ)}: it still works, but its choices may be slow. "
        f"Measure again: {refresh_command(table)}"
    )


def refresh_command(table: RuleTable) -> str:
    """The command that measures again what ``table`` rests on."""
    if is_user_table(table) or Path(table.path) in shipped_tables().values():
        return "x86quant tune"
    return f"x86quant tune --out new.csv && x86quant rules fit new.csv --out {table.path or 'FILE'}"


def _versions(table: RuleTable) -> Iterator[tuple[str, str, str]]:
    """What the table was measured with, and what is installed."""
    for name in ("torch", "x86quant"):
        measured = str(table.provenance.get(name, ""))
        if measured:
            yield name, measured, importlib.metadata.version(name)


#: What the user was told already.
_told: set[str] = set()


def _tell(what: str, message: str) -> None:
    if what not in _told:
        _told.add(what)
        warnings.warn(message, X86QuantWarning, stacklevel=2)
