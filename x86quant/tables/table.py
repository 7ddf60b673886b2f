"""Rule tables: read, check and print the TOML files that say which kernel is preferred.

A table is data::

    schema = 1
    name = "mine"
    extends = "default"                  # optional: where the look-up goes on

    [provenance]                         # optional: what it was measured with
    torch = "2.13.0"

    [hardware]                           # optional: the CPUs it is for
    isa = "amx_int8"

    [domain]                             # optional: the ops its rules were fitted to
    in_channels = "16..4096"

    [[entry]]                            # optional: single measured shapes
    spec = { op = "linear", in_channels = 768, out_channels = 768, rows = 256 }
    use = "onednn"

    [[deny]]                             # optional: kernels found to be wrong on a shape
    spec = { op = "conv2d", in_channels = 3, out_channels = 7, kernel = [3, 3] }
    kernel = "fbgemm"
    because = "measured: differs from the reference"

    [[rule]]
    op = "linear"
    when = { rows = ">= 8" }
    use = "onednn"
    because = "2 times faster"

    [[rule]]
    op = "*"
    use = ["fbgemm", "onednn"]           # in this order

The conditions are those of ``conditions.py``, the names those of ``features.py``.
Whatever is wrong is a RuleError naming the file, the line and the remedy.
"""

from __future__ import annotations

import dataclasses
import importlib.resources
import math
import os
import re
import sys
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

from x86quant.errors import RuleError
from x86quant.spec import OP_KINDS, OpSpec
from x86quant.tables.conditions import (
    OPS,
    Condition,
    ConditionError,
    Pattern,
    did_you_mean,
    parse_pattern,
)
from x86quant.tables.features import FEATURES

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found,unused-ignore]

if TYPE_CHECKING:
    from x86quant.hardware.cpu import Cpu

SCHEMA = 1
# Where the shipped tables are: the folder rules/, installed or in place.
SHIPPED = Path(str(importlib.resources.files("x86quant.rules")))

# How far a measured entry speaks for other shapes: the sum of |ln ratio| of the dimensions.
RADIUS = 0.5

Provenance: TypeAlias = "Mapping[str, str | int | float | bool]"


@dataclasses.dataclass(frozen=True)
class Rule(Pattern):
    """One rule: which ops it is for, which kernels it prefers, best first, and why."""

    use: tuple[str, ...]
    because: str = ""
    name: str = dataclasses.field(default="", compare=False)
    line: int = dataclasses.field(default=0, compare=False)

    def __str__(self) -> str:
        why = f"  ({self.because})" if self.because else ""
        return f"{self.name}: {self.describe()} → {', then '.join(self.use)}{why}"


@dataclasses.dataclass(frozen=True)
class Entry:
    """One measured shape and the kernels that were best on it, best first.

    A field of ``spec`` that is None (rows, batch, spatial, threads, dynamic, post_op) stands for
    every value.
    """

    spec: OpSpec
    use: tuple[str, ...]
    because: str = ""
    name: str = dataclasses.field(default="", compare=False)
    line: int = dataclasses.field(default=0, compare=False)

    def distance(self, spec: OpSpec) -> float:
        """0 for the very shape, else the sum of |ln ratio| of sizes; infinite if incomparable."""
        return _distance(self.spec, spec)

    def __str__(self) -> str:
        return f"{self.name}: {self.spec} → {', then '.join(self.use)}"


@dataclasses.dataclass(frozen=True)
class Denial:
    """A kernel that was found to be wrong on a shape, and must not run it.

    Fields of ``spec`` that are None stand for every value, as in an ``Entry``.
    """

    spec: OpSpec
    kernel: str
    because: str = ""
    name: str = dataclasses.field(default="", compare=False)
    line: int = dataclasses.field(default=0, compare=False)

    def matches(self, spec: OpSpec) -> bool:
        """Whether ``spec`` is of this shape."""
        return _distance(self.spec, spec) == 0

    def __str__(self) -> str:
        why = f"  ({self.because})" if self.because else ""
        return f"{self.name}: {self.spec}: never {self.kernel}{why}"


