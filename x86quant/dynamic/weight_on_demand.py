"""The float weight of a layer that keeps only an int8 one.

Code around a layer may read its weight: to cast inputs to its dtype, to tie it to another layer, to
call ``F.linear`` with it. A layer that holds int8 codes answers with a tensor that has the float
weight's shape, dtype and device but no memory. Its values are computed when something needs them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch.utils import _pytree as pytree

from x86quant.errors import InvalidInputError

#: Reads the values in one piece, and has no form among torch's operators.
_WHOLE_READS = (
    torch.Tensor.numpy,
    torch.Tensor.tolist,
    torch.Tensor.__array__,
    torch.Tensor.__deepcopy__,
    torch.Tensor.__reduce_ex__,
    torch.Tensor.__repr__,
)


class WeightOnDemand(torch.Tensor):
    """A float tensor whose values are made by ``dequantize`` when an operator needs them.

    ``F.linear(x, weight)`` calls ``product(x)`` where that is given, so that it stays in int8.
    Nothing can be written to it: the codes would not change, so every attempt is refused.
    """

    _dequantize: Callable[[], torch.Tensor]
    _product: Callable[[torch.Tensor], torch.Tensor] | None

    @staticmethod
    def __new__(
        cls,
        shape: tuple[int, ...],
        device: torch.device,
        dequantize: Callable[[], torch.Tensor],
        product: Callable[[torch.Tensor], torch.Tensor] | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> WeightOnDemand:
        """A stand-in for the float tensor of ``shape`` that ``dequantize`` returns."""
        found: WeightOnDemand = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=dtype, device=device, requires_grad=False
        )
        found._dequantize, found._product = dequantize, product
        return found

    def dequantize(self) -> torch.Tensor:
        """The values, as a plain tensor."""
        return self._dequantize()

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") == "__set__":
            raise InvalidInputError(_READ_ONLY)
        if func is F.linear and (found := _int8_linear(*args, **kwargs)) is not None:
            return found
        with torch._C.DisableTorchFunctionSubclass():
            if func in _WHOLE_READS:
                return func(args[0].dequantize(), *args[1:], **kwargs)
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            old = args[0]
            return cls(tuple(old.shape), old.device, old._dequantize, old._product, old.dtype)
        kwargs = kwargs or {}
        for argument, value in zip(func._schema.arguments, args, strict=False):
            written = argument.alias_info is not None and argument.alias_info.is_write
            if written and isinstance(value, cls):
                raise InvalidInputError(_READ_ONLY)
        args, kwargs = pytree.tree_map_only(cls, cls.dequantize, (args, kwargs))
        result = func(*args, **kwargs)
        if any(found.alias_info is not None for found in func._schema.returns):
            # A view: to write to it is to write to the weight.
            return pytree.tree_map_only(torch.Tensor, cls._view, result)
        return result

    @classmethod
    def _view(cls, values: torch.Tensor) -> WeightOnDemand:
        return cls(tuple(values.shape), values.device, lambda: values, None, values.dtype)


_READ_ONLY = (
    "the weight of an int8 layer is computed from its codes and cannot be written to; "
    "change the float model and convert it again"
)


def _int8_linear(input: Any, weight: Any, bias: torch.Tensor | None = None) -> torch.Tensor | None:
    """``F.linear`` by a weight that can multiply in int8; None if it cannot take these operands."""
    if not isinstance(weight, WeightOnDemand) or weight._product is None:
        return None
    plain = type(input) is torch.Tensor and input.dtype == torch.float32 and input.dim() > 0
    if not plain or input.shape[-1] != weight.shape[1]:
        return None  # torch computes it in float, or says what is wrong
    out = weight._product(input)
    return out if bias is None else out + bias
