"""A calibrated model, from which int8 models with any choice of float layers can be built."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
from collections.abc import Collection, Iterator, Mapping
from typing import Literal

import torch
from torch import nn

from x86quant.calling.call import Call
from x86quant.calling.running import hand_over_hooks
from x86quant.calling.state import deep_copy
from x86quant.calling.wording import listed
from x86quant.capture.variants import takes
from x86quant.compiled.baked import Baked
from x86quant.compiled.guarded import GuardedModule
from x86quant.dynamic import to_dynamic
from x86quant.dynamic.convert import has_hooks
from x86quant.dynamic.group_weights import quantize_weight
from x86quant.dynamic.layers import weight_of
from x86quant.errors import InvalidInputError
from x86quant.quantization.channel_scales import Scaled
from x86quant.quantization.kit.equalization import Equalized
from x86quant.quantization.kit.halves import Halves
from x86quant.quantization.kit.simulation import FloatValues, simulated
from x86quant.quantization.kit.smoothing import Smoothed
from x86quant.quantization.scheme import Scheme
from x86quant.quantization.static.static_part import Layer, StaticPart
from x86quant.quantization.tracing.float_results import FloatResults

AS_ASKED = "as asked"


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

    @staticmethod
    def of_part(part: StaticPart, layer: Layer) -> NamedLayer:
        """``layer`` of ``part``, named as in the model."""
        is_function = part.module(layer.node) is None
        if not part.path:
            return NamedLayer(layer.name, layer.kind, part, layer.name, layer.scope)
        alone = len(part.layers) == 1 and part.path.rpartition(".")[2] == layer.name
        name = part.path if alone and not is_function else f"{part.path}.{layer.name}"
        scope = f"{part.path}.{layer.scope}" if layer.scope else part.path
        return NamedLayer(name, layer.kind, part, layer.name, scope)

    def is_in(self, wanted: str | type) -> bool:
        """Whether it is, or belongs to, the layer or class ``wanted``."""
        if isinstance(wanted, type):
            return self.kind == wanted.__name__
        return any(own == wanted or own.startswith(f"{wanted}.") for own in (self.name, self.scope))


@dataclasses.dataclass(frozen=True, slots=True)
class PreparedModel:
    """A float model with all that calibration found out about it.

    Attributes:
        model: the float model: a copy, smoothed.
        reference: the float model as it was given: a copy.
        exact: what that returns.
        scheme: what becomes int8.
        observer: how ranges were chosen.
        sample: the first calibration batches.
        halves: what the accuracy kit was fitted to and what it was not, where there is enough, of
            these batches or pieces of them; ranges were noted before those held back.
        parts: the static parts, calibrated.
        layers: every layer that can be int8, by name.
        batches: how many batches calibrated it.
        equalized: the pairs of layers that were equalized.
        smoothed: the layer norms whose scales moved into linears.
        scaled: the places where channels of linears of 4 bits were scaled.
        strict: whether calls that a graph does not hold for raise.
        weight_bits: of linears that are not static.
        weights: codes and scales of some of these that were chosen by the sample.
        notes: what a user should know.
        bits_by_layer: whether it was chosen which linears have 8 bits.
        has_budget: whether that was for the bytes of all of them.
    """

    model: nn.Module
    reference: nn.Module
    exact: FloatResults
    scheme: Scheme
    observer: str
    sample: tuple[Call, ...]
    halves: Halves
    parts: tuple[StaticPart, ...]
    layers: Mapping[str, NamedLayer]
    batches: int
    equalized: tuple[Equalized, ...]
    smoothed: tuple[Smoothed, ...]
    scaled: tuple[Scaled, ...]
    strict: bool
    weight_bits: int
    weights: Mapping[str, tuple[torch.Tensor, torch.Tensor]]
    notes: tuple[str, ...]
    bits_by_layer: bool = False
    has_budget: bool = False

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

    def with_eight_bits(self, names: Collection[str]) -> PreparedModel:
        """The same, with weights of 8 bits in the linears called ``names``."""
        linears = {name: self.model.get_submodule(name) for name in names}
        wider = {name: quantize_weight(weight_of(linear)) for name, linear in linears.items()}
        return dataclasses.replace(self, weights={**self.weights, **wider})

    def build(
        self,
        float_layers: Collection[str] = (),
        guarded: Collection[str] = (),
    ) -> nn.Module:
        """The int8 model.

        Args:
            float_layers: the layers that stay in float.
            guarded: parts, by path, whose attributes are read; they keep the float part too.

        Raises:
            UnsupportedError: a part cannot be lowered.
        """
        if len(self.parts) == 1 and not self.parts[0].path:
            return self._built(self.parts[0], self.model, set(float_layers), "" in guarded)
        kept = set(float_layers)
        result = deep_copy(self.model)
        for part in self.parts:
            inside = {layer.layer for layer in self.layers_of(part) if layer.name in kept}
            if len(inside) < len(part.layers):
                original = result.get_submodule(part.path)
                built = self._built(part, original, inside, part.path in guarded)
                built.show_class_of(original)
                result.set_submodule(part.path, built)
        if self.scheme.dynamic or self.scheme.weight_only:
            wanted = {layer.name for layer in self.layers.values() if layer.part is None} - kept
            result = to_dynamic(  # another one where the whole is one such layer
                result,
                weight_only=self.scheme.weight_only,
                embeddings=self._tables,
                weight_bits=self.weight_bits,
                weights=self.weights,
                keep=lambda name, _: name not in wanted,
                inplace=True,
            )
        return result

    @property
    def _tables(self) -> bool | Literal["tied"]:
        """Which tables have codes: with 4 bits those of a head, which would be there twice."""
        return self.scheme.weight_only or ("tied" if self.weight_bits < 8 else False)

    def _built(
        self,
        part: StaticPart,
        original: nn.Module,
        float_layers: set[str],
        guarded: bool,
    ) -> Baked:
        """``part`` in int8, in place of ``original``."""
        hooked = has_hooks(original)
        with_guard = part.needs_guard or hooked or guarded
        compiled = part.build(float_layers, flat=with_guard)
        if not with_guard:
            compiled.note_attributes_of(original)
            return compiled
        traced = part.traced
        result = GuardedModule(
            compiled,
            original if part.path else deep_copy(original),
            traced.form,
            traced.results,
            traced.guard,
            strict=self.strict,
        )
        hand_over_hooks(original, result)
        result.note_attributes_of(original)
        return result

    def takes(self, call: Call) -> bool:
        """Whether the model runs on ``call``, and graphs of all of it hold for that."""
        whole = [part for part in self.parts if not part.path]
        return all(part.inputs(call) is not None for part in whole) and takes(self.model, call)

    @property
    def can_hold_back(self) -> bool:
        """Whether there are calls that ranges were known before."""
        return bool(self.halves.held_back) and any(part.chosen_before for part in self.parts)

    @contextlib.contextmanager
    def simulated(
        self,
        names: Collection[str],
        *,
        held_back: bool = False,
        known: FloatValues | None = None,
    ) -> Iterator[nn.Module]:
        """The float model, in which the layers named compute as if they were int8.

        With ``held_back`` by ranges that were chosen without the calls held back; with ``known``
        for one and the same call again and again.
        """
        wanted = [self.layers[name] for name in names]
        static: dict[StaticPart, set[str]] = {}
        for one in wanted:
            if one.part is not None:
                static.setdefault(one.part, set()).add(one.layer)
        dynamic = {x.name for x in wanted if x.part is None}
        model = self.model
        if dynamic:
            model = to_dynamic(
                model,
                weight_only=self.scheme.weight_only,
                embeddings=self._tables,
                weight_bits=self.weight_bits,
                weights=self.weights,
                keep=lambda name, _: name not in dynamic,
            )
        with simulated(model, static, held_back=held_back, known=known) as found:
            yield found

    def layers_of(self, part: StaticPart) -> list[NamedLayer]:
        """The layers of one static part."""
        return [layer for layer in self.layers.values() if layer.part is part]