# What may differ between two specs without their being different shapes.
_IGNORED = frozenset({"weights", "bias", "per_channel", "activation_max"})
# What may differ in size between an entry and the shape that it is nearest to.
_SIZES = frozenset({"in_channels", "out_channels", "groups", "batch", "rows", "spatial"})


def _distance(measured: OpSpec, spec: OpSpec) -> float:
    total = 0.0
    for field in dataclasses.fields(OpSpec):
        mine, theirs = getattr(measured, field.name), getattr(spec, field.name)
        if field.name in _IGNORED or mine is None or mine == theirs:
            continue
        if theirs is None or field.name not in _SIZES:
            return math.inf
        a, b = _volume(mine), _volume(theirs)
        total += abs(math.log(a / b)) if a and b else math.inf
    return math.inf if measured.depthwise != spec.depthwise else total


def _volume(size: int | tuple[int, ...]) -> int:
    return math.prod(size) if isinstance(size, tuple) else size


_EVERYTHING = Pattern("*", {})


@dataclasses.dataclass(frozen=True)
class RuleTable:
    """Ordered preferences over kernels. Legality is not its business."""

    name: str
    rules: tuple[Rule, ...]
    schema: int = SCHEMA
    description: str = ""
    provenance: Provenance = dataclasses.field(default_factory=dict)
    hardware: Pattern = _EVERYTHING
    domain: Pattern = _EVERYTHING
    entries: tuple[Entry, ...] = ()
    denials: tuple[Denial, ...] = ()
    base: RuleTable | None = None
    path: str = dataclasses.field(default="", compare=False)

    def chain(self) -> Iterator[RuleTable]:
        """This table, the one it extends, and so on."""
        table: RuleTable | None = self
        while table is not None:
            yield table
            table = table.base

    def fits(self, cpu: Cpu) -> bool:
        """Whether ``cpu`` is of the class of hardware that the table is for."""
        return all(
            condition.matches(FEATURES[name].get(_ANY_OP, cpu))
            for name, condition in self.hardware.when.items()
        )

    def in_domain(self, spec: OpSpec, cpu: Cpu) -> bool:
        """Whether the rules were fitted to ops like this; an unknown feature does not exclude."""
        for name, condition in self.domain.when.items():
            value = FEATURES[name].get(spec, cpu)
            if value is not None and not condition.matches(value):
                return False
        return True

    def row_breaks(self, spec: OpSpec, cpu: Cpu) -> tuple[int, ...]:
        """The rows at which the answer for ``spec`` may change, ascending.

        Between two neighbouring breaks (the first one included) the same rules match. Near
        entries change at no particular row, so a table with entries adds the powers of two.
        """
        breaks: set[int] = set()
        for table in self.chain():
            for pattern in (*table.rules, table.domain):
                breaks |= pattern.row_breaks(spec, cpu)
            rows = [e.spec.rows for e in table.entries if e.spec.rows is not None]
            denied = [d.spec.rows for d in table.denials if d.spec.rows is not None]
            breaks |= {r + after for r in rows + denied for after in (0, 1)}
            breaks |= {2**n for n in range(14)} if rows else set()
        return tuple(sorted(b for b in breaks if b > 1))

    def kernels(self) -> dict[str, Rule | Entry | Denial]:
        """Every kernel named here, with the first rule, entry or denial that names it."""
        named: dict[str, Rule | Entry | Denial] = {}
        items: list[Rule | Entry] = [*self.entries, *self.rules]
        for item in items:
            for kernel in item.use:
                named.setdefault(kernel, item)
        for denial in self.denials:
            named.setdefault(denial.kernel, denial)
        return named

    def denied(self, spec: OpSpec, cpu: Cpu) -> dict[str, str]:
        """The kernels found to be wrong on ``spec``, and why, here or in a table extended."""
        return {
            denial.kernel: f"denied by {denial.name}: {denial.because or 'measured to be wrong'}"
            for table in self.chain()
            if table.denials and table.fits(cpu)
            for denial in table.denials
            if denial.matches(spec)
        }

    def check_kernels(self, known: Collection[str]) -> None:
        """Raise RuleError for a kernel that is not ``known``, here or in a table extended."""
        for table in self.chain():
            for kernel, item in table.kernels().items():
                if kernel not in known:
                    raise RuleError(
                        f"{table.path}:{item.line}: {item.name} names the unknown kernel "
                        f"{kernel!r}; {did_you_mean(kernel, known)}"
                    )

    def __str__(self) -> str:
        lines = [f"{self.name}: {self.description}" if self.description else self.name]
        lines += [f"  {key}: {value}" for key, value in self.provenance.items()]
        for label, pattern in (("for", self.hardware), ("fitted to", self.domain)):
            if pattern.when:
                lines.append(f"  {label} {pattern.describe().removeprefix('any op when ')}")
        lines += [f"  {item}" for item in (*self.denials, *self.entries, *self.rules)]
        if self.base is not None:
            lines.append(f"  else as {self.base.name}")
        return "\n".join(lines)


