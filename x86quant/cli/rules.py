"""The rule tables: which there are, what they say, what they differ in, how good they are.

A table is given by the name of a shipped one, the name of one of your own, or the path of a
.toml file.

  list    every table that is found by name, and which is in force
  show    one table
  check   whether tables are right; exit status 1 if one is not
  diff    the layers that two tables run on different kernels, and what that gains
  fit     a table from measurements
  score   how good tables are on measurements, beside one fitted without having seen the network
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from x86quant.cli import loading
from x86quant.errors import InvalidInputError, MeasurementError, RuleError, X86QuantWarning
from x86quant.hardware.isa import LEVELS

if TYPE_CHECKING:
    from x86quant.hardware.cpu import Cpu
    from x86quant.tables.table import RuleTable
    from x86quant.tuning.cases import Shape
    from x86quant.tuning.measurements import MeasurementSet
    from x86quant.tuning.regret import Score
    from x86quant.tuning.table_diff import TableDiff

HELP = "list, show, check, compare, fit and score rule tables"


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")

    def action(name: str, function: Callable[[argparse.Namespace], int], text: str) -> Any:
        one = actions.add_parser(name, help=text, description=text)
        one.add_argument("--json", action="store_true", help="print JSON")
        one.set_defaults(act=function)
        return one

    action("list", _list, "every table that is found by name")
    show = action("show", _show, "one table, by default the one in force")
    show.add_argument("table", nargs="?", help="name or path")
    show.add_argument("--toml", action="store_true", help="print it as a file")
    check = action("check", _check, "whether tables are right; exit status 1 if one is not")
    check.add_argument("tables", nargs="*", help="names or paths (default: all that are found)")
    _configure_diff(action("diff", _diff, "the layers for which two tables choose differently"))
    fit = action("fit", _fit, "a table from measurements; several files are merged first")
    _add_measurements(fit)
    fit.add_argument("--out", metavar="FILE.toml", help="write the table here")
    fit.add_argument("--name", help="of the table (default: that of the file)")
    fit.add_argument("--plots", metavar="DIR", help="draw regret and kernels into this folder")
    score = action("score", _score, "regret of tables on measurements")
    _add_measurements(score)
    score.add_argument(
        "--table", action="append", default=[], metavar="TABLE", help="score this one too"
    )


def _configure_diff(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("old", help="name or path of a table")
    parser.add_argument("new", help="name or path of a table")
    layers = parser.add_mutually_exclusive_group()
    layers.add_argument("--model", metavar="NAME", help="module:factory, or a torchvision model")
    layers.add_argument("--shapes", metavar="FILE.csv", help="layers (default: those shipped)")
    parser.add_argument("--shape", metavar="N,C,H,W", help="input of --model (1,3,224,224)")
    parser.add_argument("--batch", type=_positive, default=1, help="of convolutions (1)")
    parser.add_argument("--rows", type=_positive, default=64, help="of linears (64)")
    parser.add_argument("--threads", type=_positive, default=1, help="(1)")
    parser.add_argument("--caller", choices=("stock", "graph"), default="stock", help="(stock)")
    parser.add_argument("--isa", choices=tuple(LEVELS), help="(this CPU's)")
    parser.add_argument(
        "--measurements",
        action="append",
        metavar="FILE.csv",
        help="where gains are looked up (default: those shipped, and your own)",
    )


def _add_measurements(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("measurements", nargs="+", metavar="FILE.csv", help="as tune --out writes")
    parser.add_argument("--isa", choices=tuple(LEVELS), help="of several levels, this one")


def run(options: argparse.Namespace) -> int:
    """Do what was asked."""
    status: int = options.act(options)
    return status


def _print_json(data: object) -> None:
    print(json.dumps(data, indent=2))


# ---------------------------------------------------------------------------- list, show, check


def _list(options: argparse.Namespace) -> int:
    rows = _all_tables()
    if options.json:
        _print_json(rows)
        return 0
    width = max((len(row["name"]) for row in rows), default=0)
    for row in rows:
        mark = "*" if row["in_force"] else " "
        print(f"{mark} {row['name']:<{width}} {row['source']:<8} {_summary(row)}")
    print("* in force on this CPU")
    return 0


def _summary(row: dict[str, Any]) -> str:
    if row["error"]:
        return f"broken: {row['error']}"
    parts = [row["description"] or row["path"]]
    if row["hardware"]:
        parts.append(f"for {row['hardware']}")
    if row["regret"] is not None:
        parts.append(f"regret {row['regret']:.1%}")
    return "; ".join(part.removesuffix(".") for part in parts)


def _all_tables() -> list[dict[str, Any]]:
    """Shipped tables, then the user's, then the one in force if it is neither."""
    from x86quant.routing.in_force import current_rules
    from x86quant.tables.shipped import shipped_tables
    from x86quant.tables.user import user_tables

    with warnings.catch_warnings():
        # What is broken or old is said in the list.
        warnings.simplefilter("ignore", X86QuantWarning)
        active = current_rules()
    rows = [
        _describe(name, path, source, active)
        for source, tables in (("shipped", shipped_tables()), ("yours", user_tables()))
        for name, path in tables.items()
    ]
    if not any(row["in_force"] for row in rows):
        rows.append(_describe(active.name, Path(active.path), "named", active))
    return rows


