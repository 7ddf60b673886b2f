"""The file: a safetensors file whose one metadata entry is a checksum and a JSON manifest.

::

    __metadata__ = {"x86quant": "x86quant-artifact <version> <sha256>\\n<manifest>"}

The checksum covers every byte of the file, its own 64 digits taken as zeros. It tells damage; it is
no signature, so whatever comes behind it is checked as if a stranger had written it.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import stat
from pathlib import Path
from typing import Any

import torch

from x86quant.errors import ArtifactError

VERSION = 2

#: A header is JSON that Python parses into objects many times its size.
MAX_HEADER_BYTES = 16 << 20

_KEY = "x86quant"
_MAGIC = "x86quant-artifact"
_NO_DIGEST = "0" * 64
_SIGNATURE = re.compile(rf"{_MAGIC} (\d{{1,9}}) ([0-9a-f]{{64}})\n")
_LENGTH_BYTES = 8
_MAX_SIZE = 1 << 48

#: What a tensor may hold, by its name in the file.
DTYPES: dict[str, torch.dtype] = {
    "C64": torch.complex64,
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
STORABLE: frozenset[torch.dtype] = frozenset(DTYPES.values())


def pack(manifest: dict[str, Any], tensors: dict[str, torch.Tensor]) -> bytes:
    """The bytes of a file; the same model gives the same bytes."""
    from safetensors.torch import save as to_bytes

    text = json.dumps(manifest, separators=(",", ":"), allow_nan=False)
    metadata = {_KEY: f"{_MAGIC} {VERSION} {_NO_DIGEST}\n{text}"}
    data = to_bytes(tensors, metadata)
    length = int.from_bytes(data[:_LENGTH_BYTES], "little")
    if length > MAX_HEADER_BYTES:
        raise ArtifactError(
            f"the graph and metadata take {length} bytes, more than the {MAX_HEADER_BYTES} an "
            "artifact may have; keep large values out of the metadata, or save parts of the model"
        )
    return seal(data, _NO_DIGEST)


def seal(data: bytes, written: str) -> bytes:
    """``data`` with the checksum ``written`` in it replaced by the right one."""
    at = _place_of(data, written)
    return b"".join((data[:at], _digest(data, at).encode(), data[at + len(written) :]))


def read_bytes(path: Path) -> bytes:
    """The content of ``path``, which must be a regular file."""
    # Opened without waiting: a pipe that nobody writes to would hang.
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ArtifactError("this is not a regular file")
        return file.read()


def unpack(data: bytes) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The manifest and the tensors, after every check of the file as such."""
    header = _header(data)
    manifest = _manifest(data, header)
    for name, entry in header.items():
        _check_entry(name, entry)
    return manifest, _tensors(data)


def checksum(data: bytes) -> str:
    """The checksum in ``data``, which ``unpack`` has found right."""
    signature = _SIGNATURE.match(_header(data)["__metadata__"][_KEY])
    assert signature is not None
    return signature[2]


def _header(data: bytes) -> dict[str, Any]:
    if len(data) < _LENGTH_BYTES:
        raise ArtifactError(f"the file has {len(data)} bytes: it is truncated or no artifact")
    length = int.from_bytes(data[:_LENGTH_BYTES], "little")
    if length > MAX_HEADER_BYTES or _LENGTH_BYTES + length > len(data):
        raise ArtifactError(
            f"its header would take {length} bytes of the file's {len(data)}: "
            "it is truncated or no artifact"
        )
    header = parse_json(data[_LENGTH_BYTES : _LENGTH_BYTES + length], "header")
    if not isinstance(header, dict):
        raise ArtifactError("its header is not a JSON object: it is no artifact")
    return header


