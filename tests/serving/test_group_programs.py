"""Program files of graphs with weights of 4 bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import x86quant
from tests.quantization.test_four_bits import correlated, model
from tests.serving.served import Served
from tests.written_files import FOLDER
from x86quant.errors import UnsupportedError


def test_a_program_of_four_bits_gives_the_bytes_of_the_graph(tmp_path: Path) -> None:
    x = correlated(20, 64).reshape(2, 10, 64)
    fused = x86quant.quantize(
        model(), [x], mode="dynamic", weight_bits=4, fuse_blocks=True, speed_check=False,
        progress=False,
    )  # fmt: skip
    path = tmp_path / "four.xq"
    x86quant.export_program(fused, path, [x])
    assert path.stat().st_size < 60_000  # and float32 would take 155 KB
    (found,) = Served(path)(x)
    with torch.no_grad():
        assert torch.equal(found, fused(x))


def test_a_call_that_no_fused_graph_answers_is_no_program(tmp_path: Path) -> None:
    x = correlated(20, 64).reshape(2, 10, 64)
    fused = x86quant.quantize(
        model(), [x], mode="dynamic", fuse_blocks=True, speed_check=False, progress=False
    )
    with pytest.raises(UnsupportedError, match=r"no graph of the .* holds for this call"):
        x86quant.export_program(fused, tmp_path / "other.xq", [x.int()])


def test_a_program_holds_one_graph(tmp_path: Path) -> None:
    loaded = x86quant.load(FOLDER / "0.1" / "branching.x86q")
    calls = [torch.randn(2, 6, 16), torch.randn(2, 12, 16)]
    with pytest.raises(UnsupportedError, match="several answer these calls"):
        x86quant.export_program(loaded, tmp_path / "both.xq", calls)
