"""Whether a captured graph does what the model does, at the example's sizes and at others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from x86quant.artifacts.capture.saved import SavedModule
from x86quant.artifacts.capture.signatures import split_result
from x86quant.calling.call import dense
from x86quant.errors import ArtifactError, InvalidInputError, X86QuantError
from x86quant.forms.size_conditions import excludes_one, size_of


def compare(model: nn.Module, saved: SavedModule, leaves: Sequence[torch.Tensor]) -> None:
    """Raise ArtifactError unless ``saved`` gives the results of ``model``, at any size tried."""
    # The first call comes again: some models count their calls, or remember what they were given.
    for tried in (*_variants(saved, leaves), leaves):
        try:
            _compare_one(model, saved, tried)
        except InvalidInputError:
            if tried is leaves:
                raise ArtifactError("its graph refuses the example") from None


def _compare_one(model: nn.Module, saved: SavedModule, leaves: Sequence[torch.Tensor]) -> None:
    """Raise ArtifactError unless ``saved`` does with ``leaves`` what ``model`` does.

    What ``model`` itself refuses ``saved`` may refuse in other words.
    """
    args, kwargs = saved.signature.example([x.clone() for x in leaves])
    with torch.no_grad():
        try:
            expected = model(*args, **kwargs)
        except Exception as error:  # whatever the model's own code raises for such sizes
            raise InvalidInputError(str(error)) from error
        args, kwargs = saved.signature.example([x.clone() for x in leaves])
        try:
            found = saved(*args, **kwargs)
        except InvalidInputError:
            raise
        except Exception as error:
            raise ArtifactError(
                f"its graph fails on inputs of {shapes_of(leaves)}: {error}"
            ) from error
    if not same_results(expected, found):
        raise ArtifactError(f"its graph gives other results on inputs of {shapes_of(leaves)}")


def with_ones(model: nn.Module, saved: SavedModule, leaves: Sequence[torch.Tensor]) -> SavedModule:
    """``saved`` without the conditions that a size is not one, where it holds for one as well.

    Export asks whether a size is one to know whether memory is contiguous; hardly any model does.
    A model that does gives another result here.
    """
    for condition in filter(excludes_one, saved.signature.conditions):
        _, number, dim = condition[1]
        before = leaves[number].shape[dim]
        tried = [_resized(x, {dim}, before, 1) for x in leaves]
        # Sizes that must be equal become one together.
        ones = [size_of(i, d) for i, x in enumerate(tried) for d, n in enumerate(x.shape) if n == 1]
        wider = saved.with_ones(ones)
        if not wider.takes(tried):
            continue
        try:
            _compare_one(model, wider, tried)
        except X86QuantError:
            continue
        saved = wider
    return saved


def _variants(
    saved: SavedModule, leaves: Sequence[torch.Tensor]
) -> Iterator[Sequence[torch.Tensor]]:
    """``leaves``, and such of other sizes that the conditions allow."""
    yield leaves
    yield from filter(saved.takes, resizings(leaves))


def resizings(leaves: Sequence[torch.Tensor]) -> Iterator[Sequence[torch.Tensor]]:
    """``leaves`` with each of their sizes changed in turn, in one dimension and in all of them."""
    sizes = sorted({(dim, size) for x in leaves for dim, size in enumerate(x.shape) if size})
    for dim, size in sizes:
        for other in dict.fromkeys((1, size + 1, size - 1, 2 * size)):
            if other < 1 or other == size:
                continue
            alone = [_resized(x, {dim}, size, other) for x in leaves]
            everywhere = [_resized(x, set(range(x.dim())), size, other) for x in leaves]
            yield alone
            if [x.shape for x in alone] != [x.shape for x in everywhere]:
                yield everywhere


def _resized(x: torch.Tensor, dims: set[int], size: int, other: int) -> torch.Tensor:
    """``x`` repeated or cut from ``size`` to ``other`` along those of ``dims`` that have it."""
    for dim in dims:
        if dim < x.dim() and x.shape[dim] == size:
            x = x.index_select(dim, torch.arange(other) % size)
    return x


def shapes_of(leaves: Sequence[torch.Tensor]) -> str:
    """The shapes of ``leaves``, to be read."""
    return ", ".join(str(tuple(x.shape)) for x in leaves)


def same_results(one: Any, other: Any) -> bool:
    """Whether two results have equal structures, and equal values up to float rounding."""
    (a, xs), (b, ys) = split_result(one), split_result(other)
    return _alike(a, b) and len(xs) == len(ys) and all(map(_equal, xs, ys))


def _alike(a: Any, b: Any) -> bool:
    return type(a) is type(b) and a == b


#: Float products of torch may add up in another order from call to call.
_ROUNDING = 1e-5


def _equal(a: Any, b: Any) -> bool:
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return bool(a == b)
    if a.dtype != b.dtype or a.shape != b.shape or a.layout != b.layout:
        return False
    a, b = dense(a), dense(b)
    if not a.is_floating_point() or torch.equal(a, b):
        return torch.equal(a, b)
    largest = float(a.nan_to_num(0.0, 0.0, 0.0).abs().max())
    return torch.allclose(a, b, rtol=0.0, atol=_ROUNDING * largest, equal_nan=True)