def _manifest(data: bytes, header: dict[str, Any]) -> dict[str, Any]:
    """The manifest in ``header``, whose version and checksum hold."""
    metadata = header.pop("__metadata__", None)
    text = metadata.get(_KEY) if isinstance(metadata, dict) and len(metadata) == 1 else None
    signature = _SIGNATURE.match(text) if isinstance(text, str) else None
    if signature is None:
        raise ArtifactError(
            "it has no x86quant manifest: it is damaged, or was not written by x86quant.save"
        )
    version, digest = int(signature[1]), signature[2]
    if version != VERSION:
        raise ArtifactError(
            f"it has format version {version}, and this x86quant reads version {VERSION}: load it "
            "with the x86quant that wrote it, or save the model again with this one"
        )
    if _digest(data, _place_of(data, digest)) != digest:
        raise ArtifactError("its checksum is wrong: the file is damaged, copy or save it again")
    assert isinstance(text, str)
    manifest = parse_json(text[signature.end() :], "manifest")
    if not isinstance(manifest, dict):
        raise ArtifactError("its manifest is not a JSON object")
    return manifest


def _place_of(data: bytes, digest: str) -> int:
    length = int.from_bytes(data[:_LENGTH_BYTES], "little")
    header = data[: _LENGTH_BYTES + length]
    # JSON writes the newline as two characters.
    mark = f" {digest}\\n".encode()
    if header.count(mark) != 1:
        raise ArtifactError("its checksum is not in its place: the file is damaged")
    return header.index(mark) + 1


def _digest(data: bytes, at: int) -> str:
    """The checksum of ``data`` with zeros for the checksum at ``at``."""
    view = memoryview(data)
    sha = hashlib.sha256(view[:at])
    sha.update(_NO_DIGEST.encode())
    sha.update(view[at + len(_NO_DIGEST) :])
    return sha.hexdigest()


def parse_json(text: str | bytes, what: str) -> Any:
    """JSON with each key once, no NaN, and no more nesting than Python takes."""
    try:
        return json.loads(text, object_pairs_hook=_object, parse_constant=_no_constant)
    except RecursionError as error:
        raise ArtifactError(f"its {what} is nested too deeply") from error
    except ArtifactError:
        raise
    except ValueError as error:
        raise ArtifactError(f"its {what} is not JSON ({error}): the file is damaged") from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ArtifactError("a key occurs twice in a JSON object")
    return found


def _no_constant(name: str) -> Any:
    raise ArtifactError(f"{name} is not JSON")


def _check_entry(name: str, entry: object) -> None:
    """The header's ``entry`` describes a tensor this package writes."""
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise ArtifactError(f"tensor {name!r} is not described by dtype, shape and data_offsets")
    shape, offsets = entry["shape"], entry["data_offsets"]
    if not isinstance(entry["dtype"], str) or entry["dtype"] not in DTYPES:
        raise ArtifactError(f"tensor {name!r} has dtype {entry['dtype']!r}, none of {[*DTYPES]}")
    if not _sizes(shape) or not _sizes(offsets) or len(offsets) != 2:
        raise ArtifactError(f"tensor {name!r} has shape {shape} at {offsets}, which is impossible")
    # A zero among the sizes must not hide that the others overflow.
    if math.prod(max(size, 1) for size in shape) > _MAX_SIZE:
        raise ArtifactError(f"tensor {name!r} has shape {shape}, larger than any file")


def _sizes(value: object) -> bool:
    return isinstance(value, list) and all(
        type(item) is int and 0 <= item <= _MAX_SIZE for item in value
    )


def _tensors(data: bytes) -> dict[str, torch.Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load as from_bytes

    try:
        tensors: dict[str, torch.Tensor] = from_bytes(data)
    except SafetensorError as error:
        raise ArtifactError(f"its tensors do not fit the file: {error}") from error
    for name, tensor in tensors.items():
        if tensor.dtype == torch.bool and tensor.numel() and tensor.view(torch.uint8).max() > 1:
            raise ArtifactError(f"tensor {name!r} is boolean and holds other bytes than 0 and 1")
    return tensors
