"""Perplexity of a causal language model on the tokens of its calibration data."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn

#: Logits [batch, tokens, words] behind ids [batch, tokens], and which are real, if not all are.
Scored = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]

#: How transformers names decoders with a head.
_NAMES = ("ForCausalLM", "LMHeadModel")


def is_causal_lm(model: nn.Module) -> bool:
    """Whether logits of ``model`` tell the token that comes next."""
    return type(model).__name__.endswith(_NAMES)


def perplexity(results: Iterable[Scored]) -> float | None:
    """Of the tokens that follow another, over all of ``results``; None where there are none."""
    total, count = 0.0, 0
    for logits, ids, mask in results:
        follows = torch.ones_like(ids[:, 1:], dtype=torch.bool)
        if mask is not None:
            follows = mask[:, 1:].bool() & mask[:, :-1].bool()
        wanted = ids[:, 1:][follows]
        if wanted.numel():
            said = logits[:, :-1][follows].float()
            total += float(nn.functional.cross_entropy(said, wanted, reduction="sum"))
            count += wanted.numel()
    return math.exp(min(total / count, 700.0)) if count else None
