"""Writing rule tables as TOML, such that ``tables.table_reader`` reads back the same table."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path

from x86quant.files import write_aside
from x86quant.spec import OpSpec
from x86quant.tables.conditions import Condition, Source
from x86quant.tables.shipped import shipped_tables
from x86quant.tables.table import SPEC_KEYS, USUAL_SIDES, Entry, Rule, RuleTable


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, Mapping):
        pairs = (f"{_key(k)} = {_toml(v)}" for k, v in value.items())
        return f"{{ {', '.join(pairs)} }}"
    raise TypeError(f"{type(value).__name__} has no place in a rule table")


def _key(name: str) -> str:
    return name if re.fullmatch(r"[\w-]+", name, re.ASCII) else _toml(name)


def _sources(when: Mapping[str, Condition]) -> dict[str, Source]:
    return {name: condition.source for name, condition in when.items()}


def _spec_items(spec: OpSpec) -> dict[str, object]:
    """The fields of an entry's spec that differ from what is read when they are left out."""
    items = {}
    for field in dataclasses.fields(spec):
        value = getattr(spec, field.name)
        sides = USUAL_SIDES.get(field.name)
        standard = field.default if sides is None else (sides,) * spec.dims
        if field.name in SPEC_KEYS and value != standard:
            items[field.name] = value
    return items


def dumps(table: RuleTable) -> str:
    """``table`` as TOML: the same table gives the same bytes, and reads back equal."""
    lines = [f"schema = {table.schema}", f"name = {_toml(table.name)}"]
    if table.description:
        lines.append(f"description = {_toml(table.description)}")
    if table.base is not None:
        lines.append(f"extends = {_toml(_reference(table.base))}")
    sections: list[tuple[str, Mapping[str, object]]] = [
        ("provenance", table.provenance),
        ("hardware", _sources(table.hardware.when)),
        ("domain", _sources(table.domain.when)),
    ]
    for section, items in sections:
        if items:
            lines += ["", f"[{section}]"]
            lines += [f"{_key(key)} = {_toml(value)}" for key, value in items.items()]
    for denial in table.denials:
        lines += ["", "[[deny]]", f"spec = {_toml(_spec_items(denial.spec))}"]
        lines.append(f"kernel = {_toml(denial.kernel)}")
        lines += [f"because = {_toml(denial.because)}"] if denial.because else []
    for entry in table.entries:
        lines += ["", "[[entry]]", f"spec = {_toml(_spec_items(entry.spec))}"]
        lines += _preference(entry)
    for rule in table.rules:
        lines += ["", "[[rule]]", f"op = {_toml(rule.op)}"]
        lines += [f"when = {_toml(_sources(rule.when))}"] if rule.when else []
        lines += _preference(rule)
    return "\n".join(lines) + "\n"


def _reference(base: RuleTable) -> str:
    """How ``extends`` names ``base``: a shipped table by name, another by its path."""
    shipped = shipped_tables().get(base.name)
    return base.name if shipped and str(shipped) == base.path else os.path.abspath(base.path)


def _preference(item: Rule | Entry) -> list[str]:
    lines = [f"use = {_toml(item.use[0] if len(item.use) == 1 else item.use)}"]
    return lines + ([f"because = {_toml(item.because)}"] if item.because else [])


def write_table(table: RuleTable, path: str | os.PathLike[str]) -> None:
    """Write ``table`` so that a reader, or a crash, never sees half of it."""
    write_aside(Path(path), dumps(table))
