"""GGUF files: what they say and the tensors in them, as they lie.

Nothing of a file is trusted: sizes are checked before memory is taken or read, so that a file that
was cut off, or made to mislead, is refused by a sentence. Tensors are views of the mapped file.
"""

from __future__ import annotations

import dataclasses
import math
import mmap
import os
import re
import struct
from pathlib import Path
from typing import Any

import torch

from x86quant.errors import InvalidInputError, UnsupportedError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
#: No model has more: a count beyond is damage.
_MOST_ENTRIES = 1 << 20
_MOST_DIMENSIONS = 4
_LEAST_ALIGNMENT = 8
_NUMBERS = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q",
    12: "<d",
}  # fmt: skip
_STRING, _ARRAY = 8, 9


@dataclasses.dataclass(frozen=True, slots=True)
class BlockType:
    """How numbers of a tensor are stored: so many in a block of so many bytes."""

    name: str
    numbers: int
    nbytes: int


BLOCK_TYPES = {
    0: BlockType("F32", 1, 4),
    1: BlockType("F16", 1, 2),
    2: BlockType("Q4_0", 32, 18),
    3: BlockType("Q4_1", 32, 20),
    6: BlockType("Q5_0", 32, 22),
    7: BlockType("Q5_1", 32, 24),
    8: BlockType("Q8_0", 32, 34),
    10: BlockType("Q2_K", 256, 84),
    11: BlockType("Q3_K", 256, 110),
    12: BlockType("Q4_K", 256, 144),
    13: BlockType("Q5_K", 256, 176),
    14: BlockType("Q6_K", 256, 210),
    20: BlockType("IQ4_NL", 32, 18),
    23: BlockType("IQ4_XS", 256, 136),
    30: BlockType("BF16", 1, 2),
}


