"""Tuning a whole cluster: one measuring for each kind of CPU in it, and a table for each.

Measurements come to the driver op by op, into a journal a kind, so that whatever ends, theirs or
this, loses the op under way and no more. Kinds never mix: each has its own file and its own table,
which the nodes of that kind alone install.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ActorUnschedulableError, RayActorError, RayError, RayTaskError

from x86quant.errors import TuningError, X86QuantError
from x86quant.hardware.cpu import Cpu, cpu
from x86quant.ray.nodes import Node, alive, ask_each, check_packages, last_line, name_of, only_on
from x86quant.tables.table import RuleTable
from x86quant.tables.table_writer import write_table
from x86quant.tables.user import user_folder
from x86quant.tuning import user_table
from x86quant.tuning.measurements import Case, Measurement, machine_name
from x86quant.tuning.provenance import provenance
from x86quant.tuning.quiet import Quiet, look
from x86quant.tuning.session import Outcome, Request, Site, run
from x86quant.tuning.worker import Worker

#: Seconds after which it is said that a node is waited for.
_WAIT = 10.0
#: How often in a row a node may fail at one op before its kind is given up.
_MOST_FAILURES = 3


@dataclasses.dataclass(frozen=True)
class FleetKind:
    """The nodes of a cluster that have one kind of CPU.

    Attributes:
        cpu: the CPU of the first of them.
        nodes: all of them.
    """

    cpu: Cpu
    nodes: tuple[Node, ...]

    @property
    def name(self) -> str:
        """What its files are called by: ``GenuineIntel-6-143-amx_int8``."""
        return f"{machine_name(self.cpu.vendor, self.cpu.family, self.cpu.model)}-{self.cpu.isa}"


@dataclasses.dataclass(frozen=True)
class FleetOutcome:
    """What tuning found for one kind of CPU.

    Attributes:
        kind: the kind.
        out: the file of its measurements.
        outcome: the measuring; None where it failed.
        error: why it failed.
        tables: the files of the tables made of it, one an ISA level, on this machine.
        installed: the nodes that have installed it.
        refused: those that could not, and why.
    """

    kind: FleetKind
    out: Path
    outcome: Outcome | None = None
    error: str | None = None
    tables: tuple[Path, ...] = ()
    installed: tuple[str, ...] = ()
    refused: dict[str, str] = dataclasses.field(default_factory=dict)


def connect(address: str) -> None:
    """Join the cluster at ``address``; "auto" is the one that runs here.

    Raises:
        TuningError: there is none.
    """
    if ray.is_initialized():
        return
    try:
        ray.init(address=address, log_to_driver=False, logging_level="error")
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise TuningError(
            f"there is no Ray cluster at {address}: {last_line(error)}. Start one with "
            "'ray start --head', or give its address as --ray HOST:PORT"
        ) from None


def kinds() -> tuple[FleetKind, ...]:
    """The kinds of CPU in the cluster.

    Raises:
        UnsupportedError: a node lacks x86quant, or has another version.
        TuningError: a node does not say what its CPU is.
    """
    nodes = sorted(alive(), key=lambda node: str(node["NodeID"]))
    check_packages(nodes)
    found: dict[tuple[object, ...], tuple[Cpu, list[Node]]] = {}
    for node, answer in zip(nodes, ask_each(nodes, cpu), strict=True):
        if not isinstance(answer, Cpu):
            raise TuningError(f"{name_of(node)}: {last_line(answer)}")
        # What tables speak for; caches and clocks may differ within.
        key = (answer.vendor, answer.family, answer.model, answer.isa)
        found.setdefault(key, (answer, []))[1].append(node)
    return tuple(FleetKind(one, tuple(nodes)) for one, nodes in found.values())


def tune_fleet(
    request_for: Callable[[FleetKind], Request],
    *,
    as_entries: bool = False,
    install: bool = True,
    tell: Callable[[str], None] = lambda message: print(message, file=sys.stderr),
) -> tuple[FleetOutcome, ...]:
    """Measure on one node of each kind, all kinds at once, and install what comes of it.

    A node is measured when all its CPUs are free of Ray's work, and is held until it is done. If it
    is lost, another of its kind goes on.

    Args:
        request_for: what to measure on a kind. The file it names is on this machine.
        as_entries: make entries of the measurements, for a model's layers, in place of rules.
        install: make a table a kind, and install it on every node of the kind.
        tell: told what happens.
    """
    found = kinds()
    requests = {kind.name: request_for(kind) for kind in found}
    outcomes: dict[str, FleetOutcome] = {}

    def tune(kind: FleetKind) -> None:
        request = requests[kind.name]
        try:
            with contextlib.closing(_HeldNode(kind, tell)) as node:
                outcome = run(
                    request,
                    site=_site(kind, node),
                    warn=lambda message: tell(f"{kind.name}: {message}"),
                )
            done = FleetOutcome(kind, request.out, outcome)
            outcomes[kind.name] = _with_table(done, request.levels, as_entries) if install else done
        except (X86QuantError, OSError, RayError) as error:
            outcomes[kind.name] = FleetOutcome(kind, request.out, error=str(error))

    # Daemons: an interrupted driver ends at once, and what is in the journals stays.
    threads = [threading.Thread(target=tune, args=(kind,), daemon=True) for kind in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive():
            thread.join(0.5)  # in pieces, between which Ctrl-C is seen
    missing = [kind.name for kind in found if kind.name not in outcomes]
    if missing:
        raise TuningError(f"measuring {', '.join(missing)} ended without a word: see the traceback")
    return tuple(outcomes[kind.name] for kind in found)


# ---------------------------------------------------------------------------- measuring


class NodeMeasurer:
    """Runs on the node: a tuning worker, and what is asked about the machine."""

    def __init__(self) -> None:
        self._workers: dict[str, Worker] = {}

    def measure(self, isa: str, cases: Sequence[Case], limit: float) -> list[Measurement]:
        """Measure cases of one op at an ISA level."""
        if isa not in self._workers:
            self._workers[isa] = Worker(isa)
        return self._workers[isa].measure(cases, limit)

    def provenance(self, levels: Sequence[str], threads: Sequence[int]) -> dict[str, str]:
        """What this node measures with."""
        return provenance(levels, threads)

    def look(self) -> Quiet:
        """Is this node quiet?"""
        return look()


class _HeldNode:
    """The driver's side: a node of a kind that answers, whichever it is."""

    def __init__(self, kind: FleetKind, tell: Callable[[str], None]) -> None:
        self._kind, self._tell = kind, tell
        self._left = list(kind.nodes)
        self._actor: Any = None

    def ask(self, method: str, *arguments: Any) -> Any:
        """The answer of a node.

        Raises:
            TuningError: no node of the kind is left, or one after the other failed at this.
        """
        failures: list[str] = []
        while len(failures) < _MOST_FAILURES:
            try:
                actor = self._actor or self._start()
                return ray.get(getattr(actor, method).remote(*arguments))
            except RayTaskError as error:
                cause = error.cause
                raise cause if isinstance(cause, X86QuantError) else error from None
            except (RayActorError, ActorUnschedulableError) as error:
                self._actor = None
                failures.append(last_line(error))
                self._tell(f"{self._kind.name}: {name_of(self._left[0])} was lost; going on")
        raise TuningError(
            f"measuring on {self._kind.name} failed {len(failures)} times in a row: "
            f"{failures[-1]}. What was measured before is kept; --resume goes on"
        )

    def _start(self) -> Any:
        """Hold a node of the kind that is still there."""
        there = {node["NodeID"] for node in alive()}
        self._left = [node for node in self._left if node["NodeID"] in there]
        if not self._left:
            raise TuningError(
                f"no node of {self._kind.name} is left in the cluster. What was measured is kept; "
                "--resume goes on"
            )
        node = self._left[0]
        # All its CPUs, so that nothing else of Ray's runs beside what is timed.
        held = ray.remote(num_cpus=node["Resources"]["CPU"], max_restarts=0)(NodeMeasurer)
        actor = held.options(scheduling_strategy=only_on(node)).remote()
        ready = actor.__ray_ready__.remote()
        if not ray.wait([ready], timeout=_WAIT)[0]:
            self._tell(f"{self._kind.name}: waiting until all CPUs of {name_of(node)} are free")
        ray.get(ready)
        self._tell(f"{self._kind.name}: measuring on {name_of(node)}")
        self._actor = actor
        return actor

    def close(self) -> None:
        """Let the node go."""
        if self._actor is not None:
            ray.kill(self._actor)
            self._actor = None


