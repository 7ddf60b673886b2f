"""Reading and checking rule tables: the TOML files that say which kernel is preferred.

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

import math
import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from x86quant.errors import RuleError
from x86quant.spec import OP_KINDS, ROUTED_KINDS, OpSpec
from x86quant.tables.conditions import (
    OPS,
    Condition,
    ConditionError,
    Pattern,
    did_you_mean,
    parse_pattern,
)
from x86quant.tables.features import FEATURES
from x86quant.tables.shipped import find_table
from x86quant.tables.table import (
    SCHEMA,
    SPEC_KEYS,
    USUAL_SIDES,
    Denial,
    Entry,
    Rule,
    RuleTable,
    shape_in_table,
)
from x86quant.tables.table_text import TableText, parse_toml, read_text

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
_TYPE_NAMES = {int: "an integer", str: "a text", dict: "a table", list: "an array of tables"}


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
        "OpKind": value in ROUTED_KINDS if isinstance(value, str) else False,
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
    result = shape_in_table(result)
    for key in ("kernel", *USUAL_SIDES):
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
