"""docs/support.md says what is so: each of its lines is made again."""

from __future__ import annotations

import pytest

from tools.support_matrix import CASES, PAGE, Case, line


@pytest.mark.filterwarnings("ignore::Warning")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_line_of_the_page(case: Case) -> None:
    assert line(case) in PAGE.read_text(encoding="utf-8").splitlines(), (
        "run python -m tools.support_matrix"
    )


def test_there_is_a_line_for_each_layer() -> None:
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    assert sum(text.startswith("| ") for text in lines) == len(CASES) + 1
