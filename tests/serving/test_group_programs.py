"""Program files of graphs with weights of 4 bits."""

from __future__ import annotations

from pathlib import Path

import torch

import x86quant
from tests.quantization.test_four_bits import correlated, model
from tests.serving.test_serving import Served
from x86quant.compiled.block_graphs import blocks_of


def test_a_program_of_four_bits_gives_the_bytes_of_the_graph(tmp_path: Path) -> None:
    x = correlated(20, 64).reshape(2, 10, 64)
    fused = x86quant.quantize(
        model(), [x], mode="dynamic", weight_bits=4, fuse_blocks=True, speed_check=False,
        progress=False,
    )  # fmt: skip
    blocks = blocks_of(fused)
    assert blocks is not None
    graph = blocks.graphs[0].compiled
    path = tmp_path / "four.xq"
    x86quant.export_program(graph, path, [x])
    assert path.stat().st_size < 60_000  # and float32 would take 155 KB
    (found,) = Served(path)(x)
    with torch.no_grad():
        (want,) = graph.run((x,))
    assert torch.equal(found, want)
