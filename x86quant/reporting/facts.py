"""What a report consists of: facts about a model and its layers, as data and as text."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy
import torch

from x86quant.explaining.int8_proof import ComputeReport
from x86quant.files import write_aside
from x86quant.hardware.cpu import cpu
from x86quant.reporting.beside_float import BesideFloat
from x86quant.reporting.page import page
from x86quant.terminal.text_table import text_table


class Precision(Protocol):
    """How precise the result of one layer is; ``quantization.LayerStatistics`` is one."""

    @property
    def sqnr_db(self) -> float:
        """Signal to quantization noise, against the float model."""

    @property
    def min(self) -> float:
        """The float model's least value."""

    @property
    def max(self) -> float:
        """The float model's largest value."""

    @property
    def saturation_rate(self) -> float:
        """The share of values outside of the quantized range."""


@dataclasses.dataclass(frozen=True)
class LayerFacts:
    """One step of a compiled model, and whether it computes in float. None: not measured."""

    layer: str
    op: str
    kernel: str
    rule: str
    reason: str
    microseconds: float | None = None
    sqnr_db: float | None = None
    low: float | None = None
    high: float | None = None
    saturation: float | None = None
    float_us: float | None = None
    in_float: bool = False

    def cells(self) -> tuple[str, ...]:
        """As text: layer, op, kernel, rule, µs, float's µs, SQNR, low, high, saturation."""
        return (
            self.layer,
            self.op,
            self.kernel,
            self.rule or "–",
            _text(self.microseconds, "{:.1f}"),
            _text(self.float_us, "{:.1f}"),
            _text(self.sqnr_db, "{:.1f}"),
            _text(self.low, "{:.3g}"),
            _text(self.high, "{:.3g}"),
            _text(self.saturation, "{:.2%}"),
        )


@dataclasses.dataclass(frozen=True)
class ModelReport:
    """Facts about a compiled model: data, a summary when printed, and a page of HTML.

    Attributes:
        title: what the page is called.
        facts: name and value of what concerns the whole model.
        layers: in the order they run.
        notes: headings and texts, such as the log of a search.
        beside: the float model beside it, if there is one.
    """

    title: str
    facts: Mapping[str, str]
    layers: tuple[LayerFacts, ...]
    notes: tuple[tuple[str, str], ...] = ()
    beside: BesideFloat | None = None

    def with_float(self, beside: BesideFloat) -> ModelReport:
        """The same with the float model beside it: its times go to the first step of each layer."""
        seen: set[str] = set()
        layers = []
        for layer in self.layers:
            us = None if layer.layer in seen else beside.layer_us.get(layer.layer)
            seen.add(layer.layer)
            layers.append(dataclasses.replace(layer, float_us=us))
        facts = dict(self.facts)
        if beside.float_time is not None and beside.int8_time is not None:
            ratio = beside.float_time.median / beside.int8_time.median
            facts["beside float"] = (
                f"float takes {beside.float_time.median * 1e3:.3f} ms, int8 "
                f"{beside.int8_time.median * 1e3:.3f} ms in turn with it: {ratio:.2f} times as fast"
            )
        return dataclasses.replace(self, facts=facts, layers=tuple(layers), beside=beside)

    def summary(self) -> list[str]:
        """At most five lines: speed, what dominates, what is int8, precision, the machine."""
        facts = self.facts
        speed = f"Speed: {facts.get('time', 'not timed')}"
        if "roofline" in facts:
            speed += f"; {facts['roofline']}"
        if "beside float" in facts:
            speed += f"; {facts['beside float']}"
        int8 = f"Int8: {facts['int8 really ran']}; {facts['steps']}"
        lines = [speed, self._dominating(), int8]
        if "fused blocks" in facts:
            lines[2] += f"; fused blocks: {facts['fused blocks'].partition(':')[0]}"
        worst = facts.get("least precise layer")
        precision = f"least in {worst}" if worst else "not compared with a float model"
        if self.beside is not None and self.beside.outputs:
            least = min(self.beside.outputs, key=lambda output: output.sqnr_db)
            precision = f"{least.sqnr_db:.1f} dB at the output, {least.told}; {precision}"
        lines.append(f"Precision: {precision}")
        lines.append(f"Measured on: {facts['CPU']}; {facts['versions']}; inputs {facts['inputs']}")
        return [line for line in lines if line]

    def _dominating(self) -> str:
        """The steps that take most of the time."""
        timed = [layer for layer in self.layers if layer.microseconds]
        total = sum(layer.microseconds or 0.0 for layer in timed)
        if not timed:
            return ""
        longest = sorted(timed, key=lambda layer: -(layer.microseconds or 0.0))[:3]
        told = [f"{x.layer} {(x.microseconds or 0.0) / total:.0%} ({x.op})" for x in longest]
        in_float = sum(layer.microseconds or 0.0 for layer in timed if layer.in_float) / total
        return f"Most time: {', '.join(told)}; float ops {in_float:.0%}"

    def to_html(self) -> str:
        """One self-contained page."""
        return page(self)

    def to_json(self) -> str:
        """Everything as JSON text."""
        return json.dumps(dataclasses.asdict(self), indent=2, allow_nan=False, default=dict)

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the page to ``path``; never half of it."""
        write_aside(Path(path), self.to_html())

    def __str__(self) -> str:
        summary = "\n".join(self.summary())
        facts = "\n".join(f"{name}: {value}" for name, value in self.facts.items())
        header = (
            "layer",
            "op",
            "kernel",
            "rule",
            "µs",
            "float µs",
            "SQNR dB",
            "low",
            "high",
            "saturated",
        )
        table = text_table(header, [layer.cells() for layer in self.layers], right=header[4:])
        return f"{self.title}\n\n{summary}\n\n{table}\n\n{facts}"


def duration(seconds: float, runs: int, threads: int) -> str:
    """How long a call takes."""
    used = "1 thread" if threads == 1 else f"{threads} threads"
    return f"{seconds * 1e3:.3f} ms a call (median of {runs}, {used})"


def with_precision(layer: LayerFacts, precision: Precision | None) -> LayerFacts:
    """``layer`` with what is known of its precision."""
    if precision is None or layer.op in ("copy", "shuffle"):
        return layer
    return dataclasses.replace(
        layer,
        sqnr_db=_finite(precision.sqnr_db),
        low=precision.min,
        high=precision.max,
        saturation=precision.saturation_rate,
    )


def facts_of(
    proof: ComputeReport, inputs: Sequence[Any], layers: Sequence[LayerFacts]
) -> dict[str, str]:
    """What concerns a whole model: CPU, versions, inputs, proof of int8, its worst layer."""
    in_float = len(proof.floats) + len(proof.allowed)
    facts = {
        "CPU": str(cpu()).splitlines()[0],
        "versions": f"torch {torch.__version__}, numpy {numpy.__version__}",
        "inputs": ", ".join(
            "×".join(map(str, x.shape)) for x in inputs if isinstance(x, torch.Tensor)
        ),
        "int8 really ran": f"{len(proof.int8)} convolutions and matrix products in int8, "
        f"{in_float} in float",
        "steps": f"{len(layers)} steps, {sum(x.in_float for x in layers)} of them float ops",
    }
    judged = [layer for layer in layers if layer.sqnr_db is not None]
    if judged:
        worst = min(judged, key=lambda layer: layer.sqnr_db or 0.0)
        facts["least precise layer"] = f"{worst.layer}: {worst.sqnr_db:.1f} dB"
    return facts


def _finite(value: float) -> float | None:
    """None for the infinite ratio of a layer without noise."""
    return value if abs(value) < float("inf") else None


def _text(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)