# Hardware conditions read the CPU only; this op is never looked at.
_ANY_OP = OpSpec("linear", 1, 1)

# ---------------------------------------------------------------------------- reading


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


_TABLE_KEYS = {
    "schema": int,
    "name": str,
    "description": str,
    "extends": str,
    "provenance": dict,
    "hardware": dict,
    "domain": dict,
    "rule": list,
    "entry": list,
    "deny": list,
}
_RULE_KEYS = {"op", "when", "use", "because"}
_ENTRY_KEYS = {"spec", "use", "because"}
_DENIAL_KEYS = {"spec", "kernel", "because"}
SPEC_KEYS = {field.name for field in dataclasses.fields(OpSpec)} - _IGNORED
_TYPE_NAMES = {int: "an integer", str: "a text", dict: "a table", list: "an array of tables"}


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


def _use(source: TableText, found: Mapping[str, Any], section: str, index: int) -> tuple[str, ...]:
    use = found.get("use")
    names = [use] if isinstance(use, str) else use
    if not isinstance(names, list) or not names or not all(isinstance(n, str) and n for n in names):
        wrong = "no kernel" if use is None else f"use = {use!r}"
        source.fail(
            f'{wrong}; write use = "onednn", or a list of kernels, best first',
            section,
            index,
            "use",
        )
    if len(set(names)) < len(names):
        source.fail(f"the same kernel twice in use = {use!r}; delete one", section, index, "use")
    return tuple(names)


def read_patterns(
    source: TableText, items: list[dict[str, Any]], section: str, legal: Collection[str]
) -> Iterator[tuple[int, dict[str, Any], str, dict[str, Condition]]]:
    """Check the keys and conditions of every ``[[section]]``: index, item, op, when."""
    for index, item in enumerate(items):
        if not isinstance(item, dict):
            source.fail(f"{section} must be an array of tables: write [[{section}]]", key=section)
        source.check_keys(item, legal, section, index)
        if "op" not in item:
            source.fail(f"no op; write one of {', '.join(map(repr, OPS))}", section, index)
        try:
            op, when = parse_pattern(item["op"], item.get("when", {}))
        except ConditionError as error:
            source.fail(str(error), section, index, error.key or "op")
        yield index, item, op, when


def _read_rules(source: TableText, data: Mapping[str, Any], table: str) -> tuple[Rule, ...]:
    rules: list[Rule] = []
    for index, item, op, when in read_patterns(source, data.get("rule", []), "rule", _RULE_KEYS):
        rule = Rule(
            op,
            when,
            _use(source, item, "rule", index),
            source.text(item, "because", "rule", index),
            f"{table}#{index + 1}",
            source.line("rule", index),
        )
        for earlier in rules:
            if earlier.covers(rule):
                source.fail(
                    f"unreachable: the rule at line {earlier.line} matches everything this one "
                    "does; delete it, move it above, or name its kernel second in that rule's use",
                    "rule",
                    index,
                )
        rules.append(rule)
    return tuple(rules)


