"""Lookups in embedding tables, and the interaction that follows them in a DLRM.

A row of a table holds its codes in 8, 4 or 2 bits, low bits first, then its scale and its least
value (bias), both float32 or both float16; FBGEMM's table-batched operators have these in front.
A row of 32 bits is float32 numbers, seen as bytes: codes with scale 1 and bias 0.
What a table is like is said by seven numbers, see ``TableFormat``.

``embedding_bags`` looks up any number of tables and returns their results side by side. In float32,
with the weight ``w`` of a sample, 1 where there is none, for the rows of a bag in order::

    sum    acc = fma(code, w * scale, acc + w * bias)
    mean   the sum * (1 / rows)
    max    the largest fma(code, scale, bias)

An empty bag is 0, and an index equal to ``padding`` is not there. Indices are int32 or int64. There
is one tensor for each table, or one for all of them whose first dimension is the tables. With
offsets indices are one-dimensional; without offsets they are [bags, indices of each].

``embedding_rows`` looks up one row for each of ``ids``.

``interact(dense, vectors)`` is ``dense`` [samples, size], and behind it the dot products of each of
``vectors`` [samples, n, size] with ``dense`` and with all vectors in front of it; with ``places``
those of the products, in that order. ``interact_bags`` looks up its vectors and returns codes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from x86quant import extension
from x86quant.errors import InvalidInputError
from x86quant.ops._register import OUT_QPARAMS, register
from x86quant.ops.quantization import quantize

MODES = ("sum", "mean", "max")
_NUMBERS = 7
_FLOAT_BITS = 32


@dataclasses.dataclass(frozen=True, slots=True)
class TableFormat:
    """How the bytes of a table's rows are to be read, and how its bags are pooled.

    Attributes:
        dim: values of a row.
        bits: of a code: 8, 4 or 2; 32 for floats.
        half: whether scale and bias are float16.
        front: whether they are in front of the codes.
        mode: "sum", "mean" or "max".
        padding: an index that counts for nothing; -1 for none.
    """

    dim: int
    bits: int = 8
    half: bool = False
    front: bool = False
    mode: str = "sum"
    padding: int = -1

    @property
    def code_bytes(self) -> int:
        """Bytes of a row's codes."""
        return (self.dim * self.bits + 7) // 8

    @property
    def scale_bytes(self) -> int:
        """Bytes of scale and bias."""
        if self.bits == _FLOAT_BITS:
            return 0
        return 4 if self.half else 8

    @property
    def numbers(self) -> list[int]:
        """As the operator takes it: dim, bits, where codes and scale are, half, mode, padding."""
        codes_at, scale_at = (self.scale_bytes, 0) if self.front else (0, self.code_bytes)
        mode = MODES.index(self.mode)
        return [self.dim, self.bits, codes_at, scale_at, int(self.half), mode, self.padding]

    @classmethod
    def of(cls, numbers: Sequence[int]) -> TableFormat:
        """What ``numbers`` gave.

        Raises:
            InvalidInputError: no format has these.
        """
        dim, bits, codes_at, _, half, mode, padding = numbers
        if mode in range(len(MODES)) and half in (0, 1):
            found = cls(dim, bits, bool(half), codes_at > 0, MODES[mode], padding)
            if dim > 0 and bits in (_FLOAT_BITS, 8, 4, 2) and found.numbers == list(numbers):
                return found
        raise InvalidInputError(f"x86quant::embedding_bags: no table has the format {numbers}")

    def floats(self, rows: torch.Tensor) -> torch.Tensor:
        """The values of ``rows`` [n, bytes], as float32 [n, dim]."""
        width, size = self.scale_bytes, self.code_bytes
        if self.bits == _FLOAT_BITS:
            return rows[:, :size].contiguous().view(torch.float32)
        codes = rows[:, width : width + size] if self.front else rows[:, :size]
        scales = (rows[:, :width] if self.front else rows[:, size : size + width]).contiguous()
        real = scales.view(torch.float16 if self.half else torch.float32).float()
        shifts = torch.arange(0, 8, self.bits, dtype=torch.uint8)
        split = (codes[:, :, None] >> shifts & ((1 << self.bits) - 1)).flatten(1)[:, : self.dim]
        # float64 holds the product exactly: one rounding, as an fma has.
        values = split.double() * real[:, :1].double() + real[:, 1:].double()
        return values.float()


_ARGUMENTS = (
    "Tensor[] rows, Tensor[] indices, Tensor[] offsets, Tensor[] weights, int[] formats, "
    "str[] names, bool include_last_offset=False"
)


