"""Resize, Upsample and GridSample."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from x86quant.onnx_models.operator_table import numbers_of, operator

_LINEAR = {3: "linear", 4: "bilinear", 5: "trilinear"}


@operator("Upsample", numbers=(1,), oldest=7)
def upsample(x: Any, factors: Any = None, *, mode: str, scales: Any = None) -> Any:
    """Resize of versions 7 to 9."""
    return resize(
        x, None, scales if factors is None else factors,
        coordinate_transformation_mode="asymmetric", cubic_coeff_a=-0.75, exclude_outside=0,
        extrapolation_value=0.0, mode=mode, nearest_mode="floor", version=11,
    )  # fmt: skip


@operator("Resize", numbers=(1, 2, 3))
def resize(
    x: Any,
    region: Any = None,
    scales: Any = None,
    sizes: Any = None,
    *,
    antialias: int = 0,
    axes: Any = None,
    coordinate_transformation_mode: str = "asymmetric",
    cubic_coeff_a: float = -0.75,
    exclude_outside: int = 0,
    extrapolation_value: float = 0.0,
    keep_aspect_ratio_policy: str = "stretch",
    mode: str,
    nearest_mode: str = "floor",
    version: int,
) -> Any:
    """``x`` in other sizes along some dimensions."""
    if version < 11:
        region, scales = None, region
    place = coordinate_transformation_mode
    dims = list(range(x.dim())) if axes is None else [d % x.dim() for d in axes]
    factors = None if scales is None or len(numbers_of(scales)) == 0 else numbers_of(scales)
    wanted = None if sizes is None or len(numbers_of(sizes)) == 0 else numbers_of(sizes)
    if wanted is not None and keep_aspect_ratio_policy != "stretch":
        ratios = [size / x.shape[dim] for size, dim in zip(wanted, dims, strict=True)]
        ratio = min(ratios) if keep_aspect_ratio_policy == "not_larger" else max(ratios)
        wanted = [math.floor(x.shape[dim] * ratio + 0.5) for dim in dims]
        factors = [ratio] * len(dims)
    elif wanted is not None:
        factors = None
    simple = _by_interpolate(x, dims, factors, wanted, mode, place, nearest_mode, antialias)
    if simple is not None:
        return simple
    region = None if place != "tf_crop_and_resize" else numbers_of(region)
    kernel = _Kernel(mode, nearest_mode, cubic_coeff_a, bool(exclude_outside), bool(antialias))
    for n, dim in enumerate(dims):
        size = x.shape[dim]
        factor = None if factors is None else factors[n]
        length = math.floor(size * factor) if wanted is None else wanted[n]
        factor = length / size if factor is None else factor
        if length == size and factor == 1 and region is None:
            continue
        crop = None if region is None else (region[n], region[n + len(dims)])
        at = _places(size, length, factor, place, crop)
        matrix = kernel.matrix(at, size, factor)
        if region is not None:
            outside = (at < 0) | (at > size - 1)
        moved = torch.matmul(x.transpose(dim, -1).to(torch.float32), matrix.t().to(torch.float32))
        if region is not None:
            moved = torch.where(outside, extrapolation_value, moved)
        x = moved.transpose(dim, -1).to(x.dtype)
    return x


def _by_interpolate(
    x: Any,
    dims: Sequence[int],
    factors: list[Any] | None,
    wanted: list[Any] | None,
    mode: str,
    place: str,
    nearest: str,
    antialias: int,
) -> Any:
    """By ``F.interpolate``, where that does the same; else None."""
    rank = x.dim()
    if rank not in _LINEAR or antialias or not x.is_floating_point():
        return None
    spatial = list(range(2, rank))
    if list(dims) not in (spatial, list(range(rank))):
        return None
    lead = len(dims) - len(spatial)
    if factors is not None and any(f != 1 for f in factors[:lead]):
        return None
    floors = (place, nearest) == ("asymmetric", "floor")
    blocks = _is_even_up(factors, lead) and _keeps_blocks(place, nearest)
    if mode == "nearest" and (floors or blocks):
        kind, corners = "nearest", None
    elif mode == "linear" and place in ("half_pixel", "pytorch_half_pixel", "align_corners"):
        if wanted is not None and place == "pytorch_half_pixel":
            return None
        kind, corners = _LINEAR[rank], place == "align_corners"
    else:
        return None
    if factors is None:
        assert wanted is not None
        return F.interpolate(x, size=wanted[lead:], mode=kind, align_corners=corners)
    if wanted is not None or (corners and not _is_even_up(factors, lead)):
        return None
    return F.interpolate(x, scale_factor=factors[lead:], mode=kind, align_corners=corners)


def _is_even_up(factors: list[Any] | None, lead: int) -> bool:
    """Whether pixels become blocks of whole sizes."""
    return factors is not None and all(f == int(f) and f >= 1 for f in factors[lead:])


def _keeps_blocks(place: str, nearest: str) -> bool:
    """Whether each block is of its own pixel alone, for factors that are whole numbers."""
    return place in ("half_pixel", "pytorch_half_pixel") and nearest.startswith("round_prefer")


def _places(
    size: int, length: int, factor: float, place: str, crop: tuple[float, float] | None
) -> torch.Tensor:
    """Where each result lies among the values that are given."""
    at = torch.arange(length, dtype=torch.float64)
    if place == "asymmetric":
        return at / factor
    if place == "half_pixel" or (place == "pytorch_half_pixel" and length > 1):
        return (at + 0.5) / factor - 0.5
    if place == "pytorch_half_pixel":
        return torch.zeros_like(at)
    if place == "half_pixel_symmetric":
        adjust = length / (size * factor)
        return size / 2 * (1 - adjust) + (at + 0.5) / factor - 0.5
    if place == "align_corners":
        return at * (size - 1) / (length - 1) if length != 1 else torch.zeros_like(at)
    if place == "tf_half_pixel_for_nn":
        return (at + 0.5) / factor
    assert crop is not None, place
    begin, end = crop
    if length > 1:
        return begin * (size - 1) + at * (end - begin) * (size - 1) / (length - 1)
    return torch.full_like(at, 0.5 * (begin + end) * (size - 1))


class _Kernel:
    """How much of each value there is in a result."""

    def __init__(self, mode: str, nearest: str, a: float, exclude: bool, antialias: bool) -> None:
        self._mode, self._nearest, self._a = mode, nearest, a
        self._exclude, self._antialias = exclude, antialias

    def matrix(self, at: torch.Tensor, size: int, factor: float) -> torch.Tensor:
        """Shares, a row for each result."""
        if self._mode == "nearest":
            return F.one_hot(self._rounded(at).clamp(0, size - 1), size).to(torch.float64)
        stretch = min(factor, 1.0) if self._antialias else 1.0
        reach = math.ceil((2 if self._mode == "cubic" else 1) / stretch)
        first = torch.floor(at).to(torch.int64)
        index = first[:, None] + torch.arange(1 - reach, reach + 1)[None, :]
        share = self._share((index - at[:, None]) * stretch)
        if self._exclude or self._antialias:
            inside = (index >= 0) & (index < size)
            share = torch.where(
                inside | torch.tensor(not self._exclude, dtype=torch.bool), share, 0.0
            )
            share = share / share.sum(1, keepdim=True)
        found = torch.zeros(len(at), size, dtype=torch.float64)
        return found.scatter_add(1, index.clamp(0, size - 1), share)

    def _rounded(self, at: torch.Tensor) -> torch.Tensor:
        if self._nearest == "round_prefer_floor":
            return torch.ceil(at - 0.5).to(torch.int64)
        if self._nearest == "round_prefer_ceil":
            return torch.floor(at + 0.5).to(torch.int64)
        return (torch.floor(at) if self._nearest == "floor" else torch.ceil(at)).to(torch.int64)

    def _share(self, distance: torch.Tensor) -> torch.Tensor:
        d, a = distance.abs(), self._a
        if self._mode == "linear":
            return (1 - d).clamp(min=0)
        near = (a + 2) * d**3 - (a + 3) * d**2 + 1
        far = a * d**3 - 5 * a * d**2 + 8 * a * d - 4 * a
        return torch.where(d <= 1, near, torch.where(d < 2, far, torch.zeros_like(d)))


_GRID = {"bilinear": "bilinear", "linear": "bilinear", "nearest": "nearest", "bicubic": "bicubic",
         "cubic": "bicubic"}  # fmt: skip


@operator("GridSample")
def grid_sample(x: Any, grid: Any, *, align_corners: int, mode: str, padding_mode: str) -> Any:
    """Values at the places of ``grid``."""
    return F.grid_sample(x, grid, _GRID[mode], padding_mode, bool(align_corners))
