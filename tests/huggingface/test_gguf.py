"""GGUF files against the package gguf, and files that were cut off or made to mislead."""

from __future__ import annotations

import contextlib
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from x86quant.errors import InvalidInputError, UnsupportedError, X86QuantError
from x86quant.huggingface.gguf_file import BLOCK_TYPES, read_gguf
from x86quant.huggingface.gguf_weights import group_weights, is_matrix_of_codes, real_numbers
from x86quant.ops.groups import real_weight

gguf = pytest.importorskip("gguf")

_NUMBERS = {kind.name: (number, kind) for number, kind in BLOCK_TYPES.items()}
QUANTIZED = ("Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")


def blocks(name: str, rows: int, features: int, seed: int = 0) -> Any:
    """Random bytes of blocks whose float16 scales are ordinary numbers."""
    _, kind = _NUMBERS[name]
    draw = np.random.default_rng(seed)
    found = draw.integers(0, 256, (rows, features // kind.numbers, kind.nbytes), dtype=np.uint8)
    at = {"Q4_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}.get(name, (0,))
    for place in at:
        scales = draw.normal(0, 0.01, found.shape[:2]).astype(np.float16)
        found[..., place : place + 2] = scales[..., None].view(np.uint8)
    return found.reshape(rows, -1)


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """A file by the package with a tensor of each type."""
    path = tmp_path / "all.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("llama.block_count", 2)
    writer.add_array("words", ["a", "bc", ""])
    writer.add_array("numbers", [0.5, 2.0])
    writer.add_tensor("plain", np.arange(6, dtype=np.float32).reshape(2, 3))
    for name in QUANTIZED:
        kind = gguf.GGMLQuantizationType[name]
        writer.add_tensor(name, blocks(name, 3, 512), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_numbers_are_those_of_the_package(written: Path) -> None:
    found = read_gguf(written)
    assert found.metadata["llama.block_count"] == 2
    assert found.metadata["words"] == ["a", "bc", ""]
    assert found.metadata["numbers"] == [0.5, 2.0]
    assert real_numbers(found.tensors["plain"]).tolist() == [[0, 1, 2], [3, 4, 5]]
    for name in QUANTIZED:
        tensor = found.tensors[name]
        assert tensor.shape == (3, 512)
        assert is_matrix_of_codes(tensor)
        raw = tensor.blocks.numpy()
        want = torch.from_numpy(gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[name]).copy())
        weights = group_weights(tensor)
        for got in (real_weight(weights.weight, weights.weight_scale), real_numbers(tensor)):
            # An offset is rounded once more, by what 8 scales are.
            assert bool(((got - want).abs() <= 1e-6 * (1 + want.abs())).all()), name
        if name in ("Q4_0", "Q8_0", "Q6_K"):
            assert torch.equal(real_weight(weights.weight, weights.weight_scale), want), name


def test_files_that_are_cut_off(written: Path, tmp_path: Path) -> None:
    whole = written.read_bytes()
    for size in (0, 3, 7, 20, 60, 200, len(whole) - 40):
        path = tmp_path / "short.gguf"
        path.write_bytes(whole[:size])
        with pytest.raises(InvalidInputError, match=r"empty|ends too early|no GGUF|incomplete"):
            read_gguf(path)


def test_files_with_other_bytes_are_read_or_refused(written: Path, tmp_path: Path) -> None:
    whole, draw = written.read_bytes(), random.Random(0)
    path = tmp_path / "forged.gguf"
    for _ in range(300):
        forged = bytearray(whole)
        for _ in range(draw.randint(1, 4)):
            forged[draw.randrange(4, 600)] = draw.choice([0, 1, 127, 255, draw.randrange(256)])
        path.write_bytes(forged)
        with contextlib.suppress(X86QuantError):  # and nothing else
            for tensor in read_gguf(path).tensors.values():
                real_numbers(tensor)


def test_versions_and_types_that_are_not_known(written: Path, tmp_path: Path) -> None:
    whole = bytearray(written.read_bytes())
    path = tmp_path / "newer.gguf"
    path.write_bytes(whole[:4] + b"\x04\0\0\0" + whole[8:])
    with pytest.raises(UnsupportedError, match="version 4"):
        read_gguf(path)
    writer = gguf.GGUFWriter(path, "llama")
    kind = gguf.GGMLQuantizationType.Q2_K
    writer.add_tensor("two", np.zeros((2, 84), np.uint8), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedError, match="type number 10"):
        read_gguf(path)


def test_scales_that_are_no_numbers(written: Path) -> None:
    tensor = read_gguf(written).tensors["Q4_0"]
    tensor.blocks[1, :2] = torch.tensor([0, 0x7C], dtype=torch.uint8)  # infinity
    with pytest.raises(InvalidInputError, match="infinite"):
        group_weights(tensor)
