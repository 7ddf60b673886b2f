"""Embeddings and bags of embeddings out of tables in 8, 4 or 2 bits, in FBGEMM's row formats.

A row holds its codes, then its scale and its least value: in float32 for 8 bits, in float16 for
fewer, as ``torch.ops.quantized.embedding_bag_*_prepack`` and ``torch.ops.fbgemm`` have them, so
that tables can be exchanged. What is looked up is float; indices are checked before a row is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from x86quant import extension
from x86quant.dynamic.layers import carry_attributes, is_plain
from x86quant.dynamic.weight_on_demand import WeightOnDemand
from x86quant.errors import InvalidInputError
from x86quant.ops.embedding import MODES, TableFormat, interact
from x86quant.ops.float_type import Int8Module
from x86quant.packing.embedding_tables import lookup_routes
from x86quant.packing.linear_dynamic import extension_loads
from x86quant.routing.routes import Routes
from x86quant.spec import lookup_spec

_Self = TypeVar("_Self", bound="QuantizedTable")

#: The stock operators that quantize the rows of a table, by the bits of a code.
_PREPACK = {8: "byte", 4: "4bit", 2: "2bit"}


def table_bits(dim: int, bits: int) -> int:
    """What a table of rows of ``dim`` values gets: ``bits``, or 8 where these do not fill bytes."""
    if bits not in _PREPACK:
        raise InvalidInputError(f"the codes of a table have 8, 4 or 2 bits, not {bits!r}")
    return bits if dim * bits % 8 == 0 else 8


def quantize_rows_of_table(weight: torch.Tensor, bits: int, name: str = "") -> torch.Tensor:
    """The rows of a float table, in FBGEMM's format."""
    weight = weight.detach()
    if weight.dtype != torch.float32 or not bool(torch.isfinite(weight).all()):
        raise InvalidInputError(
            f"the table {name or 'of shape ' + str(tuple(weight.shape))} must hold finite "
            f"float32 numbers, it is {weight.dtype}; check the float model"
        )
    pack = getattr(torch.ops.quantized, f"embedding_bag_{_PREPACK[bits]}_prepack")
    rows: torch.Tensor = pack(weight.contiguous())
    return rows


class QuantizedTable(Int8Module):
    """What embeddings and bags of them share: rows of codes, and the float table they stand for.

    Attributes:
        rows: uint8 [num_embeddings, bytes of a row].
        form: how their bytes are read.
        name: what the table is called in errors.
    """

    rows: torch.Tensor

    def __init__(self, rows: torch.Tensor, form: TableFormat, name: str = "") -> None:
        super().__init__()
        width = form.code_bytes + form.scale_bytes
        # Rows may be padded: those of table-batched modules are, for other devices.
        if rows.dtype != torch.uint8 or rows.dim() != 2 or rows.shape[1] < width:
            raise InvalidInputError(
                f"the rows of a table of {form.dim} values in {form.bits} bits must be uint8 "
                f"[embeddings, {width} or more], got {rows.dtype} {tuple(rows.shape)}"
            )
        self.register_buffer("rows", rows)
        self.form, self.name = form, name
        self._numbers = tuple(form.numbers)

    def _in_float_type(self, found: torch.Tensor) -> torch.Tensor:
        """``found``, which is float32, as this module returns it."""
        return found if self._float_type is torch.float32 else found.to(self._float_type)

    @property
    def bits(self) -> int:
        """Of a code."""
        return self.form.bits

    @property
    def num_embeddings(self) -> int:
        """Rows of the table."""
        return self.rows.shape[0]

    @property
    def embedding_dim(self) -> int:
        """Size of a row."""
        return self.form.dim

    @property
    def weight(self) -> torch.Tensor:
        """The float table that the codes stand for; no memory is used until it is read."""
        if torch.compiler.is_compiling():
            return self._float_weight()
        shape = (self.num_embeddings, self.embedding_dim)
        return WeightOnDemand(shape, self.rows.device, self._float_weight, dtype=self._float_type)

    def _float_weight(self) -> torch.Tensor:
        return self.form.floats(self.rows).to(self._float_type)


