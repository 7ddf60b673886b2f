"""What stands in for an int8 layer while transformers loads its values."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from x86quant.dynamic import DynamicLinear, WeightOnlyEmbedding, WeightOnlyLinear
from x86quant.dynamic.layers import carry_attributes, is_conv1d, quantize_weight
from x86quant.errors import InvalidInputError

_LINEARS = {"dynamic": DynamicLinear, "weight_only": WeightOnlyLinear}


class UnloadedLayer(nn.Module):
    """A linear or an embedding whose codes and scales are to come, as buffers on the meta device.

    In files of compressed-tensors the codes are called ``weight`` and scales are a column.
    """

    def __init__(self, layer: nn.Module, by_compressed_tensors: bool = False) -> None:
        super().__init__()
        weight: Any = layer.weight
        self._is_table = isinstance(layer, nn.Embedding)
        self._transposed = is_conv1d(layer)
        self._codes = "weight" if by_compressed_tensors else "int8_weight"
        shape = tuple(weight.shape)[::-1] if self._transposed else tuple(weight.shape)
        scales = (shape[0], 1) if by_compressed_tensors else (shape[0],)
        if not by_compressed_tensors:
            # Models that initialize the weights of their layers' layers take it for loaded.
            self.weight = loaded(torch.empty(shape, device="meta", dtype=torch.float32))
        self.register_buffer(self._codes, torch.empty(shape, dtype=torch.int8, device="meta"))
        self.register_buffer(
            "weight_scale", torch.empty(scales, device="meta", dtype=torch.float32)
        )
        self.register_buffer("bias", _bias_of(layer))
        carry_attributes(layer, self)
        self._is_hf_initialized = True

    def values_of(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """The codes and scales of a float ``weight``, by the names of their buffers.

        Raises:
            InvalidInputError: the weight holds NaN or infinity.
        """
        codes, scale = quantize_weight((weight.t() if self._transposed else weight).float())
        return {self._codes: codes.contiguous(), "weight_scale": scale}

    @property
    def missing(self) -> list[str]:
        """The buffers that nothing was loaded into, but for the bias, which then is zero."""
        return [
            name
            for name, value in self.named_buffers()
            if name != "bias" and not getattr(value, "_is_hf_initialized", False)
        ]

    def int8_form(self, path: str, scheme: str) -> nn.Module:
        """The layer that computes with these values, which are not copied.

        Raises:
            InvalidInputError: the scales are none.
        """
        scale = self.get_buffer("weight_scale").reshape(-1)
        if not bool((torch.isfinite(scale) & (scale >= 0)).all()):
            raise InvalidInputError(f"{path}: weight_scale holds numbers that are no scales")
        codes: torch.Tensor = self.get_buffer(self._codes)
        bias: Any = self.bias
        if bias is not None and not getattr(bias, "_is_hf_initialized", False):
            bias = torch.zeros(bias.shape, dtype=torch.float32)
        if self._is_table:
            new: nn.Module = WeightOnlyEmbedding(codes, scale, path)
        else:
            new = _LINEARS[scheme](codes, scale, bias, None, self._transposed)
        carry_attributes(self, new)
        return new


def _bias_of(layer: nn.Module) -> torch.Tensor | None:
    """The bias of ``layer``, loaded or not, as a float32 tensor that is no parameter."""
    bias = getattr(layer, "bias", None)
    if bias is None:
        return None
    found: torch.Tensor = bias.detach().float()
    # A copy, since it may be tied to one that stays.
    return found if found.device.type == "meta" else loaded(found.clone())


def loaded(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor``, marked as transformers marks what it has loaded."""
    tensor._is_hf_initialized = True  # type: ignore[attr-defined]
    return tensor