def _spec_value(source: TableText, section: str, index: int, key: str, value: Any) -> Any:
    """One field of a spec, of the type that OpSpec declares."""
    if isinstance(value, list):
        value = tuple(value)
    declared = str(OpSpec.__annotations__[key])
    number = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    numbers = isinstance(value, tuple) and all(type(v) is int and v >= 0 for v in value)
    good = {
        "OpKind": value in OP_KINDS if isinstance(value, str) else False,
        "int": number,
        "int | None": number,
        "tuple[int, ...]": numbers,
        "tuple[int, ...] | None": numbers,
        "bool": isinstance(value, bool),
        "bool | None": isinstance(value, bool),
        "str | None": isinstance(value, str),
    }[declared]
    if not good:
        source.fail(
            f"{key} = {value!r} is not {declared.removesuffix(' | None')}", section, index, key
        )
    return value


def _read_spec(source: TableText, item: Mapping[str, Any], section: str, index: int) -> OpSpec:
    spec = item.get("spec")
    if not isinstance(spec, dict):
        source.fail('no spec; write spec = { op = "linear", ... }', section, index)
    source.check_keys(spec, SPEC_KEYS, section, index)
    for needed in ("op", "in_channels", "out_channels"):
        if needed not in spec:
            source.fail(f"the spec has no {needed}", section, index, "spec")
    fields = {key: _spec_value(source, section, index, key, value) for key, value in spec.items()}
    for needed in ("in_channels", "out_channels", "groups"):
        if fields.get(needed) == 0:
            source.fail(f"{needed} must be at least 1", section, index, needed)
    result = OpSpec(**fields)
    usual = {"stride": 1, "dilation": 1, "padding": 0, "output_padding": 0}
    given = {key: getattr(result, key) or (value,) * result.dims for key, value in usual.items()}
    result = result.replace(**given)
    for key in ("kernel", *usual):
        if len(getattr(result, key)) != result.dims:
            source.fail(f"{key} of a {result.op} needs {result.dims} numbers", section, index, key)
    return result


def _read_entries(source: TableText, data: Mapping[str, Any], table: str) -> tuple[Entry, ...]:
    entries: list[Entry] = []
    for index, item in enumerate(data.get("entry", [])):
        source.check_keys(item, _ENTRY_KEYS, "entry", index)
        entry = Entry(
            _read_spec(source, item, "entry", index),
            _use(source, item, "entry", index),
            source.text(item, "because", "entry", index),
            f"{table}:entry#{index + 1}",
            source.line("entry", index),
        )
        for earlier in entries:
            if earlier.spec == entry.spec:
                source.fail(f"same spec as line {earlier.line}; delete one", "entry", index)
        entries.append(entry)
    return tuple(entries)


def _read_denials(source: TableText, data: Mapping[str, Any], table: str) -> tuple[Denial, ...]:
    denials: list[Denial] = []
    for index, item in enumerate(data.get("deny", [])):
        source.check_keys(item, _DENIAL_KEYS, "deny", index)
        kernel = source.text(item, "kernel", "deny", index)
        if not kernel:
            source.fail('no kernel; write kernel = "..."', "deny", index)
        denial = Denial(
            _read_spec(source, item, "deny", index),
            kernel,
            source.text(item, "because", "deny", index),
            f"{table}:deny#{index + 1}",
            source.line("deny", index),
        )
        for earlier in denials:
            if (earlier.spec, earlier.kernel) == (denial.spec, denial.kernel):
                source.fail(f"same spec as line {earlier.line}; delete one", "deny", index)
        denials.append(denial)
    return tuple(denials)


