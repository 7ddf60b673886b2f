"""Observers of activations: from the extreme values, or from a streaming histogram.

The histogram keeps a fixed number of bins however much data comes. Its bin width is a power of two
and 0 is always the edge of a bin: when the data outgrow it, neighbouring bins merge, which loses no
count and splits none, so the result does not depend on the order of the data.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, get_args

import torch

from x86quant.errors import InvalidInputError
from x86quant.lowering.tensor_memory import SeenTensors
from x86quant.observing.native_floats import counted, in_memory_order
from x86quant.observing.observer import NO_DATA, RangeObserver, scale_of

ObserverName = Literal["minmax", "histogram", "percentile", "mse", "kl"]
OBSERVER_NAMES: tuple[str, ...] = get_args(ObserverName)

_BINS = 2048
#: Ranges tried, as shares of the observed one.
_SHARES = torch.linspace(1.0, 0.02, 50, dtype=torch.float32)
#: The clipping of a normal distribution, in deviations, that makes the error of 8 bits least.
_BEST_RANGE = 3.9
#: Fewer different values than this are taken for all that there are.
_DISCRETE = 16
#: Bins must stay distinguishable in float32, and their numbers within int64.
_FINEST = -20


class ExtremesObserver(RangeObserver):
    """Takes the range from the least to the largest value seen.

    Attributes:
        useful: between which values what reads the codes tells them apart, if not everywhere;
            values beyond count as these.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.useful: tuple[float, float] | None = None
        self.register_buffer("min_val", torch.tensor(math.inf, dtype=torch.float32))
        self.register_buffer("max_val", torch.tensor(-math.inf, dtype=torch.float32))

    min_val: torch.Tensor
    max_val: torch.Tensor

    def forward(self, x_orig: torch.Tensor) -> torch.Tensor:
        """Look at the values of ``x_orig``, of any shape, and return it as it is."""
        if x_orig.numel():
            low, high = finite_range(self._in_useful_range(x_orig.detach().to(torch.float32)))
            self.min_val = torch.minimum(self.min_val, low)
            self.max_val = torch.maximum(self.max_val, high)
        return x_orig

    def _in_useful_range(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.useful is None else x.clamp(*self.useful)

    def calculate_qparams(self, **_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Scale and zero point of the range seen."""
        if not bool(self.min_val <= self.max_val):
            raise InvalidInputError(NO_DATA)
        return self.qparams(self.min_val, self.max_val)

    def extra_repr(self) -> str:
        """What ``repr`` shows between the brackets."""
        return f"min={float(self.min_val):.4g}, max={float(self.max_val):.4g}"


class StreamingHistogramObserver(ExtremesObserver):
    """Counts values in bins; what range follows from them is up to the subclass.

    Args:
        bins: how many bins; memory and time of the range search grow with it.
        kwargs: as for stock observers (``dtype``, ``qscheme``, ``quant_min``, ``quant_max``, ...).
    """

    def __init__(self, bins: int = _BINS, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if bins < 2:
            raise InvalidInputError(f"an observer needs at least 2 bins, not {bins}")
        self.register_buffer("counts", torch.zeros(bins, dtype=torch.int64))
        #: What was chosen, and for which tensors and codes.
        self._chosen: tuple[SeenTensors, Any, Any] | None = None
        #: log2 of the bin width, and the number of the first bin: bin n holds [n, n + 1) * width.
        self.register_buffer("place", torch.zeros(2, dtype=torch.int64))

    counts: torch.Tensor
    place: torch.Tensor

    def forward(self, x_orig: torch.Tensor) -> torch.Tensor:
        """Count the values of ``x_orig``, of any shape, and return it as it is."""
        x = x_orig.detach()
        if not x.numel():
            return x_orig
        x = in_memory_order(self._in_useful_range(x.to(torch.float32)))
        low, high = finite_range(x)
        first = not bool(self.counts.any())
        if first or bool((low < self.min_val) | (high > self.max_val)):
            self.min_val = torch.minimum(self.min_val, low)
            self.max_val = torch.maximum(self.max_val, high)
            self._make_room(first)
        exponent, start = self.place.tolist()
        self.counts += counted(x, 2.0**-exponent, start, len(self.counts))
        return x_orig

    def _make_room(self, first: bool) -> None:
        """Widen or move the bins until they hold the whole range."""
        low, high = float(self.min_val), float(self.max_val)
        old_exponent, old_start = self.place.tolist()
        exponent = _finest_exponent(low, high, len(self.counts))
        if not first:
            exponent = max(exponent, old_exponent)
        start = math.floor(low * 2.0**-exponent)
        if not first:
            numbers = torch.arange(len(self.counts)) + old_start
            moved = (numbers >> (exponent - old_exponent)) - start
            filled = self.counts > 0
            self.counts = torch.zeros_like(self.counts).scatter_add_(
                0, moved[filled], self.counts[filled]
            )
        self.place = torch.tensor([exponent, start], dtype=torch.int64)

    def values(self) -> torch.Tensor:
        """What stands for each bin: its middle, and 0 for the one that starts there."""
        exponent, start = self.place.tolist()
        numbers = torch.arange(len(self.counts), dtype=torch.float64) + start
        return torch.where(numbers == 0, 0.0, (numbers + 0.5) * 2.0**exponent)

    def range(self) -> tuple[float, float]:
        """The lowest and highest value to represent."""
        return float(self.min_val), float(self.max_val)

    def calculate_qparams(self, **_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Scale and zero point of the chosen range."""
        if not bool(self.counts.any()):
            raise InvalidInputError(NO_DATA)
        # The search takes milliseconds, and simulations ask for each tensor of each call.
        held = (self.counts, self.place, self.min_val, self.max_val)
        codes = (self.quant_min, self.quant_max, self.stretch)
        known = self._chosen
        if known is None or known[1] != codes or not known[0].still_are(held):
            low, high = (torch.tensor(bound, dtype=torch.float32) for bound in self.range())
            self._chosen = known = (SeenTensors(held), codes, self.qparams(low, high))
        scale, zero_point = known[2]
        return scale.clone(), zero_point.clone()

    def _levels(self) -> int:
        return int(self.quant_max) - int(self.quant_min)


class PercentileObserver(StreamingHistogramObserver):
    """Leaves out the outermost values: those above the percentile, and as many below.

    Args:
        percentile: in 50..100; how much of the data lies below the upper end of the range.
    """

    def __init__(self, percentile: float = 99.99, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if not 50 < percentile <= 100:
            raise InvalidInputError(f"percentile must lie above 50 and up to 100, not {percentile}")
        self.percentile = percentile

    def range(self) -> tuple[float, float]:
        """The percentiles, to the accuracy of a bin."""
        exponent, start = self.place.tolist()
        share = self.counts.cumsum(0).double() / self.counts.sum()
        tail = 1 - self.percentile / 100
        # The first bin that goes past the lower tail, and the first that reaches the upper one.
        first = int(
            torch.searchsorted(share, torch.tensor(tail, dtype=torch.float32).double(), right=True)
        )
        last = int(
            torch.searchsorted(share, torch.tensor(1 - tail, dtype=torch.float32).double() - 1e-12)
        )
        low, high = ((start + n) * 2.0**exponent for n in (first, last + 1))
        return max(low, float(self.min_val)), min(high, float(self.max_val))


class MSEObserver(StreamingHistogramObserver):
    """Takes the range that makes the mean squared error of rounding and clipping smallest."""

    def range(self) -> tuple[float, float]:
        """The best of the ranges tried: both ends together, then each end alone.

        A few values show less of a range than what is still to come: theirs is widened.
        """
        low, high = self.min_val.double(), self.max_val.double()
        shares = _SHARES.double()
        best = self._best(shares * low, shares * high)
        # Of values of one sign, such as a ReLU's, there is but one end to move.
        for _ in range(2 if low < 0 < high else 0):
            best = self._best(shares * low, best[1].expand_as(shares), best)
            best = self._best(best[0].expand_as(shares), shares * high, best)
        wider = self._wider()
        return wider * float(best[0]), wider * float(best[1])

    def _wider(self) -> float:
        """How much wider than seen the range should be, by the number of values seen.

        For 8 bits and values of a normal distribution, a range of ``_BEST_RANGE`` deviations is
        best. The largest of n values is expected to reach (Blom) fewer where n is below 10,000.
        """
        if int((self.counts > 0).sum()) < _DISCRETE:
            return 1.0  # a mask, say: there is nothing between or beyond its values
        n = int(self.counts.sum())
        reached = float(
            torch.special.ndtri(
                torch.tensor((n - 0.375) / (n + 0.25), dtype=torch.float32).double()
            )
        )
        return max(1.0, _BEST_RANGE / reached)

    def _best(
        self,
        lows: torch.Tensor,
        highs: torch.Tensor,
        known: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The pair with the least error among ``lows``, ``highs`` [R] and the ``known`` one."""
        if known is not None:
            lows = torch.cat([known[0].reshape(1), lows])
            highs = torch.cat([known[1].reshape(1), highs])
        index = int(torch.argmin(self._errors(lows, highs)))
        return lows[index], highs[index]

    def _errors(self, lows: torch.Tensor, highs: torch.Tensor) -> torch.Tensor:
        """The sum of squared errors for each range; [R] and [R] to [R]."""
        filled = self.counts > 0
        values, counts = self.values()[filled], self.counts[filled].double()
        scale, zero = _scale_and_zero(lows, highs, self._levels())
        # In place: this is most of the time of choosing ranges, and memory most of this.
        codes = (values / scale[:, None]).round_().add_(zero[:, None])
        rounded = codes.clamp_(0, self._levels()).sub_(zero[:, None]).mul_(scale[:, None])
        return rounded.sub_(values).square_() @ counts


class KLObserver(StreamingHistogramObserver):
    """Takes the range whose quantized distribution diverges least from the real one.

    Values outside of a range count at its ends. Among equals the widest range wins.
    """

    def range(self) -> tuple[float, float]:
        """The best of the ranges tried: both ends together, then each end alone."""
        low, high = float(self.min_val), float(self.max_val)
        shares: list[float] = _SHARES.tolist()
        best = self._best([(share * low, share * high) for share in shares])
        best = self._best([best, *((share * low, best[1]) for share in shares)])
        return self._best([best, *((best[0], share * high) for share in shares)])

    def _best(self, ranges: list[tuple[float, float]]) -> tuple[float, float]:
        """The range that diverges least."""
        return min(ranges, key=lambda ends: self._divergence(*ends))

    def _divergence(self, low: float, high: float) -> float:
        """KL divergence of the distribution from its quantized form, range ``low``..``high``."""
        values = self.values()
        counts = self.counts.double()
        inside = (values >= low) & (values <= high)
        if not bool(inside.any()):
            return math.inf
        real = counts * inside
        ends = inside.nonzero().flatten()[[0, -1]]
        real[ends[0]] += counts[: ends[0]].sum()
        real[ends[1]] += counts[ends[1] + 1 :].sum()
        scale, zero = _scale_and_zero(
            torch.tensor([low], dtype=torch.float32),
            torch.tensor([high], dtype=torch.float32),
            self._levels(),
        )
        codes = (torch.round(values / scale) + zero).clamp(0, self._levels()).to(torch.int64)
        # Quantized, all bins of one code look alike: what is inside of the range is spread evenly.
        filled = ((counts > 0) & inside).double()
        per_code = torch.zeros(self._levels() + 1, dtype=torch.float64)
        mass = per_code.scatter_add(0, codes, counts * inside)
        width = per_code.scatter_add(0, codes, filled)
        spread = (mass / width.clamp(min=1))[codes] * filled
        p, q = real / real.sum(), spread / spread.sum().clamp(min=1e-300)
        some = p > 0
        return float((p[some] * (p[some] / q[some].clamp(min=1e-12)).log()).sum())


#: Observers by the name users give them. The one called "histogram" is stock PyTorch's.
ACTIVATION_OBSERVERS: Mapping[str, type[ExtremesObserver]] = {
    "minmax": ExtremesObserver,
    "percentile": PercentileObserver,
    "mse": MSEObserver,
    "kl": KLObserver,
}


#: Values are multiplied by 2**-exponent as float32, which must not overflow.
_SMALLEST = -126


def _finest_exponent(low: float, high: float, bins: int) -> int:
    """The smallest power of two as a bin width with which ``bins`` bins hold ``low``..``high``."""
    largest = max(abs(low), abs(high))
    if largest == 0:
        return _SMALLEST
    exponent = max(math.frexp(largest)[1] + _FINEST, _SMALLEST)
    while math.floor(high * 2.0**-exponent) - math.floor(low * 2.0**-exponent) >= bins:
        exponent += 1
    return exponent


def _scale_and_zero(
    lows: torch.Tensor, highs: torch.Tensor, levels: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Affine parameters of ranges, each widened to hold 0; [R] and [R] to [R] and [R]."""
    lows, highs = lows.double().clamp(max=0), highs.double().clamp(min=0)
    scale = scale_of(highs - lows, levels)
    return scale, torch.round(-lows / scale).clamp(0, levels)


def finite_range(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The least and the largest of some values.

    Raises:
        InvalidInputError: one of them is NaN or infinite.
    """
    low, high = torch.aminmax(x)
    if not (math.isfinite(low) and math.isfinite(high)):
        raise InvalidInputError(
            f"a tensor of shape {tuple(x.shape)} holds NaN or infinity during calibration; "
            "check the calibration data and the float model"
        )
    return low, high
