"""A calibrated model, from which int8 models with any choice of float layers can be built."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import difflib
import logging
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from torch import nn

from x86quant.dynamic import to_dynamic
from x86quant.errors import InvalidInputError, UnsupportedError
from x86quant.quantization import equalization, smoothing
from x86quant.quantization.batches import Calibration, Call
from x86quant.quantization.bias_correction import BiasCorrection
from x86quant.quantization.running import feed
from x86quant.quantization.scheme import Scheme, dynamic_layers, left_in_float, static_candidates
from x86quant.quantization.simulation import SimulatedPart
from x86quant.quantization.static_part import Layer, Ranges, StaticPart
from x86quant.quantization.summary import Summary
from x86quant.quantization.tracing import Traced, trace
from x86quant.quantization.wording import listed

_log = logging.getLogger("x86quant.quantization")

AS_ASKED = "as asked"

#: On how many calls what was traced is compared with the model.
_EXAMPLES = 2


@dataclasses.dataclass(frozen=True, slots=True)
class Kit:
    """Which steps of the accuracy kit are taken: always, never, or (None) where they help."""

    equalize: bool | None = None
    bias_correction: bool | None = None
    smooth_quant: bool | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class NamedLayer:
    """A layer that can be int8 or float.

    Attributes:
        name: its path in the model, or for a function the name of its node in the graph.
        kind: its class, or the function.
        part: the static part it belongs to; None if it is a dynamic layer.
        layer: its name within the part.
        scope: the path of the module whose code calls it.
    """

    name: str
    kind: str
    part: StaticPart | None
    layer: str
    scope: str

    def is_in(self, wanted: str | type) -> bool:
        """Whether it is, or belongs to, the layer or class ``wanted``."""
        if isinstance(wanted, type):
            return self.kind == wanted.__name__
        return any(own == wanted or own.startswith(f"{wanted}.") for own in (self.name, self.scope))


class PreparedModel:
    """A float model with all that calibration found out about it.

    Attributes:
        model: the float model: a copy, smoothed.
        sample: the first calibration batches.
    """

    def __init__(
        self, model: nn.Module, plan: Scheme, data: Calibration | None, ranges: Ranges, kit: Kit
    ) -> None:
        self.model = copy.deepcopy(model).eval()
        self.plan = plan
        self.ranges = ranges
        self.sample: tuple[Call, ...] = () if data is None else data.sample
        self.notes: list[str] = []
        self.smoothed = self._smooth(kit)
        self.equalized: tuple[equalization.Equalized, ...] = ()
        self.batches = 0
        self.parts: tuple[StaticPart, ...] = ()
        if plan.static:
            assert data is not None
            self._prepare_static(data, kit)
        self.layers = {layer.name: layer for layer in self._layers()}
        if not self.layers:
            raise UnsupportedError(
                f"{type(model).__name__} has no layer that mode {plan.mode!r} can turn into int8"
            )

    def layers_in(self, wanted: Collection[str | type]) -> set[str]:
        """The names of the layers that ``wanted`` names: layers, containers or classes.

        Raises:
            InvalidInputError: one of them names none.
        """
        found: set[str] = set()
        for one in wanted:
            names = {layer.name for layer in self.layers.values() if layer.is_in(one)}
            if not names:
                close = difflib.get_close_matches(str(one), list(self.layers), n=3)
                hint = (
                    f"did you mean {' or '.join(close)}?"
                    if close
                    else (f"the layers are {listed(list(self.layers), 20)}")
                )
                raise InvalidInputError(f"float_layers: no int8 layer is called {one!r}; {hint}")
            found |= names
        return found

    def build(self, float_layers: Collection[str] = ()) -> nn.Module:
        """The int8 model, with the layers named in float.

        Raises:
            UnsupportedError: a part cannot be lowered.
        """
        if len(self.parts) == 1 and not self.parts[0].path:
            return self.parts[0].build(float_layers)
        kept = set(float_layers)
        result = copy.deepcopy(self.model)
        for part in self.parts:
            inside = {layer.layer for layer in self._of(part) if layer.name in kept}
            if len(inside) < len(part.layers):
                result.set_submodule(part.path, part.build(inside))
        if self.plan.dynamic or self.plan.weight_only:
            wanted = {layer.name for layer in self.layers.values() if layer.part is None} - kept
            to_dynamic(
                result,
                weight_only=self.plan.weight_only,
                embeddings=self.plan.weight_only,
                keep=lambda name, _: name not in wanted,
                inplace=True,
            )
        return result

    @contextlib.contextmanager
    def simulated(self, names: Collection[str]) -> Iterator[nn.Module]:
        """The float model, in which the layers named compute as if they were int8."""
        wanted = [self.layers[name] for name in names]
        whole = [x for x in wanted if x.part is not None and not x.part.path]
        if whole:
            part = whole[0].part
            assert part is not None
            yield SimulatedPart(part, {x.layer for x in whole})
            return
        swapped: dict[str, nn.Module] = {}
        for part in {x.part for x in wanted if x.part is not None}:
            inside = {x.layer for x in wanted if x.part is part}
            swapped[part.path] = SimulatedPart(part, inside)
        dynamic = {x.name for x in wanted if x.part is None}
        model = self.model
        if dynamic:
            model = to_dynamic(
                model,
                weight_only=self.plan.weight_only,
                embeddings=self.plan.weight_only,
                keep=lambda name, _: name not in dynamic,
            )
        before = {path: model.get_submodule(path) for path in swapped}
        try:
            for path, module in swapped.items():
                model.set_submodule(path, module)
            yield model
        finally:
            for path, module in before.items():
                model.set_submodule(path, module)

    def summary(self, float_layers: dict[str, str]) -> Summary:
        """What was done, with ``float_layers`` in float for the reasons given."""
        static = bool(self.parts)
        return Summary(
            mode=self.plan.mode,
            why=self.plan.why,
            traced_by={part.path: part.traced.method for part in self.parts},
            batches=self.batches,
            observer=self.ranges.observer if static else None,
            int8_layers=tuple(name for name in self.layers if name not in float_layers),
            float_layers=dict(float_layers),
            equalized=self.equalized,
            smoothed=self.smoothed,
            corrected=sum(len(part.corrections) for part in self.parts),
            notes=tuple(self.notes),
        )

    # --- preparation ---

    def _smooth(self, kit: Kit) -> tuple[smoothing.Smoothed, ...]:
        wanted = kit.smooth_quant
        if wanted is False or self.plan.weight_only:
            return ()
        if not self.sample:
            if wanted:
                raise InvalidInputError("smooth_quant=True needs calibration data")
            return ()
        if not any(isinstance(m, nn.LayerNorm) for m in self.model.modules()):
            return ()
        return smoothing.smooth(
            self.model, self.sample, per_token=self.plan.dynamic, always=wanted is True
        )

    def _prepare_static(self, data: Calibration, kit: Kit) -> None:
        traced = self._trace_parts(data.sample)
        if kit.equalize is not False:
            self._equalize(traced, always=kit.equalize is True)
        self.parts = tuple(
            StaticPart(path, part, example, self.ranges) for path, (part, example) in traced.items()
        )

        def counted() -> Iterator[Call]:
            for call in data.stream():
                self.batches += 1
                yield call

        feed(self.model, counted(), {part.path: part.calibrate for part in self.parts})
        if kit.bias_correction is not False:
            corrections = {part.path: BiasCorrection(part) for part in self.parts}
            feed(self.model, self.sample, {k: v.observe for k, v in corrections.items()})
            for part in self.parts:
                part.corrections = corrections[part.path].corrections()

    def _trace_parts(self, sample: Sequence[Call]) -> dict[str, tuple[Traced, Call]]:
        """The outermost parts that can be traced, each with an example of its inputs."""
        found: dict[str, tuple[Traced, Call]] = {}
        refused: list[str] = []
        seen = self._example_calls(sample)
        for path, module in static_candidates(self.model, self.plan):
            if any(not p or path == p or path.startswith(f"{p}.") for p in found):
                continue
            if path not in seen:
                continue
            try:
                found[path] = (trace(holder(path, module), seen[path]), seen[path][0])
            except UnsupportedError as error:
                if not path and not self.plan.dynamic:
                    self.notes.append(f"the whole cannot be one graph: {error}")
                refused.append(path or type(module).__name__)
                _log.info("%s cannot be traced: %s", path or "the model", error)
                continue
            if found[path][0].note:
                self.notes.append(found[path][0].note)
        if not found:
            raise UnsupportedError(
                f"no part of {type(self.model).__name__} can be traced: {'; '.join(self.notes)}. "
                'mode="dynamic" needs no tracing'
            )
        if "" not in found:
            self.notes.append(f"static parts: {listed(list(found))}; torch runs what is between")
        return found

    def _example_calls(self, sample: Sequence[Call]) -> dict[str, list[Call]]:
        """The first calls of each submodule when the model runs on each call of ``sample``."""
        calls: dict[str, list[Call]] = {}
        paths = [path for path, _ in self.model.named_modules()]

        def keeping(path: str) -> Any:
            def keep(call: Call) -> None:
                found = calls.setdefault(path, [])
                if len(found) < _EXAMPLES:
                    found.append(call)

            return keep

        feed(self.model, sample[:_EXAMPLES], {path: keeping(path) for path in paths})
        return calls

    def _equalize(self, traced: dict[str, tuple[Traced, Call]], always: bool) -> None:
        ranges = {
            path: equalization.ChannelRanges(part.graph_module)
            for path, (part, _) in traced.items()
        }
        feed(self.model, self.sample, {path: r.observe for path, r in ranges.items()})
        for path, seen in ranges.items():
            graph = traced[path][0].graph_module
            self.equalized += equalization.equalize(graph, seen, path, always=always)

    def _layers(self) -> Iterator[NamedLayer]:
        for part in self.parts:
            for layer in part.layers:
                yield _named(part, layer)
        if not (self.plan.dynamic or self.plan.weight_only):
            return
        inside = tuple(f"{part.path}." for part in self.parts)
        left = left_in_float(self.model, self.plan)
        for reason in dict.fromkeys(left.values()):
            names = [name for name, why in left.items() if why == reason]
            self.notes.append(
                f"{len(names)} layers with weights stay in float, because {reason}: {listed(names)}"
            )
        called = self._called()
        unused = []
        for name, module in dynamic_layers(self.model, self.plan):
            if f"{name}.".startswith(inside):
                continue
            if called is None or name in called:
                yield NamedLayer(name, type(module).__name__, None, name, name)
            else:
                unused.append(name)
        if unused:
            self.notes.append(
                f"in float, because the model reads their weights instead of calling them: "
                f"{listed(unused)}"
            )

    def _called(self) -> set[str] | None:
        """The modules that are called when the model runs; None without data to run it on."""
        if not self.sample:
            return None
        return set(self._example_calls(self.sample[:1]))

    def _of(self, part: StaticPart) -> list[NamedLayer]:
        return [layer for layer in self.layers.values() if layer.part is part]


class _Holder(nn.Module):
    """Calls one layer by its own name, so that a tracer sees a call of it."""

    def __init__(self, name: str, layer: nn.Module) -> None:
        super().__init__()
        self._name = name
        self.add_module(name, layer)

    def forward(self, x: Any) -> Any:
        """The layer's result."""
        return self.get_submodule(self._name)(x)


def holder(path: str, module: nn.Module) -> nn.Module:
    """A copy of ``module`` to trace, with something around it if tracers see it as one layer."""
    module = copy.deepcopy(module)
    if isinstance(module, nn.Linear | nn.modules.conv._ConvNd):
        return _Holder(path.rpartition(".")[2] or "layer", module)
    return module


def _named(part: StaticPart, layer: Layer) -> NamedLayer:
    is_function = part.module(layer.node) is None
    if not part.path:
        return NamedLayer(layer.name, layer.kind, part, layer.name, layer.scope)
    alone = len(part.layers) == 1 and part.path.rpartition(".")[2] == layer.name
    name = part.path if alone and not is_function else f"{part.path}.{layer.name}"
    scope = f"{part.path}.{layer.scope}" if layer.scope else part.path
    return NamedLayer(name, layer.kind, part, layer.name, scope)
