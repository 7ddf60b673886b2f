"""Changes of bytes, of text in lines, and of JSON, that leave most of an input as it was."""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Callable
from typing import Any

from tests.corruption import BLIND, JUNK, places

Change = Callable[[random.Random, bytes], bytes]

#: Where numbers are read: about what ends a range of them, and what is none.
NUMBERS = (
    "0", "-0", "1", "-1", "2", "3", "7", "64", "255", "256", "65535", "65536", "2147483647",
    "2147483648", "-2147483648", "4294967296", "9223372036854775807", "9223372036854775808",
    "-9223372036854775809", "1" + "0" * 30, "0.5", "-0.0", "1e-320", "1e308", "1e400", "nan", "inf",
    "-inf", "0x10", "1_000", "٣", "true", "",
)  # fmt: skip
_WORDS = (
    "",
    " ",
    "*",
    ",",
    '"',
    "=",
    "#",
    "\t",
    "\r",
    "\0",
    "é",
    "\u2028",
    "x" * 300,
    "]",
    "[[a]]",
)
_NUMBER = re.compile(r"-?\d+(\.\d+)?")
_WORD = re.compile(r"[\w.+-]+")


def anything(rng: random.Random, data: bytes) -> bytes:
    """One change of a few bytes anywhere."""
    if len(data) < 4:
        return rng.randbytes(rng.randrange(64))
    return BLIND[rng.choice(sorted(BLIND))](rng, data)


def text_changes(rng: random.Random, data: bytes) -> bytes:
    """Another number, word or line in a text, a few times; now and then other bytes."""
    if rng.random() < 0.1:
        return anything(rng, data)
    text = data.decode("utf-8", "surrogateescape")
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        text = rng.choice((_number, _number, _word, _line))(rng, text)
    return text.encode("utf-8", "surrogateescape")


def _number(rng: random.Random, text: str) -> str:
    return _exchanged(rng, text, _NUMBER, NUMBERS)


def _word(rng: random.Random, text: str) -> str:
    return _exchanged(rng, text, _WORD, _WORDS)


def _exchanged(
    rng: random.Random, text: str, kind: re.Pattern[str], others: tuple[str, ...]
) -> str:
    """One match replaced by another match of the text, or by one of ``others``."""
    found = [*kind.finditer(text)]
    if not found:
        return text + rng.choice(others)
    place = rng.choice(found)
    other = rng.choice(found)[0] if rng.random() < 0.5 else rng.choice(others)
    return text[: place.start()] + other + text[place.end() :]


def _line(rng: random.Random, text: str) -> str:
    lines = text.split("\n")
    place, other = rng.randrange(len(lines)), rng.randrange(len(lines))
    how = rng.randrange(4)
    if how == 0:
        del lines[place]
    elif how == 1:
        lines.insert(place, lines[other])
    elif how == 2:
        lines[place], lines[other] = lines[other], lines[place]
    else:
        lines[place] = lines[place][: rng.randrange(len(lines[place]) + 1)]
    return "\n".join(lines)


def json_changes(rng: random.Random, value: Any) -> Any:
    """A copy of nested JSON with one or two entries another, gone, or under another name."""
    value = copy.deepcopy(value)
    for _ in range(rng.choice((1, 1, 2))):
        found = places(value)
        if not found:
            return copy.deepcopy(rng.choice(JUNK))
        container, key = rng.choice(found)
        how = rng.randrange(5)
        if how == 0:
            container[key] = copy.deepcopy(rng.choice(JUNK))
        elif how == 1:
            other, its = rng.choice(found)
            container[key] = copy.deepcopy(other[its])
        elif how == 2 and isinstance(container, dict):
            container[f"{key}x"] = container.pop(key)
        elif how == 3:
            container.pop(key)
        elif isinstance(container[key], int | float):
            container[key] = _json_number(rng)
    return value


def _json_number(rng: random.Random) -> Any:
    """A number of ``NUMBERS`` that JSON has."""
    while True:
        text = rng.choice(NUMBERS)
        try:
            return float(text) if "." in text or "e" in text or "n" in text else int(text)
        except ValueError:
            continue
