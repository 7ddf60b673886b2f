"""``Choices``: which layers of a calibrated model are int8, why, and how good that is."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping

from torch import nn

from x86quant.calling.state import deep_copy
from x86quant.quantization.prepared import PreparedModel
from x86quant.quantization.search import SearchResult
from x86quant.quantization.static.part_search import of_other_forms
from x86quant.quantization.summary import Summary


@dataclasses.dataclass(frozen=True, slots=True)
class Choices:
    """Which layers are int8, and why the others are not.

    Attributes:
        prepared: the calibrated model.
        reasons: for each layer in float, why.
        guarded: whether every part also answers for the float part's attributes.
        notes: what a user should know.
        search: how float layers were chosen to hold a metric.
        sqnr_db: signal to noise of each float tensor in the result: of all of it, or of channels
            that have much less.
        fitted_db: the same by the ranges that the model has, which were chosen with all data seen.
        agreement: in which share of how many rows the largest value is the float model's.
        above_half: in which share of how many probabilities above one half both agree.
        integers: where it returns no floating-point numbers, in which share of how many integers
            both agree.
        worst: channels that are much further from the float model's than the rest.
        perplexity: of a causal language model, and of it in float.
        harm: of layers that were tried alone, in dB.
    """

    prepared: PreparedModel
    reasons: Mapping[str, str]
    guarded: bool = False
    notes: tuple[str, ...] = ()
    search: SearchResult | None = None
    sqnr_db: tuple[float, ...] = ()
    fitted_db: tuple[float, ...] = ()
    agreement: tuple[float, int] | None = None
    above_half: tuple[float, int] | None = None
    integers: tuple[float, int] | None = None
    worst: str = ""
    perplexity: tuple[float, float] | None = None
    harm: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def searched(self, result: SearchResult) -> Choices:
        """The same with the float layers that a search found."""
        reasons = {**self.reasons, **result.reasons}
        return dataclasses.replace(self, reasons=reasons, search=result)

    def without(self, names: Collection[str], why: str) -> Choices:
        """The same with these layers in float."""
        more = {name: why for name in self.prepared.layers if name in names}
        return dataclasses.replace(self, reasons={**more, **self.reasons})

    def noting(self, note: str) -> Choices:
        """The same with one more note."""
        return dataclasses.replace(self, notes=(*self.notes, note))

    def without_figures(self) -> Choices:
        """The same, of which nothing is known."""
        return dataclasses.replace(
            self, sqnr_db=(), agreement=None, above_half=None, integers=None, worst=""
        )

    @property
    def int8_layers(self) -> tuple[str, ...]:
        """The layers that are int8, by name."""
        return tuple(name for name in self.prepared.layers if name not in self.reasons)

    def units(self) -> dict[str, set[str]]:
        """What can be put back to float by itself: int8 layers of each part, and dynamic layers."""
        found: dict[str, set[str]] = {}
        for name in self.int8_layers:
            part = self.prepared.layers[name].part
            found.setdefault(name if part is None else part.path, set()).add(name)
        return found

    def build(self) -> nn.Module:
        """The model; the float one if no layer is int8."""
        if not self.int8_layers:
            return deep_copy(self.prepared.reference)
        guarded = [part.path for part in self.prepared.parts] if self.guarded else ()
        return self.prepared.build(self.reasons, guarded)

    def summary(self) -> Summary:
        """What was done."""
        prepared = self.prepared
        parts = [part for part in prepared.parts if part.path in self.units()]
        return Summary(
            mode=prepared.scheme.mode,
            why=prepared.scheme.why,
            traced_by={part.path: part.traced.method for part in parts},
            batches=prepared.batches,
            observer=prepared.observer if prepared.parts else None,
            int8_layers=self.int8_layers,
            float_layers=dict(self.reasons),
            equalized=prepared.equalized,
            smoothed=prepared.smoothed,
            scaled=prepared.scaled,
            corrected=sum(len(part.corrections) for part in parts),
            sqnr_db=self.sqnr_db,
            agreement=self.agreement,
            above_half=self.above_half,
            integers=self.integers,
            worst=self.worst,
            perplexity=self.perplexity,
            notes=(*prepared.notes, *self.notes),
            search=self.search,
            example=prepared.sample[0] if prepared.sample else None,
            other_calls=tuple(of_other_forms(prepared.reference, prepared.sample)),
        )
