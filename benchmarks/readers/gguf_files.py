"""GGUF files: one with a tensor of each type, and whole models."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import transformers

from benchmarks.gguf_files import finish
from benchmarks.readers.changes import anything
from benchmarks.readers.reader import Depth, Reader, in_file, refused
from tests.huggingface import gguf_models
from x86quant.errors import X86QuantError
from x86quant.huggingface import load
from x86quant.huggingface.gguf_file import BLOCK_TYPES, read_gguf
from x86quant.huggingface.gguf_weights import group_weights, is_matrix_of_codes, real_numbers

_FAMILIES = ("llama", "gpt2", "qwen3moe")


def _sample(path: Path) -> bytes:
    import gguf as by_gguf

    rng = np.random.default_rng(0)
    writer = by_gguf.GGUFWriter(path, "llama")
    writer.add_uint32("llama.block_count", 2)
    writer.add_array("tokenizer.ggml.tokens", ["a", "bc", ""])
    writer.add_array("numbers", [0.5, 2.0])
    writer.add_tensor("plain", np.arange(6, dtype=np.float32).reshape(2, 3))
    for kind in BLOCK_TYPES.values():
        if kind.numbers > 1:
            blocks = rng.integers(0, 60, (3, 256 // kind.numbers * kind.nbytes), dtype=np.uint8)
            raw = by_gguf.GGMLQuantizationType[kind.name]
            writer.add_tensor(f"blk.0.{kind.name}.weight", blocks, raw_dtype=raw)
    finish(writer)
    return path.read_bytes()


def _change(rng: random.Random, data: bytes) -> bytes:
    """Numbers of the head, mostly; it ends where tensors are, in the last two thirds."""
    if rng.random() < 0.1:
        return anything(rng, data)
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4))):
        end = len(data) // 3 if rng.random() < 0.8 else len(data) - 8
        place = 8 + rng.randrange(end - 8)
        width = rng.choice((1, 4, 8))
        number = rng.choice((0, 1, 2, 255, 256, 2**31 - 1, 2**32 - 1, 2**63 - 1, 2**64 - 1))
        changed[place : place + width] = number.to_bytes(8, "little")[:width]
    return bytes(changed)


def types(folder: Path) -> Reader:
    """A GGUF file with a tensor of each type."""

    def read(path: Path) -> Depth:
        try:
            found = read_gguf(path)
        except X86QuantError as error:
            return _not_read(error)
        try:
            for tensor in found.tensors.values():
                group_weights(tensor) if is_matrix_of_codes(tensor) else real_numbers(tensor)
        except X86QuantError:
            return Depth.REFUSED
        return Depth.READ

    sample = _sample(folder / "sample.gguf")
    return Reader([sample], _change, in_file(folder, "forged.gguf", read))  # type: ignore[arg-type]


def _not_read(error: X86QuantError) -> Depth:
    early = "no GGUF" in str(error) or "version" in str(error) or "is empty" in str(error)
    return Depth.FIRST if early else refused(error, ())


def models(folder: Path) -> Reader:
    """Small models of three families, read to the end."""
    transformers.utils.logging.set_verbosity(50)
    path = folder / "model.gguf"
    samples = []
    for family in _FAMILIES:
        gguf_models.write_model(path, family, "Q4_0")
        samples.append(path.read_bytes())

    def change(rng: random.Random, data: bytes) -> bytes:
        """Most of it before the tensors: names, sizes, types and settings."""
        if rng.random() < 0.1:
            return anything(rng, data)
        head = data.find(b"ffn_") + 2500
        changed = bytearray(data)
        for _ in range(rng.randint(1, 3)):
            place = rng.randrange(4, head if rng.random() < 0.9 else len(data) - 4)
            if rng.random() < 0.5:
                changed[place] = rng.randrange(256)
            else:
                number = rng.choice((0, 1, 2, 3, 7, 31, 64, 127, 255, 2**16, 2**31 - 1, 2**32 - 1))
                changed[place : place + 4] = number.to_bytes(4, "little")
        return bytes(changed)

    def read(file: Path) -> Depth:
        try:
            read_gguf(file)
        except X86QuantError:
            return Depth.FIRST  # by its head alone
        try:
            load(file, fuse_blocks=False)
        except X86QuantError:
            return Depth.REFUSED
        return Depth.READ

    return Reader(samples, change, in_file(folder, "model.gguf", read), least=0.3)  # type: ignore[arg-type]
