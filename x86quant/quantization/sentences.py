"""Sentences as calibration data, for the models of sentence-transformers, which take them so."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import nn


def takes_sentences(model: nn.Module) -> bool:
    """Whether ``model`` is one of sentence-transformers: an encoder or a reranker."""
    return hasattr(model, "preprocess") and _is_of(model, "sentence_transformers")


def hides_padding(model: nn.Module) -> bool:
    """Whether ``model`` is an encoder that reads no row of a token that its mask hides.

    Pooling goes by the mask in each of its modes. Where rows themselves are asked for, `encode`
    cuts padding off.
    """
    parts = list(model.children())
    return (
        takes_sentences(model)
        and [type(part).__name__ for part in parts[:2]] == ["Transformer", "Pooling"]
        and all(_is_of(part, "sentence_transformers") for part in parts[:2])
    )


def tokenized(data: Iterable[Any], model: Any) -> Iterator[Any]:
    """``data`` with each sentence, or pair for a reranker, as what ``model`` computes with.

    Sentences may come in batches, but are not computed so: how good a model is must not be judged
    by what it makes of padding. What is no sentence is handed on.
    """
    pairs = takes_pairs(model)
    for item in data:
        pair = pairs and _is_pair(item)
        if not pair and isinstance(item, list | tuple) and item and all(map(_is_text, item)):
            yield from (_features(model, text) for text in item)
        elif _is_text(item):
            yield _features(model, item)
        elif isinstance(item, Mapping):
            yield dict(item)  # tokenizers return a class of their own
        else:
            yield item


def takes_pairs(model: nn.Module) -> bool:
    """Whether ``model`` is a reranker, which takes pairs of texts."""
    return any(kind.__name__ == "CrossEncoder" for kind in type(model).__mro__)


def _features(model: Any, text: Any) -> dict[str, Any]:
    return dict(model.preprocess([text if isinstance(text, str) else tuple(text)]))


def _is_pair(item: object) -> bool:
    return (
        isinstance(item, tuple | list)
        and len(item) == 2
        and all(isinstance(text, str) for text in item)
    )


def _is_text(item: object) -> bool:
    return isinstance(item, str) or _is_pair(item)


def _is_of(model: nn.Module, package: str) -> bool:
    return any(kind.__module__.partition(".")[0] == package for kind in type(model).__mro__)