def _native(*operands: Any) -> torch.Tensor | None:
    """``embedding_bags`` by the native kernel, which compares every index with its bounds."""
    from x86quant.packing.linear_dynamic import extension_loads  # the ops alone need no kernels

    if not extension_loads():
        return None
    try:
        found: torch.Tensor = extension.native().look_up_bags(*operands)
    except ValueError as error:
        raise InvalidInputError(str(error)) from None
    return found


def _shapes(
    rows: Sequence[torch.Tensor],
    indices: Sequence[torch.Tensor],
    offsets: Sequence[torch.Tensor],
    formats: Sequence[int],
    names: Sequence[str],
    include_last_offset: bool,
) -> torch.Tensor:
    stacked = len(names) > 1 and len(indices) == 1
    bags = indices[0].shape[int(stacked)]
    if offsets:
        stacked = len(names) > 1 and len(offsets) == 1
        bags = offsets[0].shape[int(stacked)] - int(include_last_offset)
    return rows[0].new_empty((bags, sum(formats[::_NUMBERS])), dtype=torch.float32)


@register(_ARGUMENTS, shapes=_shapes, native=_native)
def embedding_bags(
    rows: Sequence[torch.Tensor],
    indices: Sequence[torch.Tensor],
    offsets: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    formats: Sequence[int],
    names: Sequence[str],
    include_last_offset: bool = False,
) -> torch.Tensor:
    """The pooled rows of all tables, side by side: [bags, sum of sizes]."""
    count = len(rows)
    if not count or len(names) != count or len(formats) != _NUMBERS * count:
        raise InvalidInputError("x86quant::embedding_bags: one format and name for each table")
    found = []
    tables = zip(rows, names, _each(indices, count), _each(offsets, count), _each(weights, count),
                 strict=True)  # fmt: skip
    for i, (table, name, index, offset, weight) in enumerate(tables):
        form = TableFormat.of(formats[_NUMBERS * i : _NUMBERS * (i + 1)])
        if table.dtype != torch.uint8 or table.dim() != 2 or index is None:
            raise InvalidInputError(
                f"x86quant::embedding_bags: the rows of {named(name, len(table))} must be uint8 "
                f"[rows, bytes], got {table.dtype} {tuple(table.shape)}"
            )
        starts = offset
        if offset is not None and not include_last_offset:
            starts = torch.cat([offset, offset.new_full((1,), len(index))])
        check_bags(named(name, len(table)), len(table), index, starts)
        found.append(
            F.embedding_bag(
                index.long(), form.floats(table), None if starts is None else starts.long(),
                mode=form.mode, per_sample_weights=weight, include_last_offset=starts is not None,
                padding_idx=None if form.padding < 0 else form.padding,
            )
        )  # fmt: skip
    return torch.cat(found, 1)


def _native_embedding(
    rows: torch.Tensor, ids: torch.Tensor, form: Sequence[int], name: str
) -> torch.Tensor | None:
    found = _native([rows], [ids.reshape(-1, 1)], [], [], form, [name], False)
    return None if found is None else found.reshape(*ids.shape, found.shape[1])


@register(
    "Tensor rows, Tensor ids, int[] form, str name",
    shapes=lambda rows, ids, form: rows.new_empty((*ids.shape, form[0]), dtype=torch.float32),
    native=_native_embedding,
)
def embedding_rows(
    rows: torch.Tensor, ids: torch.Tensor, form: Sequence[int], name: str
) -> torch.Tensor:
    """The rows of one table for ``ids`` of any shape."""
    found = embedding_bags([rows], [ids.reshape(-1, 1)], [], [], form, [name])
    return found.reshape(*ids.shape, found.shape[1])


def _each(given: Sequence[torch.Tensor], count: int) -> Iterator[torch.Tensor | None]:
    """One tensor for each table."""
    if not given:
        return iter([None] * count)
    if count > 1 and len(given) == 1:
        given = given[0].unbind(0)
    if len(given) != count:
        raise InvalidInputError(f"there are {count} tables, but operands for {len(given)}")
    return iter(given)


def named(name: str, rows: int) -> str:
    """What a table is called in errors."""
    return f"the table {name or f'of {rows} rows'}"


def check_bags(table: str, rows: int, indices: torch.Tensor, starts: torch.Tensor | None) -> None:
    """Raise InvalidInputError unless every read stays within the table.

    Args:
        table: what it is called.
        rows: how many it has.
        indices: all of them.
        starts: where bags start, and the end of the last one; None where they are of one size.
    """
    wrong = ((indices < 0) | (indices >= rows)).reshape(-1)
    if bool(wrong.any()):
        at = int(wrong.nonzero()[0])
        value = int(indices.reshape(-1)[at])
        raise InvalidInputError(f"{table}: index {value} at position {at} is not in 0..{rows - 1}")
    if starts is None:
        return
    if not len(starts):
        raise InvalidInputError(f"{table}: with include_last_offset there must be an offset")
    if int(starts[0]) != 0:
        raise InvalidInputError(f"{table}: offsets must start with 0, got {int(starts[0])}")
    falling = (starts[1:] < starts[:-1]) | (starts[1:] > len(indices))
    if bool(falling.any()):
        at = 1 + int(falling.nonzero()[0])
        raise InvalidInputError(
            f"{table}: offset {at} is less than the one before it, or beyond the {len(indices)} "
            f"indices: {int(starts[at])}"
        )
    if int(starts[-1]) != len(indices):
        raise InvalidInputError(
            f"{table}: the last offset is {int(starts[-1])}, but there are {len(indices)} indices"
        )


