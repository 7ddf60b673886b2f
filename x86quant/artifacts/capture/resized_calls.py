"""Whether a captured graph does what the model does, at the example's sizes and at others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from x86quant.calling.differences import SAME_ARITHMETIC, difference
from x86quant.compiled import GuardedModule
from x86quant.errors import ArtifactError, InvalidInputError, UnsupportedError, X86QuantError
from x86quant.forms.guard import Guard
from x86quant.forms.size_conditions import excludes_one, size_of


def compare(model: nn.Module, saved: GuardedModule, leaves: Sequence[torch.Tensor]) -> None:
    """Raise ArtifactError unless ``saved`` gives the results of ``model``, at any size tried."""
    # The first call comes again: some models count their calls, or remember what they were given.
    for tried in (*_variants(saved, leaves), leaves):
        try:
            _compare_one(model, saved, tried)
        except InvalidInputError:
            if tried is leaves:
                raise ArtifactError("its graph refuses the example") from None


def _compare_one(model: nn.Module, saved: GuardedModule, leaves: Sequence[torch.Tensor]) -> None:
    """Raise ArtifactError unless ``saved`` does with ``leaves`` what ``model`` does.

    What ``model`` itself refuses ``saved`` may refuse in other words.
    """
    args, kwargs = saved.form.call([x.clone() for x in leaves])
    with torch.no_grad():
        try:
            expected = model(*args, **kwargs)
        except Exception as error:  # whatever the model's own code raises for such sizes
            raise InvalidInputError(str(error)) from error
        args, kwargs = saved.form.call([x.clone() for x in leaves])
        try:
            found = saved(*args, **kwargs)
        except InvalidInputError:
            raise
        except Exception as error:
            raise ArtifactError(
                f"its graph fails on inputs of {shapes_of(leaves)}: {error}"
            ) from error
    try:
        reason = difference(expected, found, SAME_ARITHMETIC)
    except UnsupportedError as error:
        raise ArtifactError(str(error)) from error
    if reason is not None:
        raise ArtifactError(
            f"its graph gives other results on inputs of {shapes_of(leaves)}: {reason}"
        )


def with_ones(
    model: nn.Module, saved: GuardedModule, leaves: Sequence[torch.Tensor]
) -> GuardedModule:
    """``saved`` without the conditions that a size is not one, where it holds for one as well.

    Export asks whether a size is one to know whether memory is contiguous; hardly any model does.
    A model that does gives another result here.
    """
    for condition in filter(excludes_one, saved.guard.conditions):
        _, number, dim = condition[1]
        before = leaves[number].shape[dim]
        tried = [_resized(x, {dim}, before, 1) for x in leaves]
        # Sizes that must be equal become one together.
        ones = [size_of(i, d) for i, x in enumerate(tried) for d, n in enumerate(x.shape) if n == 1]
        narrow = saved.guard
        wider = dict.fromkeys(
            (">=", c[1], 1) if excludes_one(c) and c[1] in ones else c for c in narrow.conditions
        )
        saved.guard = Guard(narrow.inputs, tuple(wider))
        try:
            if saved.guard.refusal(tried) is None:
                _compare_one(model, saved, tried)
                continue
        except X86QuantError:
            pass
        saved.guard = narrow
    return saved


def takes(saved: GuardedModule, leaves: Sequence[torch.Tensor]) -> bool:
    """Whether the graph holds for inputs of these sizes."""
    return saved.guard.refusal(leaves) is None


def _variants(
    saved: GuardedModule, leaves: Sequence[torch.Tensor]
) -> Iterator[Sequence[torch.Tensor]]:
    """``leaves``, and such of other sizes that the conditions allow."""
    yield leaves
    yield from (tried for tried in resizings(leaves) if takes(saved, tried))


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
