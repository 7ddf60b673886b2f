"""Batches without their padding: only the tokens that are there are computed.

A batch [B, T, ...] and its *gathered* form have one shape, so that views of features serve both. In
the gathered form the rows of tokens that are present come first, sentence behind sentence, in their
order; what the rows behind them hold is not said. Three tensors tell which they are::

    places  int64 [B * T]    the row b * T + t of each gathered one; then those of all others
    starts  int64 [B + 1]    where each sentence begins; the last is the number of tokens present
    seen    bool  [B * T]    which of the gathered rows the others may see

Ops on rows compute each row by itself, so they take gathered rows as they take any, and attention
stays among the rows of a sentence. ``scatter_tokens`` puts rows back; those of tokens that are not
present are zeros.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch

from x86quant.errors import InvalidInputError
from x86quant.ops._register import register
from x86quant.ops.attention import attention, check_attention
from x86quant.ops.rows import THREE, RowCodes, check_floats, new_row_codes, quantize_rows

_ROWS = "Tensor x, Tensor places, Tensor starts"


@register("Tensor mask, bool first", returns="(Tensor places, Tensor starts, Tensor seen)")
def present_tokens(
    mask: torch.Tensor, first: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Which tokens are present: those whose ``mask``, bool [B, T], is true.

    With ``first`` the first token of each sentence is present, too, whether others see it or not.
    """
    if mask.dtype != torch.bool or mask.dim() != 2:
        raise InvalidInputError(
            "x86quant::present_tokens: the mask must be bool [batch, tokens], "
            f"got {mask.dtype} {tuple(mask.shape)}"
        )
    present = mask.clone()
    if first:
        present[:, :1] = True
    places = (~present).flatten().to(torch.uint8).argsort(stable=True)
    starts = present.new_zeros(mask.shape[0] + 1, dtype=torch.int64)
    starts[1:] = present.sum(1).cumsum(0)
    return places, starts, mask.flatten()[places]


def _check_rows(op: str, x: torch.Tensor, places: torch.Tensor, starts: torch.Tensor) -> None:
    check_floats(op, x=x)
    if x.dim() != 3:
        raise InvalidInputError(
            f"x86quant::{op}: x must have the shape [batch, tokens, features], got {tuple(x.shape)}"
        )
    batch, tokens, _ = x.shape
    _check_told(op, "places", places, torch.int64, batch * tokens)
    _check_told(op, "starts", starts, torch.int64, batch + 1)


def _check_present(
    op: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    starts: torch.Tensor,
    seen: torch.Tensor,
    scale: float,
) -> None:
    check_attention(op, q, k, v, None, scale)
    if q.shape[1] != k.shape[1]:
        raise InvalidInputError(
            f"x86quant::{op}: q and k must be of the same tokens, "
            f"got {tuple(q.shape)} and {tuple(k.shape)}"
        )
    _check_told(op, "starts", starts, torch.int64, q.shape[0] + 1)
    _check_told(op, "seen", seen, torch.bool, q.shape[0] * q.shape[1])


def _check_told(op: str, name: str, told: torch.Tensor, dtype: torch.dtype, count: int) -> None:
    if told.dtype != dtype or told.dim() != 1 or told.shape[0] != count:
        raise InvalidInputError(
            f"x86quant::{op}: {name} must be {dtype} of {count} elements, as "
            f"x86quant::present_tokens gives it, got {told.dtype} {tuple(told.shape)}"
        )


def _check_taken(op: str, x: torch.Tensor, places: torch.Tensor) -> None:
    check_floats(op, x=x)
    if x.dim() != 3 or places.dtype != torch.int64 or places.dim() != 1:
        raise InvalidInputError(
            f"x86quant::{op}: x must be [batch, tokens, features] and places int64 [number], "
            f"got {tuple(x.shape)} and {places.dtype} {tuple(places.shape)}"
        )


@register(_ROWS, checks=[_check_rows], shapes=lambda x: x.new_empty(x.shape))
def gather_tokens(x: torch.Tensor, places: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """The rows of float32 ``x`` [B, T, N], those of tokens that are present first."""
    return x.flatten(0, 1)[places].reshape(x.shape)


@register(_ROWS, checks=[_check_rows], shapes=lambda x: x.new_empty(x.shape))
def scatter_tokens(x: torch.Tensor, places: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """Gathered rows ``x`` [B, T, N] in their places; zeros where no token is present."""
    rows = x.flatten(0, 1)
    present = torch.arange(len(rows), device=x.device) < starts[-1]
    found = torch.where(present[:, None], rows, 0.0)
    return torch.zeros_like(rows).index_copy(0, places, found).reshape(x.shape)


@register(
    "Tensor x, Tensor places",
    checks=[_check_taken],
    shapes=lambda x, places: x.new_empty((x.shape[0], places.shape[0], x.shape[2])),
)
def take_tokens(x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """The rows of float32 ``x`` [B, T, N] at ``places``, int64 [K], of each sentence: [B, K, N].

    Places below 0 count from behind.
    """
    if bool(((places < -x.shape[1]) | (places >= x.shape[1])).any()):
        raise InvalidInputError(
            f"x86quant::take_tokens: of {x.shape[1]} tokens there is no number in {places.tolist()}"
        )
    return x[:, places]


def _present_attention_rows_native(*given: Any) -> RowCodes:
    rows = _by_sentence(torch.ops.x86quant.attention.default, *given)
    codes: RowCodes = torch.ops.x86quant.quantize_rows(rows)
    return codes


@register(
    "Tensor q, Tensor k, Tensor v, Tensor starts, Tensor seen, bool causal, float scale",
    checks=[_check_present],
    shapes=lambda q: new_row_codes(q, (*q.shape[:2], q.shape[2] * q.shape[3])),
    native=_present_attention_rows_native,
    returns=THREE,
)
def present_attention_rows(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    starts: torch.Tensor,
    seen: torch.Tensor,
    causal: bool,
    scale: float,
) -> RowCodes:
    """``attention_rows`` of gathered heads [B, T, H, D], among the tokens of each sentence."""
    return quantize_rows(_by_sentence(attention, q, k, v, starts, seen, causal, scale))


def _by_sentence(
    attend: Callable[..., torch.Tensor],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    starts: torch.Tensor,
    seen: torch.Tensor,
    causal: bool,
    scale: float,
) -> torch.Tensor:
    """Attention of each sentence by itself: [B, T, H * D], zeros behind all of them."""
    out = q.new_zeros(q.shape[0] * q.shape[1], q.shape[2] * q.shape[3])
    heads = [x.flatten(0, 1) for x in (q, k, v)]
    bounds = starts.tolist()
    for begin, end in itertools.pairwise(bounds):
        if begin < end:
            mine = [x[None, begin:end] for x in heads]
            mask = seen[None, None, None, begin:end]
            out[begin:end] = attend(*mine, mask, causal, scale)[0].flatten(1)
    return out.reshape(*q.shape[:2], out.shape[1])
