"""Measure every kernel on this machine, and make rules of it.

Without more, the layers of public networks and the probes between them are measured at this CPU's
own level, and the fitted rules become your own table. With --model, the layers of your model become
exact entries of it. With --out, the measurements are written to that file and nothing else happens.

Kill it at any moment: --resume goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from x86quant.cli import loading
from x86quant.errors import InvalidInputError
from x86quant.hardware.isa import LEVELS
from x86quant.spec import ROUTED_KINDS

if TYPE_CHECKING:
    from x86quant.hardware.cpu import Cpu
    from x86quant.ray.fleet import FleetKind, FleetOutcome
    from x86quant.tuning.cases import Grid, Shape
    from x86quant.tuning.quick import Quick
    from x86quant.tuning.session import Outcome, Request

HELP = "measure kernels on this machine, and make rules of it"

_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600}


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--shapes", metavar="FILE.csv", help="layers to measure; columns as in rules/layers.csv"
    )
    source.add_argument(
        "--model", metavar="NAME", help="module:factory, or the name of a torchvision model"
    )
    parser.add_argument(
        "--shape",
        type=_list_of(int, least=1),
        metavar="N,C,H,W",
        help="input shape of --model (default: 1,3,224,224)",
    )
    parser.add_argument(
        "--ops", type=_list_of(str, ROUTED_KINDS), default=(), help=f"of {', '.join(ROUTED_KINDS)}"
    )
    parser.add_argument("--nets", type=_list_of(str), default=(), help="only these networks")
    parser.add_argument(
        "--isa",
        type=_list_of(str, ("all", *LEVELS)),
        metavar="LEVEL",
        help="all, or levels to measure, each in a capped process (default: this CPU's own)",
    )
    parser.add_argument(
        "--threads", type=_list_of(int, least=1), default=(1,), help="numbers of threads (1)"
    )
    parser.add_argument(
        "--batch", type=_list_of(int, least=1), help="batch sizes of convolutions (1,8)"
    )
    parser.add_argument(
        "--rows",
        type=_list_of(int, least=1),
        help="rows of linears (1,4,16,64,256), bags of embedding tables (1,128,2048)",
    )
    parser.add_argument(
        "--weight-bits",
        type=_list_of(str, ("8", "4")),
        help="bits of the weights of linears: 8, 4 (both)",
    )
    parser.add_argument(
        "--weight-groups",
        type=_list_of(int, least=8),
        help="input features that share a scale in weights of 4 bits (32,128)",
    )
    parser.add_argument(
        "--post-ops",
        type=_list_of(str, ("none", "relu", "add", "lut")),
        default=("none",),
        help="what is fused behind the op: none, relu, and in compiled models add, lut (none)",
    )
    parser.add_argument(
        "--callers",
        type=_list_of(str, ("stock", "graph")),
        help="who calls: the stock operators, compiled models (both)",
    )
    parser.add_argument(
        "--budget", type=seconds, metavar="15m", help="stop measuring after this long, all in all"
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="in at most a minute: which shipped table fits this CPU best, and what corrects it",
    )
    parser.add_argument("--resume", action="store_true", help="go on with an unfinished run")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--out", metavar="FILE.csv", help="write measurements here, install nothing"
    )
    parser.add_argument(
        "--ray",
        nargs="?",
        const="auto",
        metavar="ADDRESS",
        help="measure one node of each kind of CPU in a Ray cluster, and install a table on each "
        "(without an address: the cluster that runs here)",
    )


def run(options: argparse.Namespace) -> int:
    """Measure, write, and unless --out is given install a table."""
    from x86quant.hardware.cpu import cpu
    from x86quant.tuning.session import run as tune
    from x86quant.tuning.user_table import user_measurements_path

    if options.ray is not None:
        return _fleet(options)
    if options.quick:
        return _quick(options)
    out = Path(options.out) if options.out else user_measurements_path()
    request = _request(options, _selected(options), out, cpu())
    try:
        outcome = tune(request)
    except KeyboardInterrupt:
        print("\nwhat was measured is kept; --resume goes on", file=sys.stderr)
        raise
    tables = _install(options, request, outcome) if options.out is None else []
    if options.json:
        print(json.dumps(_as_json(outcome, request, tables), indent=2))
    else:
        _print_outcome(outcome, request, tables)
    return 0


def _quick(options: argparse.Namespace) -> int:
    """Measure for a minute, and install a table if it is better than the one in force."""
    from x86quant.hardware.cpu import cpu
    from x86quant.tables.shipped import shipped_tables
    from x86quant.tuning import quick, user_table

    start = time.monotonic()
    for name in ("shapes", "model", "out", "isa", "budget", "resume"):
        if getattr(options, name):
            raise InvalidInputError(
                f"--quick decides by itself what to measure: leave out --{name}, or --quick"
            )
    here = cpu()
    found = quick.evaluate(quick.measure_few(_shapes(options), here, start=start), here)
    if found is None:
        print("nothing to choose: one kernel alone runs each of the layers that were measured")
        return 0
    installed = None
    replaces = found.worth_it and not quick.keeps_own_rules(found.before)
    if replaces or found.before.name in shipped_tables():
        installed = user_table.install(quick.as_user_table(found, here), here)
    if options.json:
        print(json.dumps(_quick_as_json(found, installed), indent=2))
        return 0
    print(found)
    if not found.worth_it:
        print(f"{found.before.name} stays in force: nothing is better by more than noise")
    if installed:
        what = "installed" if found.worth_it else "remembers that"
        print(f"{installed}: {what}; delete it to undo")
    elif found.worth_it:
        print(f"your own table {found.before.path} stays; to replace it, delete it first")
    return 0


def _quick_as_json(found: Quick, installed: Path | None) -> dict[str, Any]:
    return {
        "cases": found.cases,
        "before": found.before.name,
        "table": found.table.name,
        "corrections": [str(rule) for rule in found.corrections],
        "losses": found.losses,
        "gain": found.gain,
        "installed": None if installed is None else str(installed),
    }


def _fleet(options: argparse.Namespace) -> int:
    """Measure and install on every kind of CPU in a Ray cluster."""
    from x86quant.tuning.measurement_files import write
    from x86quant.tuning.measurements import merge
    from x86quant.tuning.user_table import user_measurements_path

    try:
        from x86quant.ray import fleet
    except ImportError as error:
        raise InvalidInputError(str(error)) from None
    if options.quick:
        raise InvalidInputError("--quick is for this machine alone: leave out --ray, or --quick")
    fleet.connect(options.ray)
    wanted = Path(options.out) if options.out else user_measurements_path()
    shapes = _selected(options)

    def request_for(kind: FleetKind) -> Request:
        out = wanted.with_name(f"{wanted.stem}-{kind.name}.csv")
        return _request(options, shapes, out, kind.cpu)

    try:
        outcomes = fleet.tune_fleet(
            request_for, as_entries=bool(options.model), install=options.out is None
        )
    except KeyboardInterrupt:
        print("\nwhat was measured is kept; --resume goes on", file=sys.stderr)
        raise
    measured = [one.outcome.measured for one in outcomes if one.outcome is not None]
    if options.out and len(measured) == len(outcomes):
        write(wanted, merge(measured))
    failed = [one for one in outcomes if one.outcome is None or one.refused]
    if options.json:
        print(json.dumps([_kind_as_json(one) for one in outcomes], indent=2))
    else:
        for one in outcomes:
            _print_kind(one)
    return 1 if failed else 0


def _print_kind(one: FleetOutcome) -> None:
    print(f"{one.kind.name}: {one.kind.cpu.name}, {len(one.kind.nodes)} nodes")
    if one.outcome is None:
        print(f"  failed: {one.error}")
        return
    print(f"  {one.out}: {len(one.outcome.measured.cases())} cases")
    if one.outcome.unmeasured:
        print(f"  out of time: {one.outcome.unmeasured} cases left; --resume goes on")
    if not one.outcome.quiet.enough:
        print(f"  the node was not quiet: {one.outcome.quiet}; the file says so too")
    for path in one.tables:
        print(f"  {path}: installed on {', '.join(one.installed) or 'no node'}")
    for name, why in one.refused.items():
        print(f"  not installed on {name}: {why}")


def _kind_as_json(one: FleetOutcome) -> dict[str, Any]:
    return {
        "kind": one.kind.name,
        "cpu": one.kind.cpu.name,
        "nodes": len(one.kind.nodes),
        "measurements": str(one.out),
        "cases": 0 if one.outcome is None else len(one.outcome.measured.cases()),
        "unmeasured": None if one.outcome is None else one.outcome.unmeasured,
        "error": one.error,
        "tables": [str(path) for path in one.tables],
        "installed": list(one.installed),
        "refused": one.refused,
    }


def _selected(options: argparse.Namespace) -> tuple[Shape, ...]:
    from x86quant.tuning.cases import select

    if options.shape and not options.model:
        raise InvalidInputError("--shape is the input of a --model; give that too")
    return select(_shapes(options), ops=options.ops, nets=options.nets)


def _request(
    options: argparse.Namespace, shapes: tuple[Shape, ...], out: Path, here: Cpu
) -> Request:
    from x86quant.tuning.session import Request

    return Request(
        shapes=shapes,
        grid=_grid(options),
        levels=_levels(options.isa, here),
        out=out,
        budget=options.budget,
        resume=options.resume,
        accumulate=options.out is None,
    )


def _shapes(options: argparse.Namespace) -> tuple[Shape, ...]:
    from x86quant.tuning.cases import EMBEDDINGS, LAYERS, PROBES, read_shapes
    from x86quant.tuning.model_shapes import PICTURE, load_model, model_shapes

    if not options.model:
        if options.shapes:
            return read_shapes(options.shapes)
        return tuple(s for path in (LAYERS, PROBES, EMBEDDINGS) for s in read_shapes(path))
    model = loading.load_model(options.model) if ":" in options.model else load_model(options.model)
    first, *rest = options.shape or PICTURE
    found: dict[Shape, None] = {}
    for batch in options.batch or (first,):
        found |= dict.fromkeys(model_shapes(model, options.model, (batch, *rest)))
    return tuple(found)


def _grid(options: argparse.Namespace) -> Grid:
    from x86quant.ops.groups import GROUP_STEP
    from x86quant.tuning.cases import Grid
    from x86quant.tuning.measurements import Caller

    usual = Grid()
    for group in options.weight_groups or ():
        if group % GROUP_STEP:
            raise InvalidInputError(
                f"--weight-groups: {group} features are no multiple of {GROUP_STEP}"
            )
    return Grid(
        callers=options.callers or get_args(Caller),
        threads=options.threads,
        batches=options.batch or usual.batches,
        rows=options.rows or usual.rows,
        bags=options.rows or usual.bags,
        weight_bits=tuple(map(int, options.weight_bits or usual.weight_bits)),
        weight_groups=options.weight_groups or usual.weight_groups,
        post_ops=tuple(None if name == "none" else name for name in options.post_ops),
    )


def _levels(wanted: Sequence[str] | None, here: Cpu) -> tuple[str, ...]:
    reached = tuple(name for name, level in LEVELS.items() if level.features <= here.features)
    if wanted is None:
        return (here.isa,)
    if "all" in wanted:
        return reached
    for name in wanted:
        here.capped(name)  # says which levels this CPU reaches
    return tuple(name for name in reached if name in wanted)


def _print_outcome(outcome: Outcome, request: Request, tables: Sequence[Path]) -> None:
    from x86quant.terminal.progress import clock_time

    print(
        f"{request.out}: {len(outcome.measured.cases())} cases, {len(outcome.measured)} "
        f"measurements, in {clock_time(outcome.seconds)}"
    )
    for m in outcome.of_status("wrong", "failed"):
        print(f"  {m.status}: {m.kernel_name} on {m.case}: {m.note}")
    for path in tables:
        print(f"{path}: installed")
    if outcome.unmeasured:
        print(
            f"out of time: {outcome.unmeasured} cases were not measured; --resume goes on",
            file=sys.stderr,
        )
    if not outcome.quiet.enough:
        print(f"the machine was not quiet: {outcome.quiet}; the file says so too", file=sys.stderr)


def _as_json(outcome: Outcome, request: Request, tables: Sequence[Path]) -> dict[str, Any]:
    return {
        "measurements": str(request.out),
        "cases": len(outcome.measured.cases()),
        "unmeasured": outcome.unmeasured,
        "seconds": round(outcome.seconds, 1),
        "quiet": outcome.quiet.enough,
        "bad": [
            {"kernel": m.kernel_name, "case": str(m.case), "status": m.status, "note": m.note}
            for m in outcome.of_status("wrong", "failed")
        ],
        "tables": [str(path) for path in tables],
    }


def _install(options: argparse.Namespace, request: Request, outcome: Outcome) -> list[Path]:
    from x86quant.hardware.cpu import cpu
    from x86quant.tuning import user_table

    installed = []
    for level in request.levels:
        here = cpu().capped(level)
        if options.model:
            of_model = {shape.net for shape in request.shapes}
            table = user_table.with_entries(
                (m for m in outcome.measured if of_model & {net for net, _ in m.case.nets}), here
            )
        else:
            table = user_table.fitted(outcome.measured, here)
        installed.append(user_table.install(table, here))
    return installed


# ---------------------------------------------------------------------------- arguments


def seconds(text: str) -> float:
    """``15m``, ``90s``, ``1.5h`` or ``600`` as seconds."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text, re.ASCII)
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} is no time; write 15m, 90s or 1h")
    return float(found[1]) * _UNITS[found[2]]


def _list_of(
    kind: Callable[[str], Any], legal: Sequence[str] = (), *, least: int | None = None
) -> Callable[[str], tuple[Any, ...]]:
    """A reader of values with commas between them."""

    def read(text: str) -> tuple[Any, ...]:
        try:
            values = tuple(kind(part.strip()) for part in text.split(","))
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is no list of whole numbers") from None
        for value in values:
            if legal and value not in legal:
                raise argparse.ArgumentTypeError(f"{value!r} is not one of {', '.join(legal)}")
            if least is not None and value < least:
                raise argparse.ArgumentTypeError(f"{value} is too small: at least {least}")
        return values

    return read
