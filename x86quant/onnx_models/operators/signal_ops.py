"""Operators of signals."""

from __future__ import annotations

import math
from typing import Any

import torch

from x86quant.onnx_models.element_types import torch_dtype
from x86quant.onnx_models.operator_table import operator, type_lacks

_WINDOWS = {
    "HannWindow": (0.5, 0.5, 0.0),
    "HammingWindow": (25 / 46, 1 - 25 / 46, 0.0),
    "BlackmanWindow": (0.42, 0.5, 0.08),
}


@operator(*_WINDOWS, scalars=(0,), lacks=type_lacks)
def window(size: Any, *, output_datatype: int, periodic: int, op_type: str) -> Any:
    """A window of cosines."""
    size = int(size if isinstance(size, int) else size.item())
    a, b, c = _WINDOWS[op_type]
    turn = 2 * math.pi * torch.arange(size, dtype=torch.float64) / (size if periodic else size - 1)
    found = a - b * torch.cos(turn) + c * torch.cos(2 * turn)
    return found.to(torch_dtype(output_datatype, "a window"))


@operator("DFT", scalars=(1, 2))
def dft(
    x: Any,
    length: Any = None,
    dim: Any = None,
    *,
    axis: int = -2,
    inverse: int,
    onesided: int,
    version: int,
) -> Any:
    """The discrete Fourier transform of real or complex values, which lie last."""
    dim = axis if dim is None else _whole(dim)
    size = None if length is None else _whole(length)
    dim = dim % x.dim()
    if inverse and onesided:
        values = torch.complex(x[..., 0], x[..., 1])
        count = 2 * (x.shape[dim] - 1) if size is None else size
        return torch.fft.irfft(values, count, dim).unsqueeze(-1)
    if x.shape[-1] == 1:
        values = torch.complex(x[..., 0], torch.zeros_like(x[..., 0]))
    else:
        values = torch.complex(x[..., 0], x[..., 1])
    found = torch.fft.ifft(values, size, dim) if inverse else torch.fft.fft(values, size, dim)
    if onesided:
        found = found.narrow(dim, 0, found.shape[dim] // 2 + 1)
    return torch.view_as_real(found)


def _whole(value: Any) -> int:
    return int(value if isinstance(value, int) else value.item())


@operator("STFT", scalars=(1, 3))
def stft(x: Any, step: Any, window: Any = None, length: Any = None, *, onesided: int) -> Any:
    """The Fourier transforms of frames."""
    size = window.shape[0] if length is None else _whole(length)
    if x.dim() == 3 and x.shape[-1] == 2:
        signal = torch.complex(x[..., 0], x[..., 1])
    else:
        signal = x[..., 0] if x.dim() == 3 else x
    frames = signal.unfold(1, size, _whole(step))
    frames = frames if window is None else frames * window
    found = torch.fft.fft(frames, dim=-1)
    return torch.view_as_real(found[..., : size // 2 + 1] if onesided else found)
