"""Float weights as codes: of 8 bits with a scale a row, or of 4 or 8 with one for each group.

A group is of input features; the format is that of ``x86quant/ops/groups.py``. Of the scales that
are tried for a group the one is taken that changes its weights least, by mean square.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from x86quant.dynamic.torchao_weights import codes_of_torchao, is_torchao
from x86quant.errors import InvalidInputError
from x86quant.ops.groups import GROUP_STEP, MOST_GROUPS, codes_of, pack_nibbles
from x86quant.weight_form import features_of, has_groups

#: Features of a group, where nobody says: with a scale of 16 bits a weight takes 4.5.
GROUP = 32
#: What a weight may become; 8 bits have a scale an output feature.
BITS = (8, 4)

#: Codes reach from -LIMIT to LIMIT - 1.
_LIMIT = {4: 8, 8: 128}
#: Scales to try, as shares of the one by which the largest weight of a group becomes -LIMIT. By the
#: first one it becomes LIMIT - 1 or its negative, so that both signs reach equally far.
_SHARES = {4: (8 / 7, 1.0, 0.94, 0.88, 0.82, 0.76), 8: (128 / 127,)}
#: Weights that are looked at together: intermediate results stay small.
_TOGETHER = 2**22
_LEAST_SCALE = 2.0**-24  # of float16


def check_bits(bits: object) -> None:
    """Raise InvalidInputError unless weights may have so many ``bits``."""
    if isinstance(bits, bool) or bits not in BITS:
        raise InvalidInputError(f"weight_bits must be 8 or 4, got {bits!r}")


def group_of(features: int, group: int = GROUP) -> int | None:
    """The features of a group, ``group`` or what divides them; None where there are no groups."""
    while group >= GROUP_STEP:
        if features % group == 0 and 0 < features // group <= MOST_GROUPS:
            return group
        group //= 2
    return None


def quantize_groups(
    weight: torch.Tensor, bits: int = 4, group: int = GROUP, importance: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and float16 scales [N, K / group] of ``weight`` [N, K].

    Args:
        weight: finite floats.
        bits: of a code, 4 or 8.
        group: features of a group; it has to divide K.
        importance: what an error of each feature counts, [K]; by default all count the same.
    """
    features = weight.shape[1]
    if features % group or group % GROUP_STEP or features // group > MOST_GROUPS:
        raise InvalidInputError(
            f"groups of {group} do not divide {features} input features into at most {MOST_GROUPS} "
            f"groups of a multiple of {GROUP_STEP}"
        )
    if not bool(torch.isfinite(weight).all()):
        raise InvalidInputError(
            f"the weight of shape {tuple(weight.shape)} holds NaN or infinity; "
            "check the float model"
        )
    counts = None if importance is None else importance.float().reshape(1, -1, group)
    codes, scales = [], []
    for rows in torch.split(weight.detach(), max(1, _TOGETHER // features)):
        groups = rows.float().reshape(len(rows), -1, group)
        scale = best_scales(groups, bits, counts)
        found = codes_at(groups, scale.float(), bits)
        codes.append(packed(found.reshape(len(rows), features), bits))
        scales.append(scale.squeeze(-1))
    return torch.cat(codes), torch.cat(scales)


def joined(
    parts: Sequence[tuple[torch.Tensor, torch.Tensor]],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of the output features of all ``parts``, one part after the other.

    Where the parts are of different forms they take the one that holds all of them: 8 bits, the
    smallest of the groups, offsets, float32.
    """
    if len({(w.dtype, s.dtype, s.shape[1:]) for w, s in parts}) > 1:
        features = {features_of(w) for w, _ in parts}.pop()
        eight = any(w.dtype == torch.int8 for w, _ in parts)
        groups = math.lcm(*(s.shape[1] if has_groups(s) else 1 for _, s in parts))
        offsets = any(s.dim() == 3 for _, s in parts)
        if features % groups or features // groups % GROUP_STEP or groups > MOST_GROUPS:
            raise InvalidInputError("parts of one linear have groups that do not fit each other")
        parts = [(codes_of(w) if eight else w, _expanded(s, groups, offsets)) for w, s in parts]
    return torch.cat([w for w, _ in parts]), torch.cat([s for _, s in parts])


def _expanded(scale: torch.Tensor, groups: int, offsets: bool) -> torch.Tensor:
    """``scale`` as float32 [N, groups], or [N, groups, 2], the same numbers."""
    found = (scale if has_groups(scale) else scale[:, None]).float()
    found = found.repeat_interleave(groups // found.shape[1], 1)
    if offsets and found.dim() == 2:
        found = torch.stack([found, torch.zeros_like(found)], -1)
    return found


def codes_at(weight: torch.Tensor, scale: torch.Tensor, bits: int) -> torch.Tensor:
    """The codes, as int8, that come closest to ``weight`` by these scales."""
    limit = _LIMIT[bits]
    return torch.round(weight / scale).clamp(-limit, limit - 1).to(torch.int8)


def packed(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """int8 codes [N, K] as weights are kept."""
    return pack_nibbles(codes) if bits == 4 else codes


def best_scales(
    groups: torch.Tensor, bits: int, importance: torch.Tensor | None = None
) -> torch.Tensor:
    """The float16 scale [..., 1] of each of ``groups`` [..., group] that changes it least."""
    limit = _LIMIT[bits]
    high, low = groups.amax(-1, keepdim=True), groups.amin(-1, keepdim=True)
    # The largest weight becomes -LIMIT, since codes reach further on that side.
    whole = torch.where(high > -low, -high, -low) / limit
    best = best_error = None
    for share in _SHARES[bits]:
        scale = (whole * share).to(torch.float16)
        scale = torch.where(scale.abs() < _LEAST_SCALE, _LEAST_SCALE, scale)
        real = scale.float()
        off = torch.round(groups / real).clamp_(-limit, limit - 1).mul_(real).sub_(groups).square_()
        error = (off if importance is None else off * importance).sum(-1, keepdim=True)
        if best is None or best_error is None:
            best, best_error = scale, error
        else:
            better = error < best_error
            best = torch.where(better, scale, best)
            best_error = torch.where(better, error, best_error)
    assert best is not None
    if not bool(torch.isfinite(best).all()):
        raise InvalidInputError(
            f"weights up to {float(groups.abs().max()):.3g} are too large for float16 scales"
        )
    return best


_WEIGHT_MAX = 127


def quantize_weight(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``weight`` [N, K] as int8 codes in -127..127 and one float32 scale a row.

    Of a weight that torchao has quantized so these are its own codes and scales.
    """
    if (known := codes_of_torchao(weight)) is not None:
        return known
    if weight.dtype != torch.float32:
        raise InvalidInputError(
            f"the weight of shape {tuple(weight.shape)} is {weight.dtype}, expected float32; "
            "call model.float() first"
        )
    real = weight.detach()
    if not bool(torch.isfinite(real).all()):
        raise InvalidInputError(
            f"the weight of shape {tuple(weight.shape)} holds NaN or infinity; "
            "check the float model"
        )
    largest = real.abs().amax(1) if real.shape[1] else real.new_zeros(real.shape[0])
    scale = (largest / _WEIGHT_MAX).clamp(min=torch.finfo(torch.float32).tiny)
    codes = torch.round(real / scale[:, None]).clamp(-_WEIGHT_MAX, _WEIGHT_MAX)
    # In its own order, whatever that of the float weight: kernels read it row by row.
    return codes.to(torch.int8).contiguous(), scale


def quantized(weight: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """``weight`` [N, K] as codes of ``bits`` and their scales: of groups, where it has 4."""
    group = None if bits == 8 or is_torchao(weight) else group_of(weight.shape[1])
    return quantize_weight(weight) if group is None else quantize_groups(weight, bits, group)