def look_up(
    tables: Sequence[QuantizedTable],
    indices: Sequence[torch.Tensor],
    offsets: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    include_last_offset: bool,
) -> torch.Tensor:
    """The pooled rows of ``tables``, side by side; see ``torch.ops.x86quant.embedding_bags``."""
    operands = _operands(tables, indices, offsets, weights, include_last_offset)
    if not torch.compiler.is_compiling() and extension_loads():
        try:
            found: torch.Tensor | None = extension.native().try_look_up(*operands)
        except ValueError as error:
            raise InvalidInputError(str(error)) from None
        if found is not None:
            return found
    # Tracers and modes see the operator.
    traced: torch.Tensor = torch.ops.x86quant.embedding_bags.default(*operands)
    return traced


def _operands(
    tables: Sequence[QuantizedTable],
    indices: Sequence[torch.Tensor],
    offsets: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    include_last_offset: bool,
) -> tuple[Any, ...]:
    return (
        [table._buffers["rows"] for table in tables],  # attribute look-ups of a module are slow
        indices,
        offsets,
        weights,
        [number for table in tables for number in table._numbers],
        [table.name for table in tables],
        include_last_offset,
    )


class WeightOnlyEmbeddingBag(QuantizedTable):
    """``nn.EmbeddingBag`` with a table in 8, 4 or 2 bits; what is looked up and summed is float.

    Attributes:
        mode: "sum", "mean" or "max".
        include_last_offset: whether offsets end with the number of indices.
    """

    def __init__(
        self,
        rows: torch.Tensor,
        mode: str = "mean",
        *,
        bits: int = 8,
        padding_idx: int | None = None,
        include_last_offset: bool = False,
        name: str = "",
        half_scale: bool | None = None,
        scale_first: bool = False,
        embedding_dim: int | None = None,
    ) -> None:
        """A table out of its rows.

        Without more said they are as the stock operators make them. Otherwise ``half_scale`` says
        that scale and bias are float16, ``scale_first`` that they are in front, and
        ``embedding_dim`` how many values a row has.
        """
        if mode not in MODES:
            raise InvalidInputError(f"mode must be sum, mean or max, not {mode!r}")
        form = _format(rows, bits, mode, padding_idx, half_scale, scale_first, embedding_dim)
        super().__init__(rows, form, name)
        self.include_last_offset = include_last_offset
        self._routes: Routes | None = None
        self._only_native = False

    @property
    def routes(self) -> Routes:
        """Which kernel runs how many bags: chosen at the first call, and again by ``reroute``."""
        if self._routes is None:
            form = self.form
            plain = not form.front and form.half == (form.bits != 8)
            stock_rows = plain and self.rows.shape[1] == form.code_bytes + form.scale_bytes
            spec = lookup_spec(
                max(1, self.num_embeddings),
                form.dim,
                form.bits,
                form.mode,
                stock_rows=stock_rows and form.dim * form.bits % 8 == 0,
                skips=form.padding >= 0,
            )
            self._routes = lookup_routes(spec)
            self._only_native = self._routes.kernels == ("native",)
        return self._routes

    def pack_again(self) -> None:
        """Choose again at the next call, by the rules in force then."""
        self._routes, self._only_native = None, False

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_routes": None, "_only_native": False}  # chosen for this CPU

    @classmethod
    def from_float(
        cls, bag: nn.EmbeddingBag, name: str = "", bits: int = 8
    ) -> WeightOnlyEmbeddingBag:
        """The quantized form of a float ``bag``; see ``table_bits`` for the bits it then has."""
        bits = table_bits(bag.embedding_dim, bits)
        found = cls(
            quantize_rows_of_table(bag.weight, bits, name),
            bag.mode,
            bits=bits,
            padding_idx=bag.padding_idx,
            include_last_offset=bag.include_last_offset,
            name=name,
        )
        carry_attributes(bag, found)
        return found.train(bag.training)

    @property
    def half_scale(self) -> bool:
        """Whether scale and bias are float16."""
        return self.form.half

    @property
    def scale_first(self) -> bool:
        """Whether they are in front of the codes."""
        return self.form.front

    @property
    def mode(self) -> str:
        """How a bag's rows become one."""
        return self.form.mode

    @property
    def padding_idx(self) -> int | None:
        """An index that counts for nothing, or None."""
        return None if self.form.padding < 0 else self.form.padding

    def forward(
        self,
        input: torch.Tensor,
        offsets: torch.Tensor | None = None,
        per_sample_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As ``nn.EmbeddingBag``: one row for each bag."""
        starts, weights = [], []
        if isinstance(input, torch.Tensor):
            if input.dim() != (2 if offsets is None else 1):
                raise InvalidInputError(
                    "indices must be two-dimensional without offsets, or one-dimensional with "
                    f"one-dimensional offsets; got indices of shape {tuple(input.shape)} and "
                    + ("no offsets" if offsets is None else f"offsets of {tuple(offsets.shape)}")
                )
            if per_sample_weights is not None and per_sample_weights.shape != input.shape:
                raise InvalidInputError(
                    f"per_sample_weights must be of the input's shape {tuple(input.shape)}, "
                    f"got {tuple(per_sample_weights.shape)}"
                )
        if offsets is not None:
            if offsets.is_floating_point():
                raise InvalidInputError(
                    f"the table {self.name or 'of ' + str(self.num_embeddings) + ' rows'}: "
                    f"offsets must be int32 or int64, got {offsets.dtype}"
                )
            starts = [offsets if offsets.dtype is input.dtype else offsets.to(input.dtype)]
        if per_sample_weights is not None:
            weights = [per_sample_weights.detach().float()]
        found = self._by_fbgemm(input, starts, weights)
        if found is None:
            found = look_up([self], [input], starts, weights, self.include_last_offset)
        return self._in_float_type(found)

    def _by_fbgemm(
        self, indices: torch.Tensor, offsets: list[torch.Tensor], weights: list[torch.Tensor]
    ) -> torch.Tensor | None:
        """The same by the stock operator, where the rules say so; None where it is not its turn.

        It does not compare indices with their bounds, so that is done first.
        """
        if self._only_native:
            return None
        # Tracers see the operator that stands for all kernels.
        plain = all(map(is_plain, (indices, *offsets, *weights))) and extension_loads()
        if not plain or not indices.numel():
            return None
        last = self.include_last_offset and bool(offsets)
        bags = len(offsets[0]) - last if offsets else len(indices)
        if self.routes.choice_for(bags).kernel == "native":
            return None
        try:
            extension.native().check_bags(*_operands([self], [indices], offsets, weights, last))
        except ValueError as error:
            raise InvalidInputError(str(error)) from None
        if offsets:
            (starts,) = offsets
        else:
            starts = torch.arange(0, indices.numel(), indices.shape[1], dtype=indices.dtype)
        stock = getattr(torch.ops.quantized, f"embedding_bag_{_PREPACK[self.bits]}_rowwise_offsets")
        own = weights[0].reshape(-1) if weights else None
        found: torch.Tensor = stock(
            self.rows, indices.reshape(-1), starts, False, 0, False, own, None, last
        )
        return found

    def extra_repr(self) -> str:
        """What ``repr`` shows between the brackets."""
        return f"{self.num_embeddings}, {self.embedding_dim}, mode={self.mode}, bits={self.bits}"


class RowwiseEmbedding(QuantizedTable):
    """``nn.Embedding`` with a table in 8, 4 or 2 bits; what is looked up is float."""

    def __init__(
        self,
        rows: torch.Tensor,
        *,
        bits: int = 8,
        name: str = "",
    ) -> None:
        # What stands at the padding index of an embedding is looked up like any other row.
        super().__init__(rows, _format(rows, bits, "sum", None), name)

    @classmethod
    def from_float(cls, embedding: nn.Embedding, name: str = "", bits: int = 8) -> RowwiseEmbedding:
        """The quantized form of a float ``embedding``."""
        bits = table_bits(embedding.embedding_dim, bits)
        found = cls(quantize_rows_of_table(embedding.weight, bits, name), bits=bits, name=name)
        carry_attributes(embedding, found)
        return found.train(embedding.training)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows of the table for ``ids`` of any shape."""
        found: torch.Tensor = torch.ops.x86quant.embedding_rows.default(
            self.rows, ids, list(self._numbers), self.name
        )
        return self._in_float_type(found)

    def extra_repr(self) -> str:
        """What ``repr`` shows between the brackets."""
        return f"{self.num_embeddings}, {self.embedding_dim}, bits={self.bits}"


class EmbeddingBags(nn.Module):
    """Any number of ``nn.EmbeddingBag``, looked up together: what a recommender starts with.

    Its tables may be float or quantized: ``quantize`` and ``to_dynamic`` replace them one by one.
    Quantized tables are read in one native call.

    Attributes:
        tables: the bags; their sizes, modes and bits may differ, ``include_last_offset`` may not.
    """

    def __init__(self, tables: Sequence[nn.Module]) -> None:
        super().__init__()
        if not tables or len({bool(t.include_last_offset) for t in tables}) > 1:
            raise InvalidInputError(
                "tables must be at least one nn.EmbeddingBag, with the same include_last_offset"
            )
        self.tables = nn.ModuleList(tables)

    def forward(
        self,
        indices: torch.Tensor | Sequence[torch.Tensor],
        offsets: torch.Tensor | Sequence[torch.Tensor] | None = None,
        per_sample_weights: torch.Tensor | Sequence[torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """The results of all tables, side by side: [bags, sum of their sizes].

        Each argument is what the tables take, as a sequence or stacked in one tensor.
        """
        tables: list[Any] = list(self.tables._modules.values())
        if all(type(table) is WeightOnlyEmbeddingBag for table in tables):
            given = [_listed(x, len(tables)) for x in (indices, offsets, per_sample_weights)]
            last = bool(tables[0].include_last_offset)
            found = look_up(tables, given[0], given[1], given[2], last)
            result: torch.Tensor = tables[0]._in_float_type(found)
            return result
        bags = zip(
            tables,
            *(_split(x, len(tables)) for x in (indices, offsets, per_sample_weights)),
            strict=True,
        )
        return torch.cat([table(*each) for table, *each in bags], 1)


class DotInteraction(nn.Module):
    """The dot products of a DLRM: of a sample's dense vector and its rows, each with each.

    Takes ``dense`` [samples, size] and the rows, [samples, n, size] or side by side
    [samples, n * size]; returns ``dense`` and the n (n + 1) / 2 products behind it, in the order
    (1, 0), (2, 0), (2, 1), (3, 0), ..., where vector 0 is ``dense``.
    """

    def forward(self, dense: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """One row for each sample."""
        vectors = rows.reshape(dense.shape[0], -1, dense.shape[1])
        learns = any(isinstance(x, torch.Tensor) and x.requires_grad for x in (dense, rows))
        if learns and torch.is_grad_enabled():
            return interact(dense, vectors)  # the operator has no gradient
        out: torch.Tensor = torch.ops.x86quant.interact.default(dense, vectors)
        return out


def _format(
    rows: torch.Tensor,
    bits: int,
    mode: str,
    padding: int | None,
    half: bool | None = None,
    front: bool = False,
    dim: int | None = None,
) -> TableFormat:
    """The format of rows; where nothing else is said, as the stock operators make them."""
    half = bits != 8 if half is None else half
    scale_bytes = 4 if half else 8
    if bits not in _PREPACK or rows.dim() != 2 or rows.shape[1] <= scale_bytes:
        raise InvalidInputError(
            f"rows in {bits} bits must be uint8 [embeddings, bytes], got {tuple(rows.shape)}"
        )
    dim = (rows.shape[1] - scale_bytes) * 8 // bits if dim is None else dim
    if dim < 1:
        raise InvalidInputError(f"rows must have at least one value, not {dim}")
    return TableFormat(dim, bits, half, front, mode, -1 if padding is None else padding)


def _listed(given: Any, count: int) -> list[torch.Tensor]:
    if given is None:
        return []
    if isinstance(given, list | tuple):
        return list(given)
    return [given[0] if count == 1 else given]


def _split(given: Any, count: int) -> Sequence[Any]:
    if given is None:
        return [None] * count
    return given if isinstance(given, list | tuple) else [given[i] for i in range(count)]
