"""Of two settings the one made later counts, whether it ends with a block or not."""

from __future__ import annotations

import x86quant
from x86quant.routing.in_force import current_overrides


def _kernels() -> list[str]:
    return [one.kernel for one in current_overrides()]


def test_a_process_wide_override_made_in_a_block_counts_there() -> None:
    with x86quant.override("onednn"):
        later = x86quant.override("fbgemm")
        try:
            assert _kernels()[:2] == ["fbgemm", "onednn"]
        finally:
            later.undo()
        assert _kernels()[:1] == ["onednn"]


def test_a_block_in_a_process_wide_override_counts_there() -> None:
    earlier = x86quant.override("fbgemm")
    try:
        with x86quant.override("onednn"):
            assert _kernels()[:2] == ["onednn", "fbgemm"]
        assert _kernels()[:1] == ["fbgemm"]
    finally:
        earlier.undo()
