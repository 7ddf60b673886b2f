"""Tensors as small PNG pictures inside a page."""

from __future__ import annotations

import base64
import struct
import zlib

import torch
import torch.nn.functional as F  # noqa: N812

#: Smaller sizes are no picture; larger ones are scaled down to this.
_SMALLEST, _LARGEST = 8, 160


def is_picture(x: torch.Tensor) -> bool:
    """Whether ``x`` [channels, height, width] can be looked at: grey or colours."""
    return x.dim() == 3 and x.shape[0] in (1, 3) and min(x.shape[1:]) >= _SMALLEST


def is_map(x: torch.Tensor) -> bool:
    """Whether ``x`` [classes, height, width] gives each place its class."""
    return x.dim() == 3 and x.shape[0] > 1 and min(x.shape[1:]) >= _SMALLEST


def picture(x: torch.Tensor) -> str:
    """``x`` [1 or 3, height, width] as a data URL, from its least value to its largest."""
    x = torch.nan_to_num(x.detach().float(), 0.0, 0.0, 0.0)
    factor = _LARGEST / max(x.shape[1:])
    if factor < 1:
        size = [max(1, round(n * factor)) for n in x.shape[1:]]
        x = F.interpolate(x[None], size, mode="area")[0]
    low, high = x.min(), x.max()
    codes = ((x - low) / (high - low).clamp(min=1e-12) * 255).round().to(torch.uint8)
    return _png(codes.movedim(0, 2).contiguous())


def class_map(x: torch.Tensor) -> str:
    """The class of each place of ``x`` [classes, height, width], in shades of grey."""
    return picture(x.argmax(0, keepdim=True).float() / max(x.shape[0] - 1, 1))


def _png(codes: torch.Tensor) -> str:
    """``codes`` [height, width, 1 or 3] of uint8."""
    height, width, channels = codes.shape
    rows = codes.reshape(height, width * channels).numpy()
    lines = b"".join(b"\0" + row.tobytes() for row in rows)  # each line without a filter
    head = struct.pack(">IIBBBBB", width, height, 8, 2 if channels == 3 else 0, 0, 0, 0)
    whole = b"\x89PNG\r\n\x1a\n" + b"".join(
        _chunk(kind, data)
        for kind, data in ((b"IHDR", head), (b"IDAT", zlib.compress(lines)), (b"IEND", b""))
    )
    return "data:image/png;base64," + base64.b64encode(whole).decode()


def _chunk(kind: bytes, data: bytes) -> bytes:
    checked = kind + data
    return struct.pack(">I", len(data)) + checked + struct.pack(">I", zlib.crc32(checked))