def _native_interact(
    dense: torch.Tensor, vectors: torch.Tensor, places: Sequence[int] | None
) -> torch.Tensor | None:
    from x86quant.packing.linear_dynamic import extension_loads  # the ops alone need no kernels

    if not extension_loads():
        return None
    squares = _with_squares(vectors.shape[1], places)
    found: torch.Tensor = extension.native().interact_vectors(dense, vectors, squares)
    return _placed(found, dense.shape[1], places)


def check_interaction(
    dense: torch.Tensor, vectors: torch.Tensor, places: Sequence[int] | None
) -> None:
    """Raise InvalidInputError unless the operands fit each other."""
    fits = dense.dim() == 2 and vectors.dim() == 3 and dense.dtype == vectors.dtype == torch.float32
    if not fits or (dense.shape[0], dense.shape[1]) != (vectors.shape[0], vectors.shape[2]):
        raise InvalidInputError(
            "x86quant::interact takes float32 [samples, size] and [samples, vectors, size], got "
            f"{dense.dtype} {tuple(dense.shape)} and {vectors.dtype} {tuple(vectors.shape)}"
        )
    count = pairs_of(vectors.shape[1] + 1) + vectors.shape[1] + 1
    if places is not None and not all(0 <= place < count for place in places):
        raise InvalidInputError(f"x86quant::interact: places must be in 0..{count - 1}")


@register(
    "Tensor dense, Tensor vectors, int[]? places=None",
    checks=[check_interaction],
    native=_native_interact,
)
def interact(
    dense: torch.Tensor, vectors: torch.Tensor, places: Sequence[int] | None = None
) -> torch.Tensor:
    """``dense``, then the products of each vector with ``dense`` and those in front of it.

    Args:
        places: those that are wanted, in this order. Behind the pairs are the products of each
            vector with itself, of ``dense`` first.
    """
    every = torch.cat([dense[:, None], vectors], 1)
    products = every @ every.transpose(1, 2)
    rows, columns = torch.tril_indices(every.shape[1], every.shape[1], -1, device=dense.device)
    found = [dense, products[:, rows, columns]]
    if _with_squares(vectors.shape[1], places):
        found.append(products.diagonal(dim1=1, dim2=2))
    return _placed(torch.cat(found, 1), dense.shape[1], places)


def _with_squares(vectors: int, places: Sequence[int] | None) -> bool:
    """Whether ``places`` name products of a vector with itself."""
    return places is not None and any(place >= pairs_of(vectors + 1) for place in places)


def pairs_of(vectors: int) -> int:
    """How many pairs of different vectors there are."""
    return vectors * (vectors - 1) // 2


def _placed(found: torch.Tensor, dim: int, places: Sequence[int] | None) -> torch.Tensor:
    """The first ``dim`` columns, and those of the products that are wanted."""
    if places is None:
        return found
    return found[:, [*range(dim), *(dim + place for place in places)]]


def interaction_width(dim: int, vectors: int, places: Sequence[int] | None) -> int:
    """Columns of the result of an interaction."""
    return dim + (pairs_of(vectors + 1) if places is None else len(places))


@register(
    f"Tensor dense, {_ARGUMENTS.removesuffix('=False')}, int[]? places, {OUT_QPARAMS}",
    shapes=lambda dense, names, places: dense.new_empty(
        (dense.shape[0], interaction_width(dense.shape[1], len(names), places)), dtype=torch.uint8
    ),
)
def interact_bags(
    dense: torch.Tensor,
    rows: Sequence[torch.Tensor],
    indices: Sequence[torch.Tensor],
    offsets: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    formats: Sequence[int],
    names: Sequence[str],
    include_last_offset: bool,
    places: Sequence[int] | None,
    out_scale: float,
    out_zp: int,
) -> torch.Tensor:
    """``quantize`` of ``interact`` of ``dense`` and the results of ``embedding_bags``."""
    found = torch.ops.x86quant.embedding_bags(
        rows, indices, offsets, weights, formats, names, include_last_offset
    )
    vectors = found.reshape(found.shape[0], len(names), formats[0])
    return quantize(torch.ops.x86quant.interact(dense, vectors, places), out_scale, out_zp)
