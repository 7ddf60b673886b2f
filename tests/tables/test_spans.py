"""Spans of numbers in conditions: what is in them, and how they read."""

from __future__ import annotations

import itertools

import pytest

from x86quant.tables.conditions import Span


@pytest.mark.parametrize(
    ("span", "text"),
    [
        (Span(4, 4), "4"),
        (Span(1, 4), "1..4"),
        (Span(0, 4), "0..4"),
        (Span(2, None), "2.."),
        (Span(1, None), "any number"),
        (Span(0, None), "any number"),
        (Span(1, None, 8), "a multiple of 8"),
        (Span(2, None, 8), "2.. and a multiple of 8"),
        (Span(1, 64, 8), "1..64 and a multiple of 8"),
        (Span(9, None, 8, apart=True), "9.. and no multiple of 8"),
        (Span(1, None, 1, apart=True), "no multiple of 1"),
    ],
)
def test_spans_read(span: Span, text: str) -> None:
    assert str(span) == text


def test_what_is_inside_is_in_the_other() -> None:
    """Never said where it is not so; and said of bounds alone, and of multiples."""
    bounds = [(1, 1), (8, 8), (1, 8), (2, 9), (3, None), (1, None)]
    steps = [(1, False), (2, False), (4, False), (4, True)]
    spans = [Span(*b, *s) for b in bounds for s in steps]
    numbers = range(1, 64)
    said = 0
    for one, other in itertools.product(spans, repeat=2):
        if one.inside(other):
            said += 1
            assert all(n in other for n in numbers if n in one), (str(one), str(other))
    assert said > len(spans)
    for low, high in bounds[2:]:
        assert Span(low, high).inside(Span(1, None))
        assert Span(low, high, 4).inside(Span(low, high, 2))
        assert Span(low, high, 4).inside(Span(low, high))
    assert not Span(1, None).inside(Span(1, 8))
    assert not Span(1, 8).inside(Span(2, 8))
    assert not Span(1, 9).inside(Span(1, 8))
