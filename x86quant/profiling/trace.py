"""A profile in the Trace Event format, which Perfetto and chrome://tracing read."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from x86quant.profiling.run_step import OUTSIDE

if TYPE_CHECKING:
    from x86quant.profiling.profiler import Profile

_PROCESS, _RUN, _STEPS = 1, 1, 2


def chrome_trace(profile: Profile) -> str:
    """``profile`` as JSON text.

    One row has the run, the other its steps, end to end, each as long as its median. The time
    outside of graphs is known only as a total and drawn behind them; so is the time between
    kernels, as the gap at the end.
    """
    events: list[dict[str, Any]] = [
        _name("process_name", _RUN, "x86quant"),
        _name("thread_name", _RUN, "run"),
        _name("thread_name", _STEPS, "steps"),
        _event("run", "run", _RUN, 0.0, profile.run_us, {"threads": profile.threads}),
    ]
    at = 0.0
    for step in profile.steps:
        facts = step.to_dict()
        events.append(_event(step.step.layer, step.step.kind, _STEPS, at, step.microseconds, facts))
        at += step.microseconds
    if profile.outside_us:
        events.append(_event(OUTSIDE, "torch", _STEPS, at, profile.outside_us, {}))
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, allow_nan=False)


def _event(
    name: str, category: str, row: int, start: float, duration: float, args: dict[str, Any]
) -> dict[str, Any]:
    return {
        "name": name,
        "cat": category,
        "ph": "X",
        "pid": _PROCESS,
        "tid": row,
        "ts": start,
        "dur": duration,
        "args": args,
    }


def _name(what: str, row: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": _PROCESS, "tid": row, "args": {"name": name}}