class _Level:
    """What measures on a node at one ISA level."""

    def __init__(self, node: _HeldNode, isa: str) -> None:
        self._node, self._isa = node, isa

    def __enter__(self) -> _Level:
        return self

    def __exit__(self, *_: object) -> None: ...

    def measure(self, cases: Sequence[Case], limit: float) -> list[Measurement]:
        """Measure cases of one op there."""
        found: list[Measurement] = self._node.ask("measure", self._isa, list(cases), limit)
        return found


def _site(kind: FleetKind, node: _HeldNode) -> Site:
    return Site(
        machine=lambda: machine_name(kind.cpu.vendor, kind.cpu.family, kind.cpu.model),
        provenance=lambda levels, threads: node.ask("provenance", levels, threads),
        look=lambda: node.ask("look"),
        worker=lambda isa: _Level(node, isa),
        name=kind.name,
    )


# ---------------------------------------------------------------------------- tables


def fleet_table_path(kind: FleetKind, level: str) -> Path:
    """Where the driver keeps the table of a kind; nobody uses it there without naming it."""
    own = "" if level == kind.cpu.isa else f"-at-{level}"
    return user_folder() / "fleet" / f"{kind.name}{own}.toml"


def install_here(table: RuleTable, measured: Sequence[Measurement] | None, level: str) -> Path:
    """On a node: make ``table`` the user's own at a level, as ``x86quant tune`` does there.

    Entries of the table before it stay. Where ``measured`` is given, so do its rules, and these
    become entries.

    Raises:
        TuningError: this CPU is of another kind, or the user's table is for one, since nodes of
            different kinds share a folder; or it cannot be written.
    """
    here = cpu().capped(level)
    if not table.fits(here):
        raise TuningError(f"{table.name} was measured on another kind of CPU than {here.name}")
    before = user_table.installed_table(here)
    if before is not None and not before.fits(here):
        raise TuningError(
            f"{before.path} is the table of another kind of CPU, which shares this folder: give "
            "each kind a folder of its own with XDG_CACHE_HOME, then tune again"
        )
    if measured is not None:
        return user_table.install(user_table.with_entries(measured, here), here)
    return user_table.install(user_table.keeping_entries(table, here), here)


def _with_table(done: FleetOutcome, levels: Sequence[str], as_entries: bool) -> FleetOutcome:
    """Make the tables of a kind, keep them here, and install them on its nodes."""
    assert done.outcome is not None
    measured = done.outcome.measured
    written: list[Path] = []
    refused: dict[str, str] = {}
    for level in levels:
        here = done.kind.cpu.capped(level)
        entries: list[Measurement] | None = None
        if as_entries:
            entries = [m for m in measured if m.case.isa == level]
            table = user_table.with_entries(entries, here, user_table.empty_table(here))
        else:
            table = user_table.rules_of(measured, here)
        path = fleet_table_path(done.kind, level)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_table(table, path)
        written.append(path)
        install = functools.partial(install_here, table, entries, level)
        for node, answer in zip(done.kind.nodes, ask_each(done.kind.nodes, install), strict=True):
            if isinstance(answer, RayError):
                refused[name_of(node)] = last_line(answer)
    installed = tuple(n for n in map(name_of, done.kind.nodes) if n not in refused)
    return dataclasses.replace(done, tables=tuple(written), installed=installed, refused=refused)
