"""What quantization did with a model: data, and text when printed."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from x86quant.calling.wording import listed
from x86quant.quantization.judging import in_words

if TYPE_CHECKING:
    from x86quant.calling.call import Call
    from x86quant.quantization.channel_scales import Scaled
    from x86quant.quantization.kit.equalization import Equalized
    from x86quant.quantization.kit.smoothing import Smoothed
    from x86quant.quantization.search import SearchResult


@dataclasses.dataclass(frozen=True, slots=True)
class Summary:
    """What was done.

    Attributes:
        mode: "static", "dynamic", "static and dynamic" or "weight_only".
        why: why this mode.
        traced_by: for each static part, by path, "torch.fx" or "torch.export".
        batches: how many calibration batches were seen.
        observer: how activation ranges were chosen; None without static parts.
        int8_layers: the layers that became int8, by name.
        float_layers: those that could have but did not, by name, each with its reason.
        equalized: the pairs of layers that were equalized.
        smoothed: the layer norms whose scales moved into linears.
        scaled: the places where channels of linears of 4 bits were scaled.
        corrected: how many biases were corrected.
        sqnr_db: signal to noise of each float tensor that the model returns, against the float
            model, on calibration data; empty without data.
        agreement: where it returns rows of classes, in which share of how many rows the largest is
            the float model's.
        above_half: where it returns probabilities, of how many that are above one half in int8 or
            in float, and in which share of them they are so in both.
        integers: where it returns no floating-point numbers, in which share of how many integers
            both agree.
        worst: channels that are much further from the float model's than the rest, and how far.
        perplexity: of a causal language model, and of it in float, on tokens of that data.
        notes: what else a user should know.
        search: how float layers were chosen to hold a metric.
        example: the arguments of one call, out of the calibration data; None without data.
        other_calls: one of each other form that was among the data: with another argument, say.
    """

    mode: str
    why: str
    traced_by: dict[str, str]
    batches: int
    observer: str | None
    int8_layers: tuple[str, ...]
    float_layers: dict[str, str]
    equalized: tuple[Equalized, ...] = ()
    smoothed: tuple[Smoothed, ...] = ()
    scaled: tuple[Scaled, ...] = ()
    corrected: int = 0
    sqnr_db: tuple[float, ...] = ()
    agreement: tuple[float, int] | None = None
    above_half: tuple[float, int] | None = None
    integers: tuple[float, int] | None = None
    worst: str = ""
    perplexity: tuple[float, float] | None = None
    notes: tuple[str, ...] = ()
    search: SearchResult | None = None
    example: Call | None = dataclasses.field(default=None, repr=False, compare=False)
    other_calls: tuple[Call, ...] = dataclasses.field(default=(), repr=False, compare=False)

    def line(self) -> str:
        """The essence in one line."""
        count = len(self.int8_layers)
        text = f"{self.mode} int8, {count} layer{'s' * (count != 1)}"
        if self.float_layers:
            text += f", {len(self.float_layers)} in float ({listed(list(self.float_layers))})"
        return text

    def to_dict(self) -> dict[str, Any]:
        """As plain values, for JSON."""
        return {
            "mode": self.mode,
            "why": self.why,
            "traced_by": self.traced_by,
            "batches": self.batches,
            "observer": self.observer,
            "int8_layers": list(self.int8_layers),
            "float_layers": self.float_layers,
            "equalized": [str(pair) for pair in self.equalized],
            "smoothed": [str(norm) for norm in self.smoothed],
            "scaled": [str(place) for place in self.scaled],
            "corrected": self.corrected,
            "sqnr_db": list(self.sqnr_db),
            "agreement": None if self.agreement is None else list(self.agreement),
            "above_half": None if self.above_half is None else list(self.above_half),
            "integers": None if self.integers is None else list(self.integers),
            "worst": self.worst,
            "perplexity": None if self.perplexity is None else list(self.perplexity),
            "notes": list(self.notes),
            "search": None if self.search is None else self.search.to_dict(),
        }

    def __str__(self) -> str:
        lines = [f"{self.line()}; {self.why}"]
        for method, paths in _by_value(self.traced_by).items():
            lines.append(f"traced by {method}" + (f": {listed(paths)}" if any(paths) else ""))
        if self.observer is not None:
            lines.append(f"calibrated on {self.batches} batches, observer {self.observer}")
        if self.equalized:
            lines.append(f"equalized {len(self.equalized)} pairs of layers")
        if self.smoothed:
            lines.append(f"smoothed {len(self.smoothed)} layer norms")
        if self.corrected:
            lines.append(f"corrected {self.corrected} biases")
        if self.sqnr_db:
            worst = f", the worst of {len(self.sqnr_db)} outputs" if len(self.sqnr_db) > 1 else ""
            least = min(self.sqnr_db)
            lines.append(f"{least:.1f} dB against float{worst}: {in_words(least)}")
        if self.worst:
            lines.append(f"further from float than the rest: {self.worst}")
        if self.agreement is not None:
            share, rows = self.agreement
            told = f"{share:.1%} of {rows} rows"
            lines.append(f"the largest value of a row is the float model's in {told}")
        if self.above_half is not None:
            share, values = self.above_half
            lines.append(
                f"of {values} probabilities above one half in int8 or in float, {share:.1%} are so "
                "in both"
            )
        if self.integers is not None:
            share, values = self.integers
            lines.append(f"{share:.1%} of the {values} integers returned are the float model's")
        if self.perplexity is not None:
            lines.append(
                "perplexity {:.4g} on calibration data, float {:.4g}".format(*self.perplexity)
            )
        lines += self.notes
        for reason, names in _by_value(self.float_layers).items():
            lines.append(f"{listed(names)} in float: {reason}")
        if self.search is not None:
            lines.append(str(self.search))
        return "\n".join(lines)


def _by_value(said: Mapping[str, str]) -> dict[str, list[str]]:
    """The names of which the same is said."""
    found: dict[str, list[str]] = {}
    for name, value in said.items():
        found.setdefault(value, []).append(name)
    return found
