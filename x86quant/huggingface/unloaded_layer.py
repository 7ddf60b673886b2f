"""What stands in for a quantized layer while transformers loads its values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from x86quant.dynamic import (
    DynamicLinear,
    ReorderedLinear,
    WeightOnlyEmbedding,
    WeightOnlyLinear,
)
from x86quant.dynamic.group_weights import group_of, quantized
from x86quant.dynamic.layers import carry_attributes, is_conv1d
from x86quant.errors import InvalidInputError, X86QuantError, first_line
from x86quant.huggingface.checkpoint_formats import FORMATS, OURS, CheckpointFormat
from x86quant.huggingface.group_formats import GroupWeights
from x86quant.ops.dynamic import check_weight
from x86quant.weight_form import features_of, has_groups

LINEARS = {"dynamic": DynamicLinear, "weight_only": WeightOnlyLinear}


class UnloadedLayer(nn.Module):
    """A linear or an embedding whose tensors are to come, as buffers on the meta device.

    They are called as in the files, and what is to be made of them is read when all have come.
    """

    def __init__(
        self,
        layer: nn.Module,
        bits: int = 8,
        stored: Mapping[str, torch.Tensor] | None = None,
        of_files: CheckpointFormat = FORMATS[OURS],
        tied_to: UnloadedLayer | None = None,
    ) -> None:
        """For ``layer``: of the tensors ``stored`` in files, or else of some of ``bits``.

        One that is ``tied_to`` another holds the codes and scales of that.
        """
        super().__init__()
        weight: Any = layer.weight
        self._is_table = isinstance(layer, nn.Embedding)
        self._transposed = is_conv1d(layer)
        self._shape = tuple(weight.shape)[::-1] if self._transposed else tuple(weight.shape)
        self._bits = bits
        self._format = of_files
        if of_files is FORMATS[OURS]:
            # Models that initialize the weights of their layers' layers take it for loaded.
            self.weight = loaded(torch.empty(self._shape, device="meta", dtype=torch.float32))
        self._found: GroupWeights | None = None
        self._tied_to = (tied_to,)  # no child
        if tied_to is None:
            for name, tensor in (stored or self._expected()).items():
                self.register_buffer(name, tensor)
        self.register_buffer("bias", _bias_of(layer))
        carry_attributes(layer, self)
        self._is_hf_initialized = True

    def _expected(self) -> dict[str, torch.Tensor]:
        """What ``values_of`` gives, without data."""
        outputs, features = self._shape
        group = None if self._bits == 8 else group_of(features)
        if group is None:
            weight: Any = ((outputs, features), torch.int8)
            scale: Any = ((outputs,), torch.float32)
        else:
            weight = ((outputs, features // 2), torch.uint8)
            scale = ((outputs, features // group), torch.float16)
        sizes = {"int8_weight": weight, "weight_scale": scale}
        return {k: torch.empty(size, dtype=t, device="meta") for k, (size, t) in sizes.items()}

    def values_of(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """The codes and scales of a float ``weight``, by the names of their buffers.

        Raises:
            InvalidInputError: the weight holds NaN or infinity.
        """
        real = (weight.t() if self._transposed else weight).float()
        codes, scale = quantized(real, self._bits)
        return {"int8_weight": codes.contiguous(), "weight_scale": scale}

    @property
    def missing(self) -> list[str]:
        """The buffers that nothing was loaded into, but for the bias, which then is zero."""
        return [
            name
            for name, value in self.named_buffers()
            if name != "bias" and not getattr(value, "_is_hf_initialized", False)
        ]

    def _read(self) -> GroupWeights:
        if self._found is None:
            tensors = {name: x for name, x in self.named_buffers() if name != "bias"}
            self._found = self._format.read(tensors, self._shape[1])
        return self._found

    def int8_form(self, path: str, scheme: str) -> nn.Module:
        """The layer that computes with these values, which are not copied.

        Raises:
            InvalidInputError: the scales are none, or tensors do not fit each other.
        """
        try:
            found = (self._tied_to[0] or self)._read()
            codes, scale = found.weight, found.weight_scale
            check_weight("linear", codes, scale, None)
        except X86QuantError as error:
            raise type(error)(f"{path}: {error}") from error
        except RuntimeError as error:  # of torch, on tensors of sizes that no format has
            raise InvalidInputError(
                f"{path}: its tensors do not fit each other: {first_line(error)}"
            ) from error
        if not bool(torch.isfinite(scale).all()) or not (
            has_groups(scale) or bool((scale >= 0).all())
        ):
            raise InvalidInputError(f"{path}: weight_scale holds numbers that are no scales")
        if (len(codes), features_of(codes)) != self._shape:
            raise InvalidInputError(
                f"{path}: its tensors are of {features_of(codes)} input and {len(codes)} output "
                f"features, and the layer has {self._shape[1]} and {self._shape[0]}"
            )
        bias: Any = self.bias
        if bias is not None and not getattr(bias, "_is_hf_initialized", False):
            bias = torch.zeros(bias.shape, dtype=torch.float32)
        if self._is_table:
            table = WeightOnlyEmbedding(codes, scale, path)
            carry_attributes(self, table)
            return table
        linear = LINEARS[scheme](codes, scale, bias, None, self._transposed)
        carry_attributes(self, linear)
        return linear if found.order is None else ReorderedLinear(linear, found.order)


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
