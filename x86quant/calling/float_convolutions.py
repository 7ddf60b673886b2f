"""Convolutions of float models that are run to see what they compute, by the native product.

torch's take two to three times as long where a window is one pixel, or adjacent pixels of a line:
it lays their operands out anew in each call. Sums are in another order, so results differ in their
last bits.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from x86quant import extension
from x86quant.packing.float_panels import float_panels
from x86quant.packing.linear_dynamic import extension_loads

_LAYERS = (nn.Conv1d, nn.Conv2d)
_METHOD = "_conv_forward"
#: Fewer products than these are over before operands are laid out.
_LEAST_PRODUCTS = 1 << 20


@contextlib.contextmanager
def native_float_convolutions() -> Iterator[None]:
    """A block in which this thread's float convolutions run natively where that is faster."""
    if not extension_loads():
        yield
        return
    thread = threading.get_ident()
    before: list[Any] = [getattr(kind, _METHOD) for kind in _LAYERS]
    for kind, forward in zip(_LAYERS, before, strict=True):

        def native(
            layer: Any, x: torch.Tensor, weight: torch.Tensor, bias: Any, forward: Any = forward
        ) -> torch.Tensor:
            found = _product(layer, x, weight, bias) if threading.get_ident() == thread else None
            return forward(layer, x, weight, bias) if found is None else found

        setattr(kind, _METHOD, native)
    try:
        yield
    finally:
        for kind, forward in zip(_LAYERS, before, strict=True):
            setattr(kind, _METHOD, forward)


def _product(
    layer: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor | None:
    """The convolution as products of rows, which lie in ``x`` as they are; None if it is none."""
    tensors = [x, weight, *([] if bias is None else [bias])]
    plain = all(
        type(t) in (torch.Tensor, nn.Parameter) and t.dtype == torch.float32 and t.is_cpu
        for t in tensors
    )
    if not plain or torch.is_grad_enabled() or layer.groups != 1 or x.dim() != weight.dim():
        return None
    if layer.padding_mode != "zeros" or isinstance(layer.padding, str) or any(layer.padding):
        return None
    *spatial, length = x.shape[2:]
    kernel, stride = list(weight.shape[2:]), layer.stride[-1]
    if not x.numel():
        return None
    if kernel == [1] * len(kernel) and set(layer.stride) == {1}:
        rows, images, size = x.shape[2:].numel(), x.shape[0], list(x.shape[2:])
        length, window = rows, 1
    elif any(d != 1 for d in layer.dilation):
        return None
    elif not spatial or (spatial[0] == kernel[0] == 1 and layer.stride[0] == 1):
        window = kernel[-1]
        rows, images = (length - window) // stride + 1, x.shape[0]
        size = [*([1] if spatial else []), rows]
    elif length == kernel[-1] == 1:
        length, window, stride = spatial[0], kernel[0], layer.stride[0]
        rows, images = (length - window) // stride + 1, x.shape[0]
        size = [rows, 1]
    else:
        return None
    channels = x.shape[1]
    if rows < 1 or images * rows * weight.numel() < _LEAST_PRODUCTS:
        return None
    flat = x.flatten(2).transpose(1, 2).reshape(images, length * channels)
    taps = weight.flatten(2).transpose(1, 2).reshape(weight.shape[0], window * channels)
    found: torch.Tensor = extension.native().float_rows(
        flat, *float_panels(taps, bias), len(taps), rows, stride * channels
    )
    return _shaped(found, size)


def _shaped(found: torch.Tensor, size: list[int]) -> torch.Tensor:
    """Rows of channels as an image, in the memory they lie in."""
    return found.reshape(len(found), *size, -1).movedim(-1, 1)
