"""Bits by layer: which linears get weights of 8 bits where the others have 4.

Linears are ranked by the noise that 4 bits in one alone make in the model's results, for each byte
that 8 bits there cost. A budget of bytes takes from the front of that ranking what fits. A metric,
or without one the results themselves, takes the shortest front that is good enough.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping

from torch import nn

from x86quant.calling.wording import listed
from x86quant.dynamic import is_linear
from x86quant.dynamic.group_weights import group_of
from x86quant.dynamic.layers import weight_of
from x86quant.errors import InvalidInputError
from x86quant.quantization.deciding.layers_in_float import ENOUGH_DB
from x86quant.quantization.deciding.noise import sqnrs
from x86quant.quantization.harm import rough_harms
from x86quant.quantization.prepared import PreparedModel
from x86quant.quantization.search import Metric, score_of


@dataclasses.dataclass(frozen=True, slots=True)
class _Bytes:
    """What a linear's codes and scales take."""

    four: int
    eight: int

    @staticmethod
    def of(linear: nn.Module) -> _Bytes | None:
        """None where it has 8 bits in any case."""
        outputs, features = weight_of(linear).shape
        group = group_of(features)
        if group is None:
            return None
        return _Bytes(outputs * (features // 2 + 2 * features // group), outputs * (features + 4))


def with_bits_by_layer(
    prepared: PreparedModel,
    kept: Collection[str],
    budget: int | None,
    metric: Metric | None,
    max_drop: float,
) -> PreparedModel:
    """``prepared``, with 8 bits in those linears that it is worth it for.

    Args:
        prepared: a calibrated model with 4 bits in its linears.
        kept: layers that stay in float.
        budget: bytes that the linears' weights may take.
        metric: of a model, higher is better; where there is no budget, 8 bits go to as few linears
            as hold it, or without one, as bring all results to ``ENOUGH_DB``.
        max_drop: how far the metric may fall.

    Raises:
        InvalidInputError: there are no such linears or no data, or ``budget`` is too small.
    """
    sizes = _sizes(prepared, kept)
    if not sizes or not prepared.sample:
        raise InvalidInputError(
            'weight_bits="auto" chooses by calibration data, and among linears outside of static '
            f"parts whose input features groups divide: here are {len(prepared.sample)} batches "
            f"and {len(sizes)} such linears; give weight_bits=8 or 4"
        )
    if budget is not None:
        wide = _fitting(prepared, sizes, budget)
    elif metric is None:
        wide = _fewest(prepared, sizes, lambda tried: _results_are_good(tried, kept))
    else:
        target = score_of(metric, prepared.model, "float") - max_drop
        wide = _fewest(
            prepared,
            sizes,
            lambda tried: score_of(metric, tried.build(kept), "4-bit") >= target,
        )
    taken = sum(size.eight if name in wide else size.four for name, size in sizes.items())
    note = (
        f"{len(wide)} of {len(sizes)} linears have weights of 8 bits, the others 4: "
        f"{taken / 1e6:.2f} MB" + ("" if budget is None else f" of at most {budget / 1e6:.2f} MB")
    )
    if wide:
        note += f"; 8 bits for most noise by bytes: {listed(wide)}"
    return dataclasses.replace(
        prepared.with_eight_bits(wide),
        bits_by_layer=True,
        has_budget=budget is not None,
        notes=(*prepared.notes, note),
    )


def _fitting(prepared: PreparedModel, sizes: Mapping[str, _Bytes], budget: int) -> list[str]:
    """The linears of the ranking that get 8 bits within ``budget``."""
    left = budget - sum(size.four for size in sizes.values())
    if left < 0:
        raise InvalidInputError(
            f"weight_budget: with 4 bits in each the weights of {len(sizes)} linears take "
            f"{budget - left} bytes, and may take {budget}; allow more"
        )
    wide = []
    for name in _ranked(prepared, sizes):
        more = sizes[name].eight - sizes[name].four
        if more <= left:
            wide.append(name)
            left -= more
    return wide


def _fewest(
    prepared: PreparedModel,
    sizes: Mapping[str, _Bytes],
    is_good: Callable[[PreparedModel], bool],
) -> list[str]:
    """The shortest front of the ranking with which it is good, found by halving; all if none is."""
    if is_good(prepared):
        return []
    order = _ranked(prepared, sizes)
    bad, good = 0, len(order)
    while good - bad > 1:
        middle = (bad + good) // 2
        if is_good(prepared.with_eight_bits(order[:middle])):
            good = middle
        else:
            bad = middle
    return order[:good]


def _results_are_good(prepared: PreparedModel, kept: Collection[str]) -> bool:
    """Whether all results come as close to the float model's as a user would take for them."""
    calls = prepared.halves.judges
    found = sqnrs(prepared, prepared.build(kept), calls)
    return min(found, default=ENOUGH_DB) >= ENOUGH_DB


def _sizes(prepared: PreparedModel, kept: Collection[str]) -> dict[str, _Bytes]:
    """Of the linears that may have either."""
    found = {}
    for layer in prepared.layers.values():
        if layer.part is not None or layer.name in kept:
            continue
        module = prepared.model.get_submodule(layer.name)
        size = _Bytes.of(module) if is_linear(module) else None
        if size is not None:
            found[layer.name] = size
    return found


def _ranked(prepared: PreparedModel, sizes: Mapping[str, _Bytes]) -> list[str]:
    """By noise for each byte, most first."""
    noise = {name: 10 ** (-db / 10) for name, db in rough_harms(prepared, list(sizes)).items()}
    cost = {name: size.eight - size.four for name, size in sizes.items()}
    return sorted(sizes, key=lambda name: noise[name] / cost[name], reverse=True)
