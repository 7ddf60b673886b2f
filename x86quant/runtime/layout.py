"""From strided tensors to the channels-last tensors of the native kernels."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

Words = list[int]

#: How many dimensions besides the channels a native tensor has: images, depth, height, width.
_OUTER = 4


def fits(meta: torch.Tensor, channel: int) -> bool:
    """Whether the channels of a pixel are adjacent."""
    return meta.shape[channel] == 1 or meta.stride(channel) == 1


def image(meta: torch.Tensor) -> tuple[Words, Words]:
    """Sizes n, d, h, w, c and the strides of the first four, of [N, C, *spatial], in elements."""
    # Asked for once, since making a plan does little else: a tensor makes them anew each time.
    images, channels, *spatial = meta.shape
    first, _, *inner = meta.stride()
    gap = _OUTER - 1 - len(spatial)  # spatial dimensions that are not there, after the images
    return (
        [images, *[1] * gap, *spatial, channels],
        [first, *[0] * gap, *inner],
    )


def rows(metas: Sequence[torch.Tensor], channel: int) -> list[tuple[Words, Words]] | None:
    """The same as for ``image``, of tensors that differ at most in their channels.

    Dimensions that continue one another in every tensor become one. None when more than four are
    left.
    """
    outer = [i for i in range(metas[0].dim()) if i != channel % metas[0].dim()]
    # In the order of the last tensor's memory, so that neighbours can join.
    outer.sort(key=metas[-1].stride().__getitem__, reverse=True)
    axes: list[tuple[int, list[int]]] = []
    for i in outer:
        size, strides = metas[0].shape[i], [m.stride(i) for m in metas]
        if size == 1:
            continue
        if axes and axes[-1][1] == [size * s for s in strides]:
            axes[-1] = (axes[-1][0] * size, strides)
        else:
            axes.append((size, strides))
    if len(axes) > _OUTER:
        return None
    axes[:0] = [(1, [0] * len(metas))] * (_OUTER - len(axes))
    sizes = [size for size, _ in axes]
    return [([*sizes, m.shape[channel]], [s[k] for _, s in axes]) for k, m in enumerate(metas)]


def like(
    sizes: Sequence[int], order: Sequence[int], dtype: torch.dtype = torch.uint8
) -> torch.Tensor:
    """A tensor without data whose dimensions lie in memory in ``order``, outermost first.

    Nobody changes it: networks have many tensors of one shape, and they share it.
    """
    return _like(tuple(sizes), tuple(order), dtype)


@functools.lru_cache(1024)
def _like(sizes: tuple[int, ...], order: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    strides = [0] * len(sizes)
    step = 1
    for i in reversed(order):
        strides[i] = step
        step *= max(sizes[i], 1)
    return torch.empty_strided(sizes, tuple(strides), dtype=dtype, device="meta")


def are_rows(meta: torch.Tensor) -> bool:
    """Whether the last dimension lies adjacent: features of tokens, not images."""
    return meta.shape[-1] > 1 and meta.stride(-1) == 1


def channels_last_order(rank: int) -> list[int]:
    """Channels innermost."""
    return [i for i in range(rank) if i != 1] + ([1] if rank > 1 else [])


def order_of(meta: torch.Tensor) -> list[int]:
    """The order of the dimensions in memory, outermost first."""
    return sorted(range(meta.dim()), key=meta.stride().__getitem__, reverse=True)
