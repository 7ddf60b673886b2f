"""Operators of detectors."""

from __future__ import annotations

from typing import Any

import torch

from x86quant.onnx_models.operator_table import operator


def _value(number: Any, usual: Any) -> Any:
    if number is None:
        return usual
    return number.reshape(-1)[0].item() if isinstance(number, torch.Tensor) else number


@operator("NonMaxSuppression", scalars=(2, 3, 4))
def non_max_suppression(
    boxes: Any,
    scores: Any,
    most: Any = None,
    overlap: Any = None,
    least: Any = None,
    *,
    center_point_box: int,
) -> Any:
    """Rows of batch, class and box: the best boxes, and those that overlap no better one much."""
    most, overlap, least = int(_value(most, 0)), _value(overlap, 0.0), _value(least, None)
    if center_point_box:
        x, y, w, h = boxes.unbind(-1)
        corners = torch.stack([x - w / 2, y - h / 2, x + w / 2, y + h / 2], -1)
    else:
        first, second = boxes[..., :2], boxes[..., 2:]
        corners = torch.cat([torch.minimum(first, second), torch.maximum(first, second)], -1)
    found = [
        torch.tensor([[n, c, box]], dtype=torch.int64)
        for n in range(scores.shape[0])
        for c in range(scores.shape[1])
        for box in _best(corners[n], scores[n, c], most, overlap, least)
    ]
    return torch.cat(found) if found else torch.zeros(0, 3, dtype=torch.int64)


def _best(
    boxes: torch.Tensor, scores: torch.Tensor, most: int, overlap: float, least: float | None
) -> list[int]:
    order = torch.sort(scores, descending=True, stable=True).indices
    if least is not None:
        order = order[scores[order] > least]
    kept: list[int] = []
    while len(order) and len(kept) < most:
        best = order[0]
        kept.append(int(best))
        order = order[1:]
        order = order[_shared(boxes[best], boxes[order]) <= overlap]
    return kept


def _shared(one: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """The intersection of ``one`` with each of the others, by their union."""
    sides = torch.minimum(one[2:], others[:, 2:]) - torch.maximum(one[:2], others[:, :2])
    both = sides.clamp(min=0).prod(-1)
    areas = (others[:, 2:] - others[:, :2]).prod(-1) + (one[2:] - one[:2]).prod()
    return torch.where(both > 0, both / (areas - both), torch.zeros_like(both))


@operator("RoiAlign")
def roi_align(
    x: Any,
    rois: Any,
    batches: Any,
    *,
    coordinate_transformation_mode: str = "output_half_pixel",
    mode: str,
    output_height: int,
    output_width: int,
    sampling_ratio: int,
    spatial_scale: float,
) -> Any:
    """Regions in one size, by samples between pixels."""
    half = 0.5 if coordinate_transformation_mode == "half_pixel" else 0.0
    results = []
    for roi, batch in zip(rois.tolist(), batches.tolist(), strict=True):
        left, top, right, bottom = (v * spatial_scale - half for v in roi)
        width, height = right - left, bottom - top
        if not half:
            width, height = max(width, 1.0), max(height, 1.0)
        rows = _samples(top, height, output_height, sampling_ratio)
        columns = _samples(left, width, output_width, sampling_ratio)
        values = _between(x[int(batch)], rows, columns, mode == "max")
        results.append(values)
    if not results:
        return x.new_zeros(0, x.shape[1], output_height, output_width)
    return torch.stack(results)


def _samples(begin: float, length: float, bins: int, ratio: int) -> torch.Tensor:
    """Where samples are taken, bins×samples."""
    size = length / bins
    number = ratio if ratio > 0 else max(-int(-size // 1), 1)
    inner = (torch.arange(number, dtype=torch.float64) + 0.5) / number
    return begin + (torch.arange(bins, dtype=torch.float64)[:, None] + inner[None, :]) * size


def _between(
    x: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor, greatest: bool
) -> torch.Tensor:
    bins = (rows.shape[0], rows.shape[1], columns.shape[0], columns.shape[1])
    y0, y1, fy, in_y = _pair(rows.reshape(-1), x.shape[1])
    x0, x1, fx, in_x = _pair(columns.reshape(-1), x.shape[2])
    inside = (in_y[:, None] & in_x[None, :]).to(x.dtype)
    parts = [
        x[:, ys][:, :, xs] * (wy[:, None] * wx[None, :]).to(x.dtype) * inside
        for ys, wy in ((y0, 1 - fy), (y1, fy))
        for xs, wx in ((x0, 1 - fx), (x1, fx))
    ]
    if greatest:  # of the four weighted neighbours of each sample, as ONNX Runtime does it
        joined = torch.stack(parts).amax(0).reshape(-1, *bins)
        return joined.amax((2, 4))
    return torch.stack(parts).sum(0).reshape(-1, *bins).mean((2, 4))


def _pair(at: torch.Tensor, size: int) -> tuple[torch.Tensor, ...]:
    """The two pixels around each place, how far it is to the second, and whether it is inside."""
    inside = (at >= -1) & (at <= size)
    at = at.clamp(0, size - 1)
    first = at.floor().to(torch.int64)
    return first, (first + 1).clamp(max=size - 1), at - first, inside
