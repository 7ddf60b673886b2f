"""Bags of embeddings out of an int8 table, in FBGEMM's row format.

A row holds its codes in 8 bits, then its scale and its least value in float32: the format of
``torch.ops.quantized.embedding_bag_byte_prepack`` and of ``torch.ops.fbgemm``, so that tables can
be exchanged. FBGEMM reads whatever memory a wrong index points to: indices are checked first.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from x86quant.dynamic.layers import carry_attributes, is_plain
from x86quant.dynamic.weight_on_demand import WeightOnDemand
from x86quant.errors import InvalidInputError
from x86quant.ops.float_type import Int8Module

#: Bytes of a row behind its codes.
_SCALE_AND_LEAST = 8


class WeightOnlyEmbeddingBag(Int8Module):
    """``nn.EmbeddingBag`` with an int8 table; what is looked up and summed is float.

    Attributes:
        rows: uint8 [num_embeddings, embedding_dim + 8], in FBGEMM's format.
        mode: "sum", "mean" or "max".
        padding_idx: an index that counts for nothing, or None.
        include_last_offset: whether offsets end with the number of indices.
        name: what the table is called in errors.
    """

    rows: torch.Tensor

    def __init__(
        self,
        rows: torch.Tensor,
        mode: str = "mean",
        *,
        padding_idx: int | None = None,
        include_last_offset: bool = False,
        name: str = "",
    ) -> None:
        super().__init__()
        if rows.dtype != torch.uint8 or rows.dim() != 2 or rows.shape[1] <= _SCALE_AND_LEAST:
            raise InvalidInputError(
                "the rows of a table must be uint8 [embeddings, size + 8], "
                f"got {rows.dtype} {tuple(rows.shape)}"
            )
        if mode not in ("sum", "mean", "max"):
            raise InvalidInputError(f"mode must be sum, mean or max, not {mode!r}")
        self.register_buffer("rows", rows)
        self.mode, self.padding_idx = mode, padding_idx
        self.include_last_offset, self.name = include_last_offset, name

    @classmethod
    def from_float(cls, bag: nn.EmbeddingBag, name: str = "") -> WeightOnlyEmbeddingBag:
        """The int8 form of a float ``bag``."""
        weight = bag.weight.detach()
        if weight.dtype != torch.float32 or not bool(torch.isfinite(weight).all()):
            raise InvalidInputError(
                f"the table {name or 'of shape ' + str(tuple(weight.shape))} must hold finite "
                f"float32 numbers, it is {weight.dtype}; check the float model"
            )
        found = cls(
            torch.ops.quantized.embedding_bag_byte_prepack(weight),
            bag.mode,
            padding_idx=bag.padding_idx,
            include_last_offset=bag.include_last_offset,
            name=name,
        )
        carry_attributes(bag, found)
        return found.train(bag.training)

    @property
    def num_embeddings(self) -> int:
        """Rows of the table."""
        return self.rows.shape[0]

    @property
    def embedding_dim(self) -> int:
        """Size of a row."""
        return self.rows.shape[1] - _SCALE_AND_LEAST

    @property
    def weight(self) -> torch.Tensor:
        """The float table that the codes stand for; no memory is used until it is read."""
        if torch.compiler.is_compiling():
            return self._float_weight()
        shape = (self.num_embeddings, self.embedding_dim)
        return WeightOnDemand(shape, self.rows.device, self._float_weight, dtype=self._float_type)

    def _float_weight(self) -> torch.Tensor:
        found: torch.Tensor = torch.ops.quantized.embedding_bag_byte_unpack(self.rows)
        return found.to(self._float_type)

    def forward(
        self,
        input: torch.Tensor,
        offsets: torch.Tensor | None = None,
        per_sample_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As ``nn.EmbeddingBag``: one row for each bag."""
        return self._sums(input, offsets, per_sample_weights).to(self._float_type)

    def _sums(
        self,
        input: torch.Tensor,
        offsets: torch.Tensor | None,
        per_sample_weights: torch.Tensor | None,
    ) -> torch.Tensor:
        if not is_plain(input):  # tracers cannot see whether indices are within the table
            return F.embedding_bag(
                input, self._float_weight(), offsets, mode=self.mode,
                per_sample_weights=per_sample_weights, padding_idx=self.padding_idx,
                include_last_offset=self.include_last_offset,
            )  # fmt: skip
        indices, starts = self._bags(input, offsets)
        self._check(indices, starts)
        if per_sample_weights is not None:
            if self.mode != "sum":
                raise InvalidInputError(f"per_sample_weights need mode sum, not {self.mode}")
            if per_sample_weights.shape != input.shape:
                raise InvalidInputError(
                    f"per_sample_weights must be of the input's shape {tuple(input.shape)}, "
                    f"got {tuple(per_sample_weights.shape)}"
                )
            per_sample_weights = per_sample_weights.detach().float().reshape(-1)
        if self.mode == "max":
            return self._greatest(indices, starts)
        kept = None if self.padding_idx is None else indices != self.padding_idx
        if kept is not None:
            weights = kept.float()
            per_sample_weights = (
                weights if per_sample_weights is None else weights * per_sample_weights
            )
        out: torch.Tensor = torch.ops.quantized.embedding_bag_byte_rowwise_offsets(
            self.rows, indices, starts, False, 0, False, per_sample_weights, None, True
        )
        if self.mode == "sum":
            return out
        counts = torch.diff(starts)
        if kept is not None:
            ends = F.pad(torch.cumsum(kept, 0), (1, 0))
            counts = torch.diff(ends[starts.long()])
        return out / counts.clamp(min=1)[:, None]

    def _bags(
        self, input: torch.Tensor, offsets: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """All indices, and where bags start, with the end of the last one behind."""
        if input.dtype not in (torch.int32, torch.int64):
            raise InvalidInputError(f"indices must be int32 or int64, got {input.dtype}")
        if input.dim() == 2 and offsets is None:
            bags, each = input.shape
            starts = torch.arange(bags + 1, dtype=input.dtype) * each
        elif input.dim() == 1 and offsets is not None and offsets.dim() == 1:
            starts = offsets.to(input.dtype)
            if not self.include_last_offset:
                starts = F.pad(starts, (0, 1), value=len(input))
        else:
            raise InvalidInputError(
                "indices must be two-dimensional without offsets, or one-dimensional with "
                f"one-dimensional offsets; got indices of shape {tuple(input.shape)} and "
                + ("no offsets" if offsets is None else f"offsets of {tuple(offsets.shape)}")
            )
        return input.reshape(-1).contiguous(), starts.contiguous()

    def _check(self, indices: torch.Tensor, starts: torch.Tensor) -> None:
        """Raise InvalidInputError unless every read stays within the table."""
        table = f"the table {self.name or 'of ' + str(self.num_embeddings) + ' rows'}"
        if len(indices):
            low, high = (int(x) for x in torch.aminmax(indices))
            if low < 0 or high >= self.num_embeddings:
                wrong = (indices < 0) | (indices >= self.num_embeddings)
                at = int(wrong.nonzero()[0])
                raise InvalidInputError(
                    f"{table}: index {int(indices[at])} at position {at} is not in "
                    f"0..{self.num_embeddings - 1}"
                )
        if not len(starts):
            raise InvalidInputError(f"{table}: with include_last_offset there must be an offset")
        if int(starts[0]) != 0:
            raise InvalidInputError(f"{table}: offsets must start with 0, got {int(starts[0])}")
        if bool((torch.diff(starts) < 0).any()):
            at = int((torch.diff(starts) < 0).nonzero()[0])
            raise InvalidInputError(f"{table}: offset {at + 1} is less than the one before it, or "
                                    f"beyond the {len(indices)} indices")  # fmt: skip
        if int(starts[-1]) != len(indices):
            raise InvalidInputError(
                f"{table}: the last offset is {int(starts[-1])}, but there are {len(indices)} "
                "indices"
            )

    def _greatest(self, indices: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        """The maximum over each bag; only the rows in use become float."""
        used, places = torch.unique(indices, return_inverse=True)
        rows = torch.ops.quantized.embedding_bag_byte_unpack(self.rows[used.long()])
        padding = None
        if self.padding_idx is not None and bool((found := used == self.padding_idx).any()):
            padding = int(found.nonzero()[0])
        return F.embedding_bag(
            places, rows, starts.long(), mode="max", padding_idx=padding, include_last_offset=True
        )

    def extra_repr(self) -> str:
        """What ``repr`` shows between the brackets."""
        return f"{self.num_embeddings}, {self.embedding_dim}, mode={self.mode}"
