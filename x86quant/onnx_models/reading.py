"""An ONNX file as a model in memory: nothing outside of its folder is read, no code runs."""

from __future__ import annotations

import dataclasses
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from x86quant.errors import InvalidInputError, UnsupportedError, first_line
from x86quant.onnx_models.element_types import torch_dtype, type_name

if TYPE_CHECKING:
    from onnx import ModelProto, TensorProto

#: The domains that are ONNX itself.
STANDARD = ("", "ai.onnx")


@dataclasses.dataclass(frozen=True, slots=True)
class OnnxFile:
    """A model and where its external data may lie.

    Attributes:
        model: with model-local functions inlined.
        folder: of the file; None for a model that was in memory.
        name: for messages.
    """

    model: ModelProto
    folder: Path | None
    name: str

    def tensor(self, proto: TensorProto) -> torch.Tensor:
        """The values of ``proto``.

        Raises:
            InvalidInputError: they are not there, or fewer or more than its sizes say.
            UnsupportedError: PyTorch has no such type.
        """
        from onnx import TensorProto, numpy_helper

        dtype = torch_dtype(proto.data_type, f"the constant {proto.name!r} of {self.name}")
        if any(size < 0 for size in proto.dims):
            raise InvalidInputError(f"{self.name}: the constant {proto.name!r} has negative sizes")
        if proto.data_location == TensorProto.EXTERNAL:
            return self._external(proto, dtype)
        try:
            array = numpy_helper.to_array(proto)
        except Exception as error:  # of numpy and protobuf, on damaged files
            raise InvalidInputError(
                f"{self.name}: the constant {proto.name!r} of sizes {tuple(proto.dims)} cannot be "
                f"read: {first_line(error)}"
            ) from error
        return _as_torch(array, dtype)

    def _external(self, proto: TensorProto, dtype: torch.dtype) -> torch.Tensor:
        where = f"{self.name}: the external data of {proto.name!r}"
        if self.folder is None:
            raise InvalidInputError(
                f"{where} lie in a file, and the model came without one: give the path instead"
            )
        entries = {entry.key: entry.value for entry in proto.external_data}
        folder = self.folder.resolve()
        location = entries.get("location", "")
        path = (folder / location).resolve()
        if not location or os.path.isabs(location) or not path.is_relative_to(folder):
            raise InvalidInputError(
                f"{where} are said to lie in {location!r}, which is not in the model's folder: "
                "nothing outside of it is read"
            )
        if not path.is_file():
            raise InvalidInputError(f"{where} lie in {location!r}, which is not beside the model")
        if dtype.itemsize * 8 != _bits(proto.data_type):
            raise UnsupportedError(f"{where} are of {type_name(proto.data_type)}, which is packed")
        wanted = math.prod(proto.dims) * dtype.itemsize
        try:
            offset = int(entries.get("offset", 0))
            length = int(entries.get("length", wanted))
        except ValueError:
            raise InvalidInputError(f"{where} have an offset or length that is no number") from None
        if length != wanted or offset < 0 or offset + length > path.stat().st_size:
            raise InvalidInputError(
                f"{where}: its sizes {tuple(proto.dims)} are {wanted} bytes, but {length} bytes "
                f"at {offset} are named of a file of {path.stat().st_size}: it may be truncated"
            )
        with path.open("rb") as file:
            file.seek(offset)
            data = bytearray(file.read(length))
        if not data:
            return torch.empty(tuple(proto.dims), dtype=dtype)
        return torch.frombuffer(data, dtype=dtype).reshape(tuple(proto.dims))


def read(source: str | os.PathLike[str] | Any) -> OnnxFile:
    """The model that ``source``, a path or a ``ModelProto``, is.

    Raises:
        InvalidInputError: there is no such file, or it is no ONNX model or a damaged one.
        UnsupportedError: the package ``onnx`` is missing.
    """
    onnx = imported_onnx()
    if isinstance(source, onnx.ModelProto):
        return OnnxFile(_prepared(source, "the ONNX model"), None, "the ONNX model")
    if not isinstance(source, str | os.PathLike):
        raise InvalidInputError(
            f"an ONNX model is given as its path or as a ModelProto, not {type(source).__name__}"
        )
    path = Path(source)
    if not path.is_file():
        raise InvalidInputError(f"there is no file {path}")
    try:
        model = onnx.load(path, load_external_data=False, format="protobuf")
    except Exception as error:  # of protobuf, on whatever the file holds
        raise InvalidInputError(
            f"{path} is not an ONNX model, or a truncated one: {first_line(error)}"
        ) from error
    return OnnxFile(_prepared(model, path.name), path.parent, path.name)


def imported_onnx() -> Any:
    """The package ``onnx``.

    Raises:
        UnsupportedError: it is not installed.
    """
    try:
        import onnx
    except ImportError as error:
        raise UnsupportedError(
            "reading ONNX models needs the package onnx: pip install 'x86quant[onnx]'"
        ) from error
    return onnx


def _prepared(model: ModelProto, name: str) -> ModelProto:
    from onnx import inliner

    if not model.HasField("graph") or not model.opset_import or not model.graph.output:
        raise InvalidInputError(f"{name} is not an ONNX model: it has no graph, opset or output")
    if not model.functions:
        return model
    try:
        inlined: ModelProto = inliner.inline_local_functions(model)
    except Exception as error:  # functions that call each other in a circle, for one
        raise InvalidInputError(
            f"{name}: its functions cannot be put in place: {first_line(error)}"
        ) from error
    return inlined


def opset(file: OnnxFile, domain: str) -> int | None:
    """The version of ``domain`` that the model asks for."""
    for entry in file.model.opset_import:
        if entry.domain == domain or {entry.domain, domain} <= set(STANDARD):
            return int(entry.version)
    return None


def _as_torch(array: np.ndarray[Any, Any], dtype: torch.dtype) -> torch.Tensor:
    if dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2):
        return torch.from_numpy(array.astype(np.float32)).to(dtype)
    try:
        return torch.from_numpy(np.array(array)).to(dtype)
    except TypeError:  # four-bit numbers of ml_dtypes
        return torch.from_numpy(array.astype(np.int8)).to(dtype)


def _bits(elements: int) -> int:
    import onnx

    if elements in (onnx.TensorProto.INT4, onnx.TensorProto.UINT4):
        return 4
    return torch_dtype(elements, "").itemsize * 8
