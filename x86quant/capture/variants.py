"""Calls at other sizes than those at hand: a single row, two rows, shorter and longer in each of
the other dimensions, and with a tensor less in a list. Of large calls, these are smaller ones.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import nn

from x86quant.calling.call import Call
from x86quant.calling.running import run
from x86quant.calling.state import state_kept
from x86quant.errors import X86QuantWarning

#: By what sizes are multiplied.
_LONGER = 1.5
_FACTORS = (0.5, _LONGER, 2.0)
#: All variants together have at most so many times the elements of a calibration batch.
_GROWTH = 6
#: The same where other sizes are those of a smaller call.
_GROWTH_OF_SMALLER = 1.5
#: From so many elements on, the time of a run is in proportion to them.
_LARGE = 1 << 15
#: What the dimensions of a large call are divided by, the first that the model takes.
_DIVISORS = (4, 2)
#: No dimension is made smaller than this.
_LEAST = 16


def variants(
    sample: Sequence[Call], takes: Callable[[Call], bool] | None = None, growth: int = _GROWTH
) -> tuple[Call, ...]:
    """Calls of ``sample``, and the same at other sizes, which a model may take or not.

    Where ``takes`` tells what it takes, other sizes of a large call are those of a smaller one: a
    graph that holds for some sizes only shows there, too, in a fraction of the time. How many there
    are depends on that and on the sizes alone, so that every machine checks the same.
    """
    first = sample[0]
    rows = shared_rows(first)
    smaller, full = (first, {}) if takes is None else _smaller(first, takes)
    tried = [resized(smaller, 0, rows, size) for size in (1, 2, rows + 1) if rows and size != rows]
    # The first item, so that a model with layers of its own for each item does not take it.
    if len((fewer := smaller.without_first_items()).leaves) < len(first.leaves):
        tried.append(fewer)
    # Few rows take little time, whether they are two or three.
    small = resized(smaller, 0, rows, 2) if rows > 2 else smaller  # same either way
    if full and not tried:
        tried.append(small)
    tried += _of_other_sizes(small, full)
    found = [first, *sample[1:2], *sample[2:][-1:]]
    left = (_GROWTH_OF_SMALLER if full else growth) * elements(first)
    sizes_found: set[str] = set()
    for call in tried:
        # Of a single row, "two rows" and "one row more" are one and the same.
        if str(call) not in sizes_found and (cost := elements(call)) <= left:
            left -= cost
            found.append(call)
            sizes_found.add(str(call))
    return tuple(found)


def _of_other_sizes(small: Call, full: Mapping[int, int]) -> Iterator[Call]:
    """``small`` with other sizes in each of the other dimensions.

    Sizes that are keys of ``full`` are shorter than the call's own already. They are tried longer
    than these, in one dimension at a time, and not often: in a large model, small calls take time.
    """
    sizes = _other_sizes(small)
    rest = [(dim, size) for dim, size in sizes if size not in full]
    together = [(dim, size) for dim, size in sizes if size in full and dim is None]
    by_itself = [(dim, size) for dim, size in sizes if size in full and dim is not None]
    found = {size for _, size in by_itself}
    alone = [*by_itself, *((dim, size) for dim, size in together if size not in found)]
    for factor in _FACTORS:
        yield from (resized(small, dim, size, int(size * factor)) for dim, size in rest)
    yield from (resized(small, dim, size, int(full[size] * _LONGER)) for dim, size in alone)
    yield from (resized(small, dim, size, size + 1) for dim, size in (*rest, *together))
    yield from (resized(small, dim, size, 1) for dim, size in sizes)


def _smaller(
    call: Call, takes: Callable[[Call], bool], divisors: Sequence[int] = _DIVISORS
) -> tuple[Call, dict[int, int]]:
    """``call``, if it is large, with its largest sizes divided, and which sizes those were.

    It is one that the model takes with another number of rows, too.
    """
    full: dict[int, int] = {}
    if elements(call) < _LARGE:
        return call, full
    rows = shared_rows(call)
    sizes = {size for x in call.leaves for size in x.shape[1:]}
    for size in sorted(sizes, reverse=True):
        for other in (size // divisor for divisor in divisors):
            if other < _LEAST or other in sizes:
                continue
            found = resized(call, None, size, other)
            if takes(resized(found, 0, rows, 2) if rows else found):
                call, full[other] = found, size
                break
    return call, full


def halved(call: Call, takes: Callable[[Call], bool]) -> Call:
    """``call`` with half of its largest sizes, if it is large and the model takes that."""
    return _smaller(call, takes, (2,))[0]


def takes(model: nn.Module, call: Call) -> bool:
    """Whether ``model`` runs on ``call``."""
    try:
        with state_kept(model), warnings.catch_warnings():
            # Parts may be int8 already, for other sizes; nobody asked for these.
            warnings.simplefilter("ignore", X86QuantWarning)
            run(model, call)
    except Exception:  # a model may raise anything at inputs that it does not take
        return False
    return True


def smallest(sample: Sequence[Call]) -> Call:
    """One row of the smallest call of ``sample``, or all of that if its tensors share no rows."""
    call = min(sample, key=elements)
    rows = shared_rows(call)
    return resized(call, 0, rows, 1) if rows > 1 else call


def elements(call: Call) -> int:
    """How many its tensors have together."""
    return sum(x.numel() for x in call.leaves)


def shared_rows(call: Call) -> int:
    """The size that all tensors share in their first dimension; 0 if they share none."""
    sizes = {x.shape[0] if x.dim() else 0 for x in call.leaves}
    return sizes.pop() if len(sizes) == 1 else 0


def _other_sizes(call: Call) -> list[tuple[int | None, int]]:
    """Dimensions after the first with their sizes; None stands for all of that size at once."""
    found: dict[tuple[int | None, int], None] = {}
    for x in call.leaves:
        for dim, size in reversed(list(enumerate(x.shape))):
            if dim and size > 1:
                found[(None, size)] = None
    for x in call.leaves:
        sizes = list(x.shape[1:])
        for dim, size in enumerate(x.shape):
            if dim and size > 1 and sizes.count(size) > 1:
                found[(dim, size)] = None
    return list(found)


def resized(call: Call, dim: int | None, size: int, other: int) -> Call:
    """``call`` with ``other`` for ``size`` in dimension ``dim``, or in all but the first."""

    def resize(x: torch.Tensor) -> torch.Tensor:
        dims = range(1, x.dim()) if dim is None else [dim] if dim < x.dim() else []
        for d in dims:
            if x.shape[d] == size:
                index = torch.arange(other) % size
                x = x.index_select(d, index)
        return x

    return call.mapped(resize)
