"""Weights that torchao has quantized: their own codes and scales, in our form."""

from __future__ import annotations

import torch

from x86quant.errors import UnsupportedError
from x86quant.ops.groups import GROUP_STEP, exact_half, pack_nibbles


def is_torchao(weight: torch.Tensor) -> bool:
    """Whether ``weight`` is one of torchao's tensors, which few functions of torch take."""
    return type(weight).__module__.startswith("torchao.")


def codes_of_torchao(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The codes and scales of torchao's tensors of int8 codes; None of an ordinary weight.

    They have a scale a row, or one for each group of features, and then a zero point perhaps. Of
    codes from -8 to 7 with groups two are in a byte.

    Raises:
        UnsupportedError: it is another tensor of torchao's.
    """
    if not is_torchao(weight):
        return None
    codes, scale = getattr(weight, "qdata", None), getattr(weight, "scale", None)
    zero_point = getattr(weight, "zero_point", None)
    if codes is None or scale is None or codes.dtype != torch.int8 or codes.dim() != 2:
        raise _refusal(weight)
    codes, real = codes.detach().clone(), scale.detach().to(torch.float32)
    shifted = zero_point is not None and bool(zero_point.any())
    if scale.numel() in (1, codes.shape[0]) and not shifted:
        return codes, real.flatten().expand(codes.shape[0]).clone()
    groups = scale.numel() // max(codes.shape[0], 1)
    fits = scale.shape == (codes.shape[0], groups) and groups > 0
    if not fits or codes.shape[1] % groups or codes.shape[1] // groups % GROUP_STEP:
        raise _refusal(weight)
    if shifted:
        assert zero_point is not None
        if zero_point.shape != scale.shape:
            raise _refusal(weight)
        real = torch.stack([real, -real * zero_point.to(torch.float32)], -1)
    four = bool((codes >= -8).all()) and bool((codes <= 7).all())
    return pack_nibbles(codes) if four else codes, exact_half(real)


def _refusal(weight: torch.Tensor) -> UnsupportedError:
    return UnsupportedError(
        f"the weight of shape {tuple(weight.shape)} is torchao's {type(weight).__name__}, "
        "whose codes are no int8 with a scale a row or a group of features: give the float model, "
        "as it was before torchao's quantize_"
    )
