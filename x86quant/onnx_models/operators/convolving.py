"""Convolutions and products, where their weights are values; constant ones become layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from x86quant.onnx_models.operator_table import numbers_of, operator

CONVS = (F.conv1d, F.conv2d, F.conv3d)
TRANSPOSED = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)


def widths_around(
    sizes: Sequence[Any],
    kernel: Sequence[int],
    strides: Sequence[int],
    dilations: Sequence[int],
    pads: Sequence[int] | None,
    auto_pad: str,
) -> list[Any]:
    """The padding before each dimension and then behind each, as ONNX lists it."""
    rank = len(kernel)
    if auto_pad == "VALID":
        return [0] * (2 * rank)
    if auto_pad == "NOTSET":
        return list(pads or [0] * (2 * rank))
    before, behind = [], []
    for size, k, step, dilation in zip(sizes, kernel, strides, dilations, strict=True):
        reach = (k - 1) * dilation + 1
        if step == 1:
            total = reach - 1
        else:
            results = (size + step - 1) // step
            total = (results - 1) * step + reach - size
            total = max(total, 0) if isinstance(total, int) else total
        less = total // 2
        before.append(total - less if auto_pad == "SAME_LOWER" else less)
        behind.append(less if auto_pad == "SAME_LOWER" else total - less)
    return before + behind


def torch_order(pads: Sequence[Any]) -> list[Any]:
    """Paddings as ``F.pad`` takes them: from the last dimension, both sides of each."""
    rank = len(pads) // 2
    return [pads[n + side] for n in reversed(range(rank)) for side in (0, rank)]


def is_even(pads: Sequence[Any]) -> bool:
    """Whether the padding is the same on both sides, and known."""
    half = len(pads) // 2
    return all(isinstance(pad, int) and pad >= 0 for pad in pads) and list(pads[:half]) == list(
        pads[half:]
    )


@operator("Conv")
def convolution(
    x: Any,
    weight: Any,
    bias: Any = None,
    *,
    auto_pad: str,
    dilations: Any = None,
    group: int,
    kernel_shape: Any = None,
    pads: Any = None,
    strides: Any = None,
) -> Any:
    """The convolution of ``x``, N×C×..., with ``weight``, O×(C/group)×...."""
    rank = weight.dim() - 2
    strides, dilations = list(strides or [1] * rank), list(dilations or [1] * rank)
    sizes = [x.shape[n + 2] for n in range(rank)]
    kernel = [weight.shape[n + 2] for n in range(rank)]
    around = widths_around(sizes, kernel, strides, dilations, pads, auto_pad)
    if is_even(around):
        return CONVS[rank - 1](x, weight, bias, strides, around[:rank], dilations, group)
    x = F.pad(x, torch_order(around))
    return CONVS[rank - 1](x, weight, bias, strides, 0, dilations, group)


@operator("ConvTranspose")
def transposed_convolution(
    x: Any,
    weight: Any,
    bias: Any = None,
    *,
    auto_pad: str,
    dilations: Any = None,
    group: int,
    kernel_shape: Any = None,
    output_padding: Any = None,
    output_shape: Any = None,
    pads: Any = None,
    strides: Any = None,
) -> Any:
    """The transposed convolution; what its padding cuts off is cut behind it."""
    rank = weight.dim() - 2
    strides, dilations = list(strides or [1] * rank), list(dilations or [1] * rank)
    extra = list(output_padding or [0] * rank)
    sizes = [x.shape[n + 2] for n in range(rank)]
    kernel = [weight.shape[n + 2] for n in range(rank)]
    if output_shape is None and auto_pad in ("SAME_UPPER", "SAME_LOWER"):
        output_shape = [size * step for size, step in zip(sizes, strides, strict=True)]
    around = [0] * (2 * rank) if auto_pad != "NOTSET" else list(pads or [0] * (2 * rank))
    if output_shape is not None:
        for n, wanted in enumerate(list(output_shape)[-rank:]):
            full = strides[n] * (sizes[n] - 1) + extra[n] + (kernel[n] - 1) * dilations[n] + 1
            total = full - wanted
            less = total // 2
            upper = auto_pad == "SAME_UPPER"
            around[n] = less if upper else total - less
            around[n + rank] = total - less if upper else less
    function = TRANSPOSED[rank - 1]
    if is_even(around):
        return function(x, weight, bias, strides, around[:rank], extra, group, dilations)
    # Wider where the padding behind is the smaller one, so that it can be cut.
    found = function(x, weight, None, strides, 0, 0, group, dilations)
    cut = [-pad for pad in around]
    cut[rank:] = [c + e for c, e in zip(cut[rank:], extra, strict=True)]
    found = F.pad(found, torch_order(cut))
    return found if bias is None else found + bias.reshape(-1, *[1] * rank)


@operator("MatMul")
def product(x: Any, y: Any) -> Any:
    """The matrix product."""
    return torch.matmul(x, y)


@operator("Gemm", oldest=7)
def gemm(
    a: Any,
    b: Any,
    c: Any = None,
    *,
    alpha: float,
    beta: float,
    transA: int,  # noqa: N803
    transB: int,  # noqa: N803
) -> Any:
    """``alpha * a @ b + beta * c``."""
    a, b = a.transpose(0, 1) if transA else a, b.transpose(0, 1) if transB else b
    found = torch.matmul(a, b)
    if alpha != 1:
        found = (found * alpha).to(a.dtype)
    if c is None:
        return found
    return found + (c if beta == 1 else (c * beta).to(a.dtype))


@operator("FusedMatMul", domain="com.microsoft")
def fused_matmul(
    x: Any,
    y: Any,
    *,
    alpha: float = 1.0,
    transA: int = 0,  # noqa: N803
    transB: int = 0,  # noqa: N803
) -> Any:
    """The matrix product of transposed operands, times ``alpha``."""
    x, y = x.transpose(-1, -2) if transA else x, y.transpose(-1, -2) if transB else y
    return torch.matmul(x, y) * alpha


@operator("Einsum")
def einsum(*xs: Any, equation: str) -> Any:
    """The sum of products that ``equation`` says."""
    equation = equation.replace(" ", "")
    if "->" not in equation:  # the letters that occur once, in the alphabet's order
        letters = equation.replace(",", "").replace(".", "")
        once = sorted(letter for letter in set(letters) if letters.count(letter) == 1)
        equation += "->" + ("..." if "..." in equation else "") + "".join(once)
    return torch.einsum(equation, *xs)


@operator("Col2Im", numbers=(1, 2))
def col2im(
    x: Any, sizes: Any, block: Any, *, dilations: Any = None, pads: Any = None, strides: Any = None
) -> Any:
    """Columns put back into a picture, summed where they overlap."""
    sizes, block = numbers_of(sizes), numbers_of(block)
    rank = len(sizes)
    strides, dilations = list(strides or [1] * rank), list(dilations or [1] * rank)
    pads = list(pads or [0] * (2 * rank))
    wide = [size + pads[n] + pads[n + rank] for n, size in enumerate(sizes)]
    counts = [
        (w - d * (b - 1) - 1) // s + 1
        for w, d, b, s in zip(wide, dilations, block, strides, strict=True)
    ]
    n, channels = x.shape[0], x.shape[1]
    elements = 1
    for b in block:
        elements *= b
    # One convolution, transposed, with a kernel that puts each element at its place.
    kernel = torch.eye(elements, dtype=x.dtype).reshape(elements, 1, *block)
    x = x.reshape(n * (channels // elements), elements, *counts)
    found = TRANSPOSED[rank - 1](x, kernel, None, strides, 0, 0, 1, dilations)
    missing = [w - found.shape[k + 2] for k, w in enumerate(wide)]
    cut = [-pad for pad in pads]
    cut[rank:] = [c + m for c, m in zip(cut[rank:], missing, strict=True)]
    found = F.pad(found, torch_order(cut))
    return found.reshape(n, channels // elements, *sizes)


@operator("AffineGrid", numbers=(1,))
def affine_grid(theta: Any, sizes: Any, *, align_corners: int) -> Any:
    """Places to sample at."""
    return F.affine_grid(theta, numbers_of(sizes), bool(align_corners))