def _describe(name: str, path: Path, source: str, active: RuleTable) -> dict[str, Any]:
    from x86quant.kernels import kernel_names
    from x86quant.routing.in_force import stale
    from x86quant.tables.table_reader import read_table

    row: dict[str, Any] = {"name": name, "path": str(path), "source": source, "error": None}
    try:
        table = read_table(path, kernel_names())
    except RuleError as error:
        facts = {"description": "", "hardware": "", "regret": None, "stale": None}
        return row | facts | {"error": str(error), "in_force": False}
    hardware = table.hardware.describe().removeprefix("any op when ")
    return row | {
        "description": table.description,
        "hardware": hardware if table.hardware.when else "",
        "regret": table.provenance.get("regret"),
        "stale": stale(table),
        "in_force": str(path) == active.path,
    }


def _show(options: argparse.Namespace) -> int:
    from x86quant.routing.in_force import current_rules
    from x86quant.tables.table_writer import dumps

    table = current_rules() if options.table is None else _table(options.table)
    if options.json:
        _print_json(_as_json(table))
    else:
        print(dumps(table) if options.toml else table, end="" if options.toml else "\n")
    return 0


def _as_json(table: RuleTable) -> dict[str, Any]:
    def conditions(pattern: Any) -> dict[str, Any]:
        return {name: condition.source for name, condition in pattern.when.items()}

    return {
        "name": table.name,
        "path": table.path,
        "description": table.description,
        "extends": table.base.name if table.base else None,
        "provenance": dict(table.provenance),
        "hardware": conditions(table.hardware),
        "domain": conditions(table.domain),
        "denied": [{"spec": str(d.spec), "kernel": d.kernel} for d in table.denials],
        "entries": [{"spec": str(e.spec), "use": e.use} for e in table.entries],
        "rules": [
            {"op": r.op, "when": conditions(r), "use": r.use, "because": r.because}
            for r in table.rules
        ],
    }


def _check(options: argparse.Namespace) -> int:
    from x86quant.routing.in_force import stale
    from x86quant.tables.shipped import shipped_tables
    from x86quant.tables.user import user_tables

    found = []
    for name in options.tables or [*shipped_tables(), *user_tables()]:
        try:
            table = _table(name)
        except RuleError as error:
            found.append({"table": name, "ok": False, "note": str(error)})
        else:
            found.append({"table": name, "ok": True, "note": stale(table)})
    if options.json:
        _print_json(found)
    else:
        for one in found:
            print(f"{one['table']}: {'ok' if one['ok'] else 'wrong'}{_colon(one['note'])}")
    return 0 if all(one["ok"] for one in found) else 1


def _colon(note: object) -> str:
    return f": {note}" if note else ""


def _table(name: str) -> RuleTable:
    from x86quant.kernels import kernel_names
    from x86quant.tables.table_reader import read_table
    from x86quant.tables.user import find_any_table

    return read_table(find_any_table(name), kernel_names())


# ---------------------------------------------------------------------------- diff


def _diff(options: argparse.Namespace) -> int:
    from x86quant.tuning.cases import Grid
    from x86quant.tuning.table_diff import diff_tables

    old, new = _table(options.old), _table(options.new)
    grid = Grid(
        callers=(options.caller,),
        threads=(options.threads,),
        batches=(options.batch,),
        rows=(options.rows,),
        dynamic=(False,),
        caches=("hot",),
    )
    cpu = _cpu(options.isa)
    known = _known(options.measurements, cpu.isa)
    found = diff_tables(old, new, _shapes(options), grid, cpu, known)
    if options.json:
        _print_json({"old": old.name, "new": new.name, **found.to_json()})
    else:
        _print_diff(found, old, new)
    return 0


def _cpu(isa: str | None) -> Cpu:
    from x86quant.hardware.cpu import cpu

    return cpu().capped(isa) if isa else cpu()


def _shapes(options: argparse.Namespace) -> Sequence[Shape]:
    from x86quant.tuning.cases import LAYERS, read_shapes
    from x86quant.tuning.model_shapes import PICTURE, load_model, model_shapes

    if options.shape and not options.model:
        raise InvalidInputError("--shape is the input of a --model; give that too")
    if not options.model:
        return read_shapes(options.shapes or LAYERS)
    size = _sizes(options.shape) if options.shape else PICTURE
    load = loading.load_model if ":" in options.model else load_model
    return model_shapes(load(options.model), options.model, size)


def _sizes(text: str) -> tuple[int, ...]:
    try:
        return tuple(_positive(part) for part in text.split(","))
    except argparse.ArgumentTypeError as error:
        raise InvalidInputError(f"--shape {text}: {error}; write N,C,H,W") from None