@dataclasses.dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor of a file.

    Attributes:
        kind: how its numbers are stored.
        shape: as torch has it, rows first.
        blocks: uint8 [rows, bytes of a row], a view of the file.
    """

    kind: BlockType
    shape: tuple[int, ...]
    blocks: torch.Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class GgufFile:
    """What a file holds.

    Attributes:
        metadata: numbers, texts and lists by name.
        tensors: by name.
    """

    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]


#: How the name of a part of several ends: its number and theirs.
_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
_MOST_PARTS = 1 << 10


def read_parts(path: str | os.PathLike[str]) -> GgufFile:
    """The content of the file at ``path`` and, if it is the first of several, of all of them.

    Raises:
        InvalidInputError: it is another than the first, or one of them is missing or damaged.
        UnsupportedError: as :func:`read_gguf`.
    """
    first = read_gguf(path)
    count = first.metadata.get("split.count", 1)
    if count in (0, 1):
        return first
    found = _PART.fullmatch(os.fspath(path))
    if not isinstance(count, int) or not 1 < count <= _MOST_PARTS or found is None:
        raise InvalidInputError(
            f"{os.fspath(path)} is a part of {count}, and its name is not that of one: "
            "NAME-00001-of-00003.gguf"
        )
    if first.metadata.get("split.no", 0) != 0 or int(found[2]) != 1:
        raise InvalidInputError(f"{os.fspath(path)} is not the first of its parts: give that one")
    tensors = dict(first.tensors)
    for number in range(2, count + 1):
        part = Path(f"{found[1]}-{number:05d}-of-{count:05d}.gguf")
        if not part.is_file():
            raise InvalidInputError(f"{part} is missing, one of {count} parts of a model")
        other = read_gguf(part)
        if other.metadata.get("split.no") != number - 1 or tensors.keys() & other.tensors.keys():
            raise InvalidInputError(f"{part} is a part of another model, or the wrong one")
        tensors |= other.tensors
    if first.metadata.get("split.tensors.count", len(tensors)) != len(tensors):
        raise InvalidInputError(f"the parts of {os.fspath(path)} do not have all of its tensors")
    return GgufFile(first.metadata, tensors)


def read_gguf(path: str | os.PathLike[str]) -> GgufFile:
    """The content of the file at ``path``, which stays mapped while its tensors live.

    Raises:
        InvalidInputError: it is no GGUF file, or damaged; says where.
        UnsupportedError: it is of a version, or holds tensors, that cannot be read.
    """
    with Path(path).open("rb") as file:
        if os.fstat(file.fileno()).st_size == 0:
            raise InvalidInputError(f"{os.fspath(path)} is empty")
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    reader = _Reader(data, os.fspath(path))
    if reader.take(4) != _MAGIC:
        raise InvalidInputError(f"{os.fspath(path)} is no GGUF file: it does not begin with 'GGUF'")
    version = reader.number("<I")
    if version not in _VERSIONS:
        raise UnsupportedError(
            f"{os.fspath(path)} is a GGUF file of version {version}; versions 2 and 3 can be read"
        )
    tensors, entries = reader.count("tensors"), reader.count("entries")
    metadata = {reader.text(): reader.value() for _ in range(entries)}
    found = [reader.tensor_info() for _ in range(tensors)]
    alignment = metadata.get("general.alignment", 32)
    if (
        not isinstance(alignment, int)
        or alignment < _LEAST_ALIGNMENT
        or alignment & (alignment - 1)
    ):
        raise reader.damaged(f"general.alignment is {alignment!r}")
    start = -(-reader.at // alignment) * alignment
    whole = torch.frombuffer(data, dtype=torch.uint8)
    placed = {name: reader.placed(whole, start, *where) for name, where in found}
    if len(placed) < len(found):
        raise reader.damaged("two tensors have one name")
    return GgufFile(metadata, placed)


class _Reader:
    """Goes through the head of a file, and never beyond its end."""

    def __init__(self, data: mmap.mmap, path: str) -> None:
        self._data, self._path = data, path
        self.at = 0

    def damaged(self, what: str) -> InvalidInputError:
        return InvalidInputError(f"{self._path} is damaged at byte {self.at}: {what}")

    def take(self, count: int) -> bytes:
        if count > len(self._data) - self.at:
            raise self.damaged("it ends too early; copy it again")
        self.at += count
        return self._data[self.at - count : self.at]

    def number(self, form: str) -> Any:
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def count(self, what: str) -> int:
        found: int = self.number("<Q")
        if found > _MOST_ENTRIES:
            raise self.damaged(f"it would have {found} {what}")
        return found

    def text(self) -> str:
        return self.take(self.number("<Q")).decode("utf-8", "replace")

    def value(self, depth: int = 0) -> Any:
        return self._of_kind(self.number("<I"), depth)

    def _of_kind(self, kind: int, depth: int) -> Any:
        if kind in _NUMBERS:
            return self.number(_NUMBERS[kind])
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY or depth > _MOST_DIMENSIONS:
            raise self.damaged(f"a value of the unknown kind {kind}")
        inner, count = self.number("<I"), self.number("<Q")
        if inner in _NUMBERS:  # at once: vocabularies have scores by the hundred thousand
            size = struct.calcsize(_NUMBERS[inner])
            if count > (len(self._data) - self.at) // size:
                raise self.damaged("a list is longer than the file")
            return list(struct.unpack(f"<{count}{_NUMBERS[inner][1]}", self.take(count * size)))
        if count > len(self._data) - self.at:
            raise self.damaged("a list is longer than the file")
        return [self._of_kind(inner, depth + 1) for _ in range(count)]

    def tensor_info(self) -> tuple[str, tuple[tuple[int, ...], int, int]]:
        name, dimensions = self.text(), self.number("<I")
        if not 0 < dimensions <= _MOST_DIMENSIONS:
            raise self.damaged(f"the tensor {name[:80]!r} has {dimensions} dimensions")
        sizes = [self.number("<Q") for _ in range(dimensions)]
        if not all(sizes):  # a zero would hide that the others are beyond any file
            raise self.damaged(f"the tensor {name[:80]!r} has no numbers")
        return name, (tuple(sizes[::-1]), self.number("<I"), self.number("<Q"))

    def placed(
        self, whole: torch.Tensor, start: int, shape: tuple[int, ...], kind: int, offset: int
    ) -> GgufTensor:
        block = BLOCK_TYPES.get(kind)
        if block is None:
            known = ", ".join(x.name for x in BLOCK_TYPES.values())
            raise UnsupportedError(
                f"{self._path} holds tensors of GGUF's type number {kind}; what can be read are "
                f"{known}"
            )
        rows = math.prod(shape[:-1])
        if shape[-1] % block.numbers:
            raise self.damaged(f"rows of {shape[-1]} numbers are no whole blocks of {block.name}")
        row = shape[-1] // block.numbers * block.nbytes
        begin = start + offset
        if begin % _LEAST_ALIGNMENT:
            raise self.damaged(f"a tensor lies at byte {begin}, between two numbers")
        if rows * row > len(self._data) - begin:
            raise self.damaged(
                "a tensor lies beyond the end; the file is incomplete, copy it again"
            )
        blocks = whole[begin : begin + rows * row].view(rows, row)
        return GgufTensor(block, shape, blocks)
