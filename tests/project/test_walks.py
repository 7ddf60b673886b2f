"""The tool that counts the files which a reader enters."""

from __future__ import annotations

from tools.walks import entered
from x86quant.forms import size_conditions


def test_a_file_is_entered_when_a_function_of_it_is_called() -> None:
    with entered() as found:
        assert size_conditions.holds(("==", size_conditions.size_of(0, 0), 3), [(3,)])
    assert found == {"forms/size_conditions.py"}