def _known(paths: Sequence[str] | None, isa: str) -> list[MeasurementSet]:
    """The files named; else those on record for the level ``isa``."""
    from x86quant.tuning.measurement_files import read

    return _on_record(isa) if paths is None else [read(path) for path in paths]


def _on_record(isa: str) -> list[MeasurementSet]:
    """The measurements shipped and the user's, without those that cannot be read.

    Files named by another level have nothing else in them, and seconds are spent on each.
    """
    from x86quant.tables.shipped import SHIPPED
    from x86quant.tuning.measurement_files import read
    from x86quant.tuning.user_table import user_measurements_path

    found = []
    for path in [*sorted((SHIPPED / "measurements").glob("*.csv")), user_measurements_path()]:
        level = path.stem.partition("-")[0]
        if level in LEVELS and level != isa:
            continue
        try:
            found.append(read(path))
        except MeasurementError:  # none yet, or of another kind; then the gain is not known
            continue
    return found


def _print_diff(found: TableDiff, old: RuleTable, new: RuleTable) -> None:
    for change in found.changes:
        gain = "not measured" if change.gain is None else f"{change.gain:.2f}x"
        times = f" ×{change.count}" if change.count > 1 else ""
        print(
            f"{change.case.spec}{times}: {change.old.kernel} ({change.old.rule}) → "
            f"{change.new.kernel} ({change.new.rule}): {gain}"
        )
    print(
        f"{len(found.changes)} of {found.layers} layers change from {old.name} to {new.name}; "
        f"where measured ({len(found.measured)}), {found.saved_us / 1000:.2f} ms are saved"
    )


# ---------------------------------------------------------------------------- fit, score


def _measured(options: argparse.Namespace) -> MeasurementSet:
    from x86quant.tuning.measurement_files import read
    from x86quant.tuning.measurements import merge

    measured = merge(read(path) for path in options.measurements)
    levels = sorted({m.case.isa for m in measured})
    if options.isa is not None and options.isa not in levels:
        raise InvalidInputError(f"nothing was measured at {options.isa}; only {', '.join(levels)}")
    if options.isa is None and len(levels) > 1:
        raise InvalidInputError(
            f"the measurements are of {', '.join(levels)}; choose one level by --isa"
        )
    isa = options.isa or (levels[0] if levels else "")
    return measured.where(lambda case: case.isa == isa)


def _fit(options: argparse.Namespace) -> int:
    from x86quant.tables.table_writer import dumps, write_table
    from x86quant.tuning.fit import fit
    from x86quant.tuning.plots import draw
    from x86quant.tuning.samples import samples

    measured = _measured(options)
    name = options.name or (Path(options.out).stem if options.out else None)
    fitted = fit(measured, name=name, progress=_progress())
    if options.plots:
        for path in draw(samples(measured), fitted.scores, Path(options.plots)):
            print(path, file=sys.stderr)
    if options.out:
        write_table(fitted.table, options.out)
    if options.json:
        _print_json({"table": _as_json(fitted.table), "scores": _scores_as_json(fitted.scores)})
    else:
        wrote = f"{options.out}: {len(fitted.table.rules)} rules"
        print(wrote if options.out else dumps(fitted.table))
        _print_scores(fitted.scores)
    return 0


def _score(options: argparse.Namespace) -> int:
    from x86quant.tuning.fit import fit
    from x86quant.tuning.regret import score
    from x86quant.tuning.samples import samples

    tables = {name: _table(name) for name in options.table}
    measured = _measured(options)
    scores = (*fit(measured, progress=_progress()).scores, *score(samples(measured), tables))
    if options.json:
        _print_json(_scores_as_json(scores))
    else:
        _print_scores(scores)
    return 0


def _progress() -> Callable[[int, int], None]:
    from x86quant.terminal.progress import Progress

    bars: list[Progress] = []

    def advance(done: int, total: int) -> None:
        if not bars:
            bars.append(Progress(total, "networks left out"))
        else:
            bars[0].advance(1)
        if done == total:
            bars[0].finish()

    return advance


def _scores_as_json(scores: Sequence[Score]) -> list[dict[str, Any]]:
    return [
        {
            "caller": one.caller,
            "table": one.table,
            "cases": one.regret.cases,
            "mean": one.regret.mean,
            "p95": one.regret.p95,
            "worst": one.regret.worst,
            "worst_case": one.regret.worst_case,
            "weighted": one.regret.weighted,
            "networks": dict(one.networks),
        }
        for one in scores
    ]


def _print_scores(scores: Sequence[Score]) -> None:
    print(f"{'regret of':<34} {'cases':>6} {'mean':>8} {'p95':>8} {'worst':>9} {'weighted':>9}")
    for one in scores:
        r, name = one.regret, f"{one.caller}: {one.table}"
        figures = f"{r.mean:>8.2%} {r.p95:>8.1%} {r.worst:>9.1%} {r.weighted:>9.2%}"
        print(f"{name:<34} {r.cases:>6} {figures}")
    if scores and scores[0].regret.worst_case:
        print(f"worst of {scores[0].table}: {scores[0].regret.worst_case}")


def _positive(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number above 0")
    return int(text)
