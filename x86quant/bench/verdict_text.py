"""Verdicts as text and as JSON."""

from __future__ import annotations

import collections
import dataclasses
import json
from collections.abc import Sequence

from x86quant.bench.comparison import SpeedVerdict
from x86quant.bench.summary_text import title_of
from x86quant.terminal.text_table import text_table


def as_text(verdicts: Sequence[SpeedVerdict], changes: Sequence[str]) -> str:
    """Counts, a table, and what else changed."""
    counts = collections.Counter(verdict.outcome for verdict in verdicts)
    header = ("model", "setting", "back end", "verdict")
    rows = [(v.model, str(v.setting), title_of(v.backend), str(v)) for v in verdicts]
    parts = [
        ", ".join(f"{number} {outcome}" for outcome, number in counts.items()),
        text_table(header, rows),
        "\n".join(["changed besides:", *changes]) if changes else "",
    ]
    return "\n\n".join(part for part in parts if part)


def as_json(verdicts: Sequence[SpeedVerdict], changes: Sequence[str]) -> str:
    """The same as data."""
    data = [{**dataclasses.asdict(verdict), "text": str(verdict)} for verdict in verdicts]
    return json.dumps({"verdicts": data, "changed": list(changes)}, indent=1)
