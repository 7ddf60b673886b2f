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
from x86quant.lowering.tensor_memory import SeenTensors
from x86quant.packing.float_panels import float_panels
from x86quant.packing.linear_dynamic import extension_loads

_LAYERS = (nn.Conv1d, nn.Conv2d)
_METHOD = "_conv_forward"
#: Fewer products than these are over before operands are laid out.
_LEAST_PRODUCTS = 1 << 20


class Panels:
    """Parameters of layers as they were laid out at an earlier call, if nothing wrote to them."""

    def __init__(self) -> None:
        #: By identity of the parameters.
        self._known: dict[
            tuple[int, ...], tuple[SeenTensors, tuple[torch.Tensor, torch.Tensor]]
        ] = {}

    def of(
        self, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A convolution's weight and bias as the native loops read them."""
        tensors = [weight, *([] if bias is None else [bias])]
        # What is computed anew in each call, as with weight norm, is not kept.
        kept = all(type(x) is nn.Parameter for x in tensors)
        key = tuple(map(id, tensors))
        known = self._known.get(key) if kept else None
        if known is not None and known[0].still_are(tensors):
            return known[1]
        packed = float_panels(weight.flatten(2).transpose(1, 2).flatten(1), bias)
        if kept:
            self._known[key] = (SeenTensors(tensors), packed)
        return packed


@contextlib.contextmanager
def native_float_convolutions(panels: Panels | None = None) -> Iterator[None]:
    """A block in which this thread's float convolutions run natively where that is faster.

    ``panels`` are what several blocks share: weights that were laid out in one before.
    """
    if not extension_loads():
        yield
        return
    thread, known = threading.get_ident(), Panels() if panels is None else panels
    before: list[Any] = [getattr(kind, _METHOD) for kind in _LAYERS]
    for kind, forward in zip(_LAYERS, before, strict=True):

        def native(
            layer: Any, x: torch.Tensor, weight: torch.Tensor, bias: Any, forward: Any = forward
        ) -> torch.Tensor:
            own = threading.get_ident() == thread
            found = _product(layer, x, weight, bias, known) if own else None
            return forward(layer, x, weight, bias) if found is None else found

        setattr(kind, _METHOD, native)
    try:
        yield
    finally:
        for kind, forward in zip(_LAYERS, before, strict=True):
            setattr(kind, _METHOD, forward)


def _product(
    layer: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, panels: Panels
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
    if not x.numel() or x.shape[1] != weight.shape[1]:  # torch says what does not fit
        return None
    if kernel == [1] * len(kernel) and set(layer.stride) == {1}:
        rows, images, size = x.shape[2:].numel(), x.shape[0], list(x.shape[2:])
        length = rows
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
    packed, biases = panels.of(weight, bias)
    found: torch.Tensor = extension.native().float_rows(
        flat, packed, biases, len(weight), rows, stride * channels
    )
    return _shaped(found, size)


def _shaped(found: torch.Tensor, size: list[int]) -> torch.Tensor:
    """Rows of channels as an image, in the memory they lie in."""
    return found.reshape(len(found), *size, -1).movedim(-1, 1)