def _read_section(source: TableText, data: Mapping[str, Any], section: str) -> Pattern:
    """``[hardware]`` or ``[domain]``: conditions on the CPU, or on the op."""
    try:
        op, when = parse_pattern("*", data.get(section, {}))
    except ConditionError as error:
        source.fail(str(error), section, 0, error.key)
    for name in when:
        if (FEATURES[name].of == "cpu") != (section == "hardware"):
            legal = [n for n, f in FEATURES.items() if (f.of == "cpu") == (section == "hardware")]
            source.fail(
                f"{name} does not belong in [{section}]; {did_you_mean(name, legal)}", section
            )
    return Pattern(op, when)


def _check_head(source: TableText, data: Mapping[str, Any]) -> None:
    schema = data.get("schema")
    if type(schema) is not int:
        source.fail(f"no schema; write schema = {SCHEMA} in the first line", key="schema")
    if schema > SCHEMA:
        source.fail(
            f"schema {schema} is newer than this x86quant reads ({SCHEMA}); upgrade x86quant",
            key="schema",
        )
    if schema < 1:
        source.fail(f"unknown schema {schema}; write schema = {SCHEMA}", key="schema")
    source.check_keys(data, _TABLE_KEYS)
    for key, value in data.items():
        if type(value) is not _TABLE_KEYS[key]:
            source.fail(f"{key} must be {_TYPE_NAMES[_TABLE_KEYS[key]]}, not {value!r}", key=key)
    if not data.get("name"):
        source.fail('no name; write name = "..."', key="name")
    for key, value in data.get("provenance", {}).items():
        if not isinstance(value, str | int | float):
            source.fail(f"{key} must be a text or a number", "provenance", 0, key)
        if isinstance(value, float) and not math.isfinite(value):
            source.fail(f"{key} = {value} is no finite number", "provenance", 0, key)


def _check_complete(source: TableText, rules: tuple[Rule, ...]) -> None:
    for kind in OP_KINDS:
        if not any(kind in OPS[rule.op] and not rule.when for rule in rules):
            source.fail(
                f"no default for {kind}: end the table with a [[rule]] without when, "
                'for that op or for op = "*", or let it extend another table',
                "rule",
                max(len(rules) - 1, 0),
            )


def parse_table(
    text: str,
    path: str = "<text>",
    kernels: Collection[str] | None = None,
    _extending: tuple[str, ...] = (),
) -> RuleTable:
    """Read and check a table; ``path`` names it in errors.

    With ``kernels``, a kernel that is not one of them is an error too.
    """
    data = parse_toml(text, path)
    source = TableText(text, path)
    _check_head(source, data)
    name = data["name"]
    rules = _read_rules(source, data, name)
    base = None
    if "extends" in data:
        base = _read_base(source, data["extends"], path, _extending)
    else:
        _check_complete(source, rules)
        if "domain" in data:
            source.fail(
                'a table with a [domain] says nothing outside it: add extends = "default"', "domain"
            )
    table = RuleTable(
        name,
        rules,
        data["schema"],
        data.get("description", ""),
        data.get("provenance", {}),
        _read_section(source, data, "hardware"),
        _read_section(source, data, "domain"),
        _read_entries(source, data, name),
        _read_denials(source, data, name),
        base,
        path,
    )
    if kernels is not None:
        table.check_kernels(kernels)
    return table


def _read_base(source: TableText, extends: str, path: str, extending: tuple[str, ...]) -> RuleTable:
    beside = Path(path).parent / extends
    try:
        found = beside if extends.endswith(".toml") and beside.is_file() else find_table(extends)
    except RuleError as error:
        source.fail(str(error), key="extends")
    chain = (*extending, os.path.realpath(path))
    if os.path.realpath(found) in chain:
        source.fail(
            f"extends {extends!r} comes back to this table; break the circle", key="extends"
        )
    return read_table(found, _extending=chain)


def read_table(
    path: str | os.PathLike[str],
    kernels: Collection[str] | None = None,
    _extending: tuple[str, ...] = (),
) -> RuleTable:
    """Read and check the table in a file."""
    return parse_table(read_text(path), os.fspath(path), kernels, _extending)


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
