"""What computes for a service: texts to tokens, rows of tokens to numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

import numpy as np

#: A text, or a pair of them for a reranker.
Text = str | tuple[str, str]


@dataclasses.dataclass(frozen=True, slots=True)
class TokenRow:
    """The tokens of one text.

    Attributes:
        ids: of the tokens, those that mark the ends of the text among them.
        kinds: for each whether it is of the first or of the second of a pair; empty if all are of
            the first.
    """

    ids: Sequence[int]
    kinds: Sequence[int] = ()

    def __len__(self) -> int:
        return len(self.ids)


@dataclasses.dataclass(frozen=True, slots=True)
class EngineFacts:
    """What clients and the service need to know of an engine.

    Attributes:
        name: of the model.
        task: whether results are embeddings, or scores of pairs.
        max_tokens: that one text may have.
        vocabulary: how many tokens there are.
        dimensions: numbers for each text.
        pads: whether short rows cost as much as the longest in a batch.
        dtype: what the weights are, such as "int8".
        prompts: texts that may be put in front, by name.
        default_prompt: the name of the one that is, unless another is asked for.
    """

    name: str
    task: Literal["embed", "rerank"]
    max_tokens: int
    vocabulary: int
    dimensions: int
    pads: bool = False
    dtype: str = "int8"
    prompts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    default_prompt: str | None = None


class Engine(Protocol):
    """A model. Only one thread calls ``run``; ``tokenize`` may be called by another meanwhile."""

    @property
    def facts(self) -> EngineFacts:
        """What the model is."""
        ...

    def tokenize(self, texts: Sequence[Text]) -> list[TokenRow]:
        """The tokens of each text, however many."""
        ...

    def shortened(self, text: Text, *, keep_end: bool = False) -> TokenRow:
        """The tokens of ``text``; if they are too many, those at its beginning or at its end."""
        ...

    def run(self, rows: Sequence[TokenRow]) -> np.ndarray:
        """float32 [rows, dimensions]: embeddings as the model gives them, or scores as logits."""
        ...
