"""How far the results of two models agree, in the terms of what the results are."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from x86quant.quantization.judging import in_words

#: Rows of more values are no classes: they are features.
_MOST_CLASSES = 50_000
#: A sum of probabilities may be off by so much.
_ABOUT_ONE = 1e-3


def agreement(exact: torch.Tensor, actual: torch.Tensor, sqnr_db: float) -> str:
    """One output of all calls, rows joined, as a sentence."""
    told = [_what(exact), in_words(sqnr_db)]
    if exact.dim() == 4:  # places of classes
        exact, actual = exact.movedim(1, -1), actual.movedim(1, -1)
    if exact.dim() >= 2 and 1 < exact.shape[-1] <= _MOST_CLASSES:
        one, other = (x.reshape(-1, x.shape[-1]).double() for x in (exact, actual))
        same = one.argmax(1) == other.argmax(1)
        cosine = torch.cosine_similarity(one, other, dim=1)
        told.append(
            f"the largest value is the same one in {float(same.double().mean()):.1%} of "
            f"{len(same)}; cosine {float(cosine.mean()):.4f}, least {float(cosine.min()):.4f}"
        )
    else:
        typical = float(exact.abs().double().mean()) or 1.0
        apart = float((exact - actual).abs().double().mean()) / typical
        told.append(f"apart by {apart:.2%} of a typical value")
    return "; ".join(told)


def _what(x: torch.Tensor) -> str:
    sizes = "×".join(map(str, x.shape[1:])) or "1"
    if x.dim() == 2 and bool((x >= 0).all()) and bool(((x.sum(1) - 1).abs() < _ABOUT_ONE).all()):
        return f"probabilities of {x.shape[1]} classes"
    if x.dim() == 2 and bool(((x.double().norm(dim=1) - 1).abs() < _ABOUT_ONE).all()):
        return f"embeddings of {x.shape[1]} features"
    return f"{x.dtype}".removeprefix("torch.") + f" of {sizes} for each sample"


def outcome(row: torch.Tensor, most: int = 3) -> str:
    """What one sample's result says: its largest values by number, or how large it is."""
    if row.dim() == 0 or row.numel() == 1:
        return f"{float(row.reshape(-1)[0]):.4g}"
    if row.dim() == 1 and row.numel() <= _MOST_CLASSES:
        values, numbers = row.float().topk(min(most, row.numel()))
        pairs: Sequence[tuple[int, float]] = [*zip(numbers.tolist(), values.tolist(), strict=True)]
        return ", ".join(f"{number}: {value:.4g}" for number, value in pairs)
    return f"mean {float(row.float().mean()):.4g}, deviation {float(row.float().std()):.4g}"
