"""The overflow proof: can a kernel's 16-bit or 32-bit sums overflow with these weights?

Without VNNI, int8 kernels multiply unsigned activations by signed weights two products at a time
and add the two into a *saturating* 16-bit lane. With activations in ``[0, A]`` a pair of weights
``(w0, w1)`` reaches at most ``A * (max(w0, 0) + max(w1, 0))`` and at least
``A * (min(w0, 0) + min(w1, 0))``, and both are reached: it saturates for some activations if and
only if one of the two leaves int16. One weight alone never does: 255 * -128 fits.

Which weights are pairs is decided by a kernel's packed layout:

``TAPS``
    Consecutive along K, where K runs over the kernel positions in the weight's own order and,
    within each, over the group's input channels; pairs start at even K. This is FBGEMM's order.
``ANY``
    Any two weights of one output channel. It covers every layout, and is for libraries that
    choose a layout of their own from shapes unknown when weights are packed (oneDNN).

``NONE``
    No two products share a 16-bit sum: the kernel widens first, or multiplies by VNNI.

Which of these holds for a family of a library's layers and a set of instructions is not read off
its source but seen: ``python -m benchmarks.shared_sums`` gives the library layers with weights at
their extreme, and records in ``shared_sums.json`` which products disturbed each other. What was
never probed has no layout, and is not legal. Where oneDNN pairs any, it is taken to pair any two.

``CHANNEL`` is not of pairs: it sums whole output channels, to prove that int32 accumulators
cannot overflow.

The zero point counts as an activation, since padding is filled with it: ``A`` bounds both.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812  (torch's own convention)
from torch import Tensor

from x86quant import extension
from x86quant.spec import OpSpec, WeightFacts

NONE = "none"
TAPS = "taps"
ANY = "any"
CHANNEL = "channel"

#: What kernels may do, from the most to the least exact.
LAYOUTS = (NONE, TAPS, ANY)
PROBED = Path(__file__).with_name("shared_sums.json")

_BLOCK = 2**20  # weights

INT16 = (-(2**15), 2**15 - 1)
INT32 = (-(2**31), 2**31 - 1)  # the lower end is same either way: sums are taken in both signs


def weight_facts(
    weight: Tensor, *, groups: int = 1, transposed: bool = False, symmetric: bool = True
) -> WeightFacts:
    """What the proof needs to know of an int8 ``weight``.

    Args:
        weight: plain int8. ``[out, in]`` (linear), ``[out, in/groups, *kernel]`` (convolution)
            or ``[in, out/groups, *kernel]`` (transposed convolution).
        groups: groups of the convolution; only a transposed one needs it.
        transposed: whether the weight is of a transposed convolution.
        symmetric: whether every weight zero point is 0.
    """
    rows = _rows(weight, groups, transposed)
    extremes = _extremes(rows) if extension.is_loaded() else _extremes_in_torch(rows)
    if _is_short(rows):  # whatever the sums of its channels
        extremes[CHANNEL] = (-128 * rows.shape[1], 128 * rows.shape[1])
    return WeightFacts(tuple(extremes.items()), symmetric)


def _extremes(rows: Tensor) -> dict[str, tuple[int, int]]:
    """The least and the greatest sum of each layout."""
    ends = extension.native().weight_extremes(rows.contiguous())
    return {layout: (ends[2 * i], ends[2 * i + 1]) for i, layout in enumerate(_SUMS)}


def _extremes_in_torch(rows: Tensor) -> dict[str, tuple[int, int]]:
    """The same without the compiled part."""
    extremes = dict.fromkeys(_SUMS, (0, 0))
    # In blocks that stay in cache, which is several times as fast for a large weight.
    step = max(1, _BLOCK // max(1, rows.shape[1]))
    for start in range(0, len(rows) if rows.numel() else 0, step):
        block = rows[start : start + step]
        negative, positive = block.clamp(max=0), block.clamp(min=0)
        for layout, sums in _SUMS.items():
            low, high = extremes[layout]
            low = min(low, int(sums(negative, -1).amin()))
            extremes[layout] = (low, max(high, int(sums(positive, 1).amax())))
    return extremes


def _is_short(rows: Tensor) -> bool:
    """Whether no int32 sum along K can overflow, whatever the weights."""
    return rows.shape[1] * 128 * 255 <= INT32[1]


def can_saturate(extremes: tuple[int, int], activation_max: int) -> bool:
    """Whether pairs with these extreme sums can leave int16 for activations in ``[0, max]``."""
    return _leaves(INT16, extremes, activation_max)


def can_overflow(extremes: tuple[int, int], activation_max: int) -> bool:
    """Whether channels with these extreme sums can leave int32, whatever the zero point.

    ``sum((x - z) * w)`` with ``x`` and ``z`` in ``[0, A]`` is within ``A`` times the larger of
    the two sums, either way, and so are ``sum(x * w)`` and ``z * sum(w)``.
    """
    widest = max(-extremes[0], extremes[1])
    return _leaves(INT32, (-widest, widest), activation_max)


def kind(spec: OpSpec) -> str:
    """The family of a layer on record, for libraries whose choice of a path is not restated."""
    if spec.op == "linear":
        return "linear"
    if spec.transposed:
        return "transposed"
    if spec.depthwise and spec.out_channels == spec.groups and spec.dims < 3:
        return "depthwise"
    return "grouped" if spec.groups > 1 else "dense"


def probed_layout(kernel: str, family: str, instructions: str) -> str | None:
    """Which products share a 16-bit sum, as seen; None where nobody has looked."""
    return _probed().get((kernel, family, instructions))


@functools.cache
def _probed() -> dict[tuple[str, str, str], str]:
    """The layouts on record; where several CPUs were probed, the least exact."""
    found: dict[tuple[str, str, str], str] = {}
    for record in json.loads(PROBED.read_text())["probed"]:
        key = (record["kernel"], record["family"], record["instructions"])
        found[key] = max(found.get(key, NONE), record["layout"], key=LAYOUTS.index)
    return found


def _leaves(bounds: tuple[int, int], extremes: tuple[int, int], activation_max: int) -> bool:
    return activation_max * extremes[0] < bounds[0] or activation_max * extremes[1] > bounds[1]


def _rows(weight: Tensor, groups: int, transposed: bool) -> Tensor:
    """``[output channels, K]`` with K in the order ``TAPS`` describes."""
    if weight.dim() == 2:
        return weight
    taps = weight.flatten(2)
    if not transposed:
        return taps.transpose(1, 2).flatten(1)
    per_group = taps.reshape(groups, len(taps) // groups, *taps.shape[1:])
    # [groups, in/groups, out/groups, taps] -> [out, taps * in/groups]
    return per_group.permute(0, 2, 3, 1).flatten(2).flatten(0, 1)


def _pair_sums(part: Tensor, sign: int) -> Tensor:
    """Sums of neighbours (0, 1), (2, 3)... along K; the last of an odd K stands alone."""
    if part.shape[1] % 2:
        part = F.pad(part, (0, 1))
    # Four times as fast as adding strided slices: each int16 holds a pair, split by shifts that
    # keep the sign. Which half comes first does not matter to the sum.
    both = part.contiguous().view(torch.int16)
    return (both << 8 >> 8) + (both >> 8)


def _two_sums(part: Tensor, sign: int) -> Tensor:
    """Sum of the two weights of largest magnitude in each row."""
    two = min(2, part.shape[1])
    return part.topk(two, dim=1, largest=sign > 0).values.sum(1)


def _channel_sums(part: Tensor, sign: int) -> Tensor:
    """Sum of each row."""
    return part.sum(1, dtype=torch.int64)


#: In the order of the native form.
_SUMS: dict[str, Callable[[Tensor, int], Tensor]] = {
    TAPS: _pair_sums,
    ANY: _two_sums,
    CHANNEL: _channel_sums,
}
