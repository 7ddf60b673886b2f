"""``sensitivity``: how much each layer alone harms the model when it becomes int8."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import nn

from x86quant.calling.wording import alone
from x86quant.errors import InvalidInputError
from x86quant.observing.activations import ObserverName
from x86quant.quantization.batches import Data
from x86quant.quantization.harm import harms
from x86quant.quantization.layer_times import float_times
from x86quant.quantization.prepared import PreparedModel
from x86quant.quantization.preparing import prepare
from x86quant.quantization.scheme import Mode
from x86quant.quantization.search import Metric
from x86quant.quantization.settings import Settings, Switch
from x86quant.terminal.progress import counted
from x86quant.terminal.text_table import text_table


@dataclasses.dataclass(frozen=True, slots=True)
class LayerSensitivity:
    """One layer in int8, all others in float.

    Attributes:
        name: the layer.
        kind: its class or function.
        sqnr_db: signal to noise of the model's output; lower is worse.
        metric: the model's metric; None if none was given.
        drop: by how much it is below the float model's.
        float_us: microseconds the layer takes in float.
    """

    name: str
    kind: str
    sqnr_db: float
    metric: float | None
    drop: float | None
    float_us: float


@dataclasses.dataclass(frozen=True, slots=True)
class Sensitivity:
    """Layers by the harm they do, the worst first: data, and a table when printed.

    Attributes:
        layers: the layers.
        float_metric: the float model's metric; None if none was given.
    """

    layers: tuple[LayerSensitivity, ...]
    float_metric: float | None

    def __iter__(self) -> Iterator[LayerSensitivity]:
        return iter(self.layers)

    def __len__(self) -> int:
        return len(self.layers)

    def __getitem__(self, name: str) -> LayerSensitivity:
        for layer in self.layers:
            if layer.name == name:
                return layer
        raise KeyError(name)

    def to_dicts(self) -> list[dict[str, Any]]:
        """One plain dictionary a layer."""
        return [dataclasses.asdict(layer) for layer in self.layers]

    def to_json(self) -> str:
        """As JSON."""
        return json.dumps({"float_metric": self.float_metric, "layers": self.to_dicts()}, indent=2)

    def __str__(self) -> str:
        header = ["layer", "kind", "SQNR dB", "float µs"]
        rows = [[x.name, x.kind, f"{x.sqnr_db:.1f}", f"{x.float_us:.0f}"] for x in self.layers]
        if self.float_metric is not None:
            header += ["metric", "drop"]
            for row, layer in zip(rows, self.layers, strict=True):
                row += [f"{layer.metric:.6g}", f"{layer.drop:.6g}"]
        return text_table(header, rows)


def sensitivity(
    model: nn.Module,
    data: Data,
    *,
    metric: Metric | None = None,
    evaluation: Any = None,
    layers: Collection[str | type] | None = None,
    mode: Mode = "auto",
    observer: ObserverName | Literal["auto"] = "auto",
    equalize: Switch = "auto",
    smooth_quant: Switch = "auto",
    example_inputs: Sequence[Any] | None = None,
    progress: bool = True,
) -> Sensitivity:
    """Rank the layers of ``model`` by the harm each does alone in int8.

    Args:
        model: a float module on the CPU; it is not changed.
        data: as the ``calibration`` of :func:`x86quant.quantize`. Noise is measured on its first
            batches.
        metric: as in :func:`x86quant.quantize`. With it, layers are ranked by its drop, then by
            signal to noise.
        evaluation: handed to ``metric``.
        layers: only these: names, names of containers, or classes.
        mode: as in :func:`x86quant.quantize`.
        observer: as in :func:`x86quant.quantize`.
        equalize: as in :func:`x86quant.quantize`.
        smooth_quant: as in :func:`x86quant.quantize`.
        example_inputs: positional inputs, where their number is not clear from the batches.
        progress: draw progress on stderr when that is a terminal.
    """
    if data is None:
        raise InvalidInputError("sensitivity needs data: a tensor or an iterable of batches")
    settings = Settings(
        mode=mode,
        observer=observer,
        equalize=equalize,
        bias_correction=False,
        smooth_quant=smooth_quant,
        example_inputs=example_inputs,
        progress=progress,
    )
    with alone():
        return _ranked(prepare(model, data, settings), metric, evaluation, layers, progress)


def _ranked(
    prepared: PreparedModel,
    metric: Metric | None,
    evaluation: Any,
    layers: Collection[str | type] | None,
    progress: bool,
) -> Sensitivity:
    wanted = set(prepared.layers) if layers is None else prepared.layers_in(layers)
    names = [name for name in prepared.layers if name in wanted]
    times = float_times(prepared)
    more = () if evaluation is None else (evaluation,)

    def scored(candidate: nn.Module) -> float | None:
        if metric is None:
            return None
        with torch.no_grad():
            return float(metric(candidate, *more))

    reference = scored(prepared.model)
    found = []
    measured = counted(harms(prepared, names), len(names), "layers", shown=progress)
    for harm in measured:
        with prepared.simulated([harm.name]) as simulated:
            score = scored(simulated)
        drop = None if reference is None or score is None else reference - score
        kind = prepared.layers[harm.name].kind
        us = times.get(harm.name, 0.0)
        found.append(LayerSensitivity(harm.name, kind, harm.sqnr_db, score, drop, us))
    found.sort(key=lambda x: (-(x.drop or 0.0), x.sqnr_db))
    return Sensitivity(tuple(found), reference)
