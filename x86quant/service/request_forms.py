"""Requests, read and checked: those of OpenAI's embeddings and of text-embeddings-inference."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from x86quant.errors import X86QuantError
from x86quant.service.engine import EngineFacts, Text
from x86quant.service.limits import Limits

#: A text, a pair of them, or the ids of tokens.
Input = Text | tuple[int, ...]


class RefusedError(X86QuantError):
    """A request that is not answered; says why.

    Attributes:
        status: of HTTP.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclasses.dataclass(frozen=True, slots=True)
class EmbedRequest:
    """Texts whose embeddings are asked for.

    Attributes:
        inputs: texts, or ids of tokens.
        normalize: whether embeddings are to have length 1.
        truncate: whether what is too long is shortened, or refused.
        keep_end: whether it is shortened at its beginning.
        prompt: the name of what is put in front; None for the model's own choice.
        dimensions: how many of the first numbers are wanted; None for all.
        base64: whether embeddings are wanted as bytes of float32 in base64.
    """

    inputs: Sequence[Input]
    normalize: bool = True
    truncate: bool = False
    keep_end: bool = False
    prompt: str | None = None
    dimensions: int | None = None
    base64: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class RerankRequest:
    """Texts whose scores beside a query are asked for.

    Attributes:
        query: what texts are compared with.
        texts: in the order of their numbers in the answer.
        raw_scores: whether scores are wanted as they are, and not between 0 and 1.
        return_text: whether the answer holds texts, too.
        truncate: whether what is too long is shortened, or refused.
        keep_end: whether it is shortened at its beginning.
    """

    query: str
    texts: Sequence[str]
    raw_scores: bool = False
    return_text: bool = False
    truncate: bool = False
    keep_end: bool = False


def read_object(body: bytes) -> Fields:
    """The JSON object in ``body``.

    Raises:
        RefusedError: it is none.
    """
    try:
        found = json.loads(body.decode("utf-8"), parse_constant=_no_number)
    except UnicodeDecodeError as error:
        raise RefusedError(400, f"the request is not UTF-8 (byte {error.start})") from None
    except (ValueError, RecursionError) as error:
        raise RefusedError(400, f"the request is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise RefusedError(422, f"the request must be a JSON object, not {_kind(found)}")
    return Fields(found)


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"it holds {name}")


def openai_embeddings(body: bytes, facts: EngineFacts, limits: Limits) -> EmbedRequest:
    """A POST of /v1/embeddings."""
    fields = read_object(body)
    return EmbedRequest(
        inputs=fields.inputs("input", facts, limits),
        truncate=fields.flag("truncate", False),
        dimensions=fields.count("dimensions", facts.dimensions),
        base64=fields.choice("encoding_format", ("float", "base64")) == "base64",
    )


def tei_embed(body: bytes, facts: EngineFacts, limits: Limits) -> EmbedRequest:
    """A POST of /embed."""
    fields = read_object(body)
    prompt = fields.text("prompt_name") if fields.has("prompt_name") else None
    if prompt is not None and prompt not in facts.prompts:
        known = ", ".join(map(repr, facts.prompts)) or "none"
        raise RefusedError(422, f"prompt_name {prompt!r} is not known; the model has {known}")
    return EmbedRequest(
        inputs=fields.inputs("inputs", facts, limits),
        normalize=fields.flag("normalize", True),
        truncate=fields.flag("truncate", False),
        keep_end=fields.choice("truncation_direction", ("Right", "Left")) == "Left",
        prompt=prompt,
        dimensions=fields.count("dimensions", facts.dimensions),
    )


def tei_rerank(body: bytes, facts: EngineFacts, limits: Limits) -> RerankRequest:
    """A POST of /rerank."""
    fields = read_object(body)
    return RerankRequest(
        query=fields.text("query"),
        texts=fields.texts("texts", limits),
        raw_scores=fields.flag("raw_scores", False),
        return_text=fields.flag("return_text", False),
        truncate=fields.flag("truncate", False),
        keep_end=fields.choice("truncation_direction", ("Right", "Left")) == "Left",
    )


class Fields:
    """A JSON object whose fields are read one by one, each as the type it must have."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values

    def has(self, name: str) -> bool:
        """Whether it is there, and not null."""
        return self._values.get(name) is not None

    def flag(self, name: str, usual: bool) -> bool:
        """true or false."""
        found = self._values[name] if self.has(name) else usual
        if not isinstance(found, bool):
            raise RefusedError(422, f"{name!r} must be true or false, not {_kind(found)}")
        return found

    def choice(self, name: str, known: Sequence[str]) -> str:
        """One of some words; the first by default."""
        found = self._values[name] if self.has(name) else known[0]
        if found not in known:
            raise RefusedError(422, f"{name!r} must be {' or '.join(map(repr, known))}")
        return str(found)

    def count(self, name: str, most: int) -> int | None:
        """A whole number from 1 to ``most``, or None."""
        found = self._values.get(name)
        if found is not None and (not _is_whole(found) or not 1 <= found <= most):
            raise RefusedError(422, f"{name!r} must be a whole number from 1 to {most}")
        return found

    def text(self, name: str) -> str:
        """A text that is there, and not empty."""
        if not self.has(name):
            raise RefusedError(422, f"the request lacks {name!r}")
        return _text(self._values[name], repr(name))

    def texts(self, name: str, limits: Limits) -> list[str]:
        """A list of texts."""
        found = self._list(name, limits)
        return [_text(one, f"{name!r}, number {place}") for place, one in enumerate(found)]

    def inputs(self, name: str, facts: EngineFacts, limits: Limits) -> list[Input]:
        """A text, a list of texts, the ids of a text's tokens, or a list of such."""
        if isinstance(self._values.get(name), str):
            return [self.text(name)]
        found = self._list(name, limits, numbers=True)
        if _is_whole(found[0]):
            return [_ids(found, repr(name), facts)]
        return [
            _ids(one, f"{name!r}, number {place}", facts)
            if isinstance(one, list)
            else _text(one, f"{name!r}, number {place}")
            for place, one in enumerate(found)
        ]

    def _list(self, name: str, limits: Limits, *, numbers: bool = False) -> list[Any]:
        if not self.has(name):
            raise RefusedError(422, f"the request lacks {name!r}")
        found = self._values[name]
        if not isinstance(found, list):
            raise RefusedError(422, f"{name!r} must be a list, not {_kind(found)}")
        if not found:
            raise RefusedError(422, f"{name!r} is empty")
        if len(found) > limits.inputs and not (numbers and _is_whole(found[0])):
            raise RefusedError(
                413, f"{name!r} holds {len(found)} texts, and a request may hold {limits.inputs}"
            )
        return found


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise RefusedError(422, f"{where} must be a text, not {_kind(value)}")
    if not value:
        raise RefusedError(422, f"{where} is empty")
    try:
        value.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON can spell
        raise RefusedError(422, f"{where} holds what is no character") from None
    return value


def _ids(value: list[Any], where: str, facts: EngineFacts) -> tuple[int, ...]:
    if not value:
        raise RefusedError(422, f"{where} is empty")
    if not all(_is_whole(one) and 0 <= one < facts.vocabulary for one in value):
        raise RefusedError(
            422, f"{where} must hold ids of tokens, from 0 to {facts.vocabulary - 1}"
        )
    return tuple(value)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _kind(value: object) -> str:
    kinds = {dict: "an object", list: "a list", str: "a text", bool: "true or false"}
    return "null" if value is None else kinds.get(type(value), "a number")
