"""The file that the C++ library runs: plans, and the weights that they share.

::

    __metadata__ = {"x86quant": "x86quant-program <version> <crc32>\\n<manifest>"}

It is a safetensors file. The checksum covers every byte, its own 8 digits taken as zeros. What a
manifest holds is what ``kernels/serving/loader.cpp`` reads. Weights are stored as they are: the
library packs them for the CPU at hand.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import zlib
from collections.abc import Sequence
from typing import Any

import torch

from x86quant.errors import UnsupportedError
from x86quant.packing.linear_dynamic import Weights
from x86quant.runtime.programs import LayerWeights, NativeStep, Programs
from x86quant.version import __version__

VERSION = 5

_MAGIC = "x86quant-program"

#: Of inputs and outputs: those of kernels/serving/types.h.
_TYPES = ("float32", "uint8", "int32", "int64")
_NO_CRC = "0" * 8


@dataclasses.dataclass(frozen=True)
class StoredLayer:
    """Weights by their number in the file, in place of packed ones."""

    number: int
    nbytes: int

    def bytes(self) -> int:
        """Memory of the weights."""
        return self.nbytes


@dataclasses.dataclass(frozen=True)
class StoredRowLinear(StoredLayer):
    """The same for products of row codes, which are numbered by themselves."""


@dataclasses.dataclass(eq=False)
class StoredPlan:
    """One plan, which has the methods of the extension's programs that planning calls."""

    arena: int
    inputs: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    outputs: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    kept: list[int] = dataclasses.field(default_factory=list)
    stages: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    def expect(self, sizes: list[int], strides: list[int], type_name: str) -> None:
        """The next input."""
        _check_type(type_name, "takes")
        self.inputs.append({"sizes": sizes, "strides": strides, "type": type_name})

    def expect_any_size(self, type_name: str) -> None:
        """The next input, which has one dimension, of another size in each call."""
        self.expect([-1], [1], type_name)

    def add_output(self, sizes: list[int], strides: list[int], type_name: str) -> None:
        """The next output."""
        _check_type(type_name, "returns")
        self.outputs.append({"sizes": sizes, "strides": strides, "type": type_name})

    def keep(self, nbytes: list[int]) -> None:
        """Sizes of what one stage leaves to another."""
        self.kept = nbytes

    def add(self, step: dict[str, Any]) -> None:
        """The next step."""
        if not self.stages or self.stages[-1]["parts"] is not None:
            self.stages.append({"steps": [], "parts": None})
        self.stages[-1]["steps"].append(step)

    def repeat(self, times: int, nbytes: list[int]) -> None:
        """The steps since the last such call are those of one of so many parts of a batch."""
        self.stages[-1]["parts"] = {"times": times, "bytes": nbytes}

    def of_parts(self, times: int) -> StoredPlan:
        """The same steps for a batch whose first stage has so many parts, each as large as here."""
        before = self.stages[0]["parts"]["times"]

        def resized(layouts: list[dict[str, Any]]) -> list[dict[str, Any]]:
            return [
                {**x, "sizes": [x["sizes"][0] * times // before, *x["sizes"][1:]]} for x in layouts
            ]

        def again(stage: dict[str, Any]) -> dict[str, Any]:
            parts = stage["parts"]
            return {**stage, "parts": {**parts, "times": parts["times"] * times // before}}

        return dataclasses.replace(
            self,
            inputs=resized(self.inputs),
            outputs=resized(self.outputs),
            kept=[size * times // before for size in self.kept],
            stages=[*map(again, self.stages)],
        )

    def check_reach(self) -> None:
        """Whoever loads the file checks it."""


class StoredPrograms(Programs):
    """Gathers plans for a file; all their convolutions and linears run on the native kernels."""

    def __init__(self) -> None:
        self._tensors: dict[str, torch.Tensor] = {}
        self._names: dict[bytes, str] = {}
        self._packs: list[dict[str, Any]] = []
        self._row_packs: list[dict[str, Any]] = []

    def kernel(self, chosen: str) -> str:
        """The library has no other."""
        return "native"

    def pack(self, kernel: str, layer: LayerWeights) -> StoredLayer:
        """Store the weights as they are."""
        names = ("weight", "mult", "bias", "lut", "slopes")
        tables = {name: getattr(layer, name) for name in names}
        stored = {name: None if x is None else self._stored(x) for name, x in tables.items()}
        numbers = {"geometry": layer.geometry, "codes": layer.codes}
        self._packs.append({**stored, **numbers, "res_mult": float(layer.residual_mult)})
        return StoredLayer(len(self._packs) - 1, layer.weight.numel())

    def row_linear(self, weights: Weights, activation: str | None) -> Any:
        """Store the weights as they are."""
        return self._row_pack([weights], activation) if weights[0].numel() else None

    def gated_rows(self, gate: Weights, up: Weights, activation: str) -> Any:
        """Store both."""
        return self._row_pack([gate, up], activation) if gate[0].numel() else None

    def _row_pack(self, parts: Sequence[Weights], activation: str | None) -> StoredRowLinear:
        stored = [[None if x is None else self._stored(x) for x in part] for part in parts]
        names = ("weight", "scale", "bias")
        linears = [dict(zip(names, part, strict=True)) for part in stored]
        self._row_packs.append({"linears": linears, "activation": activation or ""})
        count = sum(part[0].numel() for part in parts)
        return StoredRowLinear(len(self._row_packs) - 1, count)

    def new(self, arena_bytes: int, inputs: int) -> StoredPlan:
        """A plan without steps."""
        return StoredPlan(arena_bytes)

    def add(self, program: Any, step: NativeStep) -> None:
        """Append ``step``."""
        fields = {name: self._plain(value) for name, value in step.plain_fields().items()}
        program.add({"kind": step.kind, "fields": fields})

    def to_bytes(self, plans: list[StoredPlan]) -> bytes:
        """The file that holds ``plans``."""
        from safetensors.torch import save

        manifest = {
            "made_by": f"x86quant {__version__}",
            "packs": self._packs,
            "row_packs": self._row_packs,
            "plans": [vars(plan) for plan in plans],
        }
        text = json.dumps(manifest, separators=(",", ":"), allow_nan=False)
        data = save(self._tensors, {"x86quant": f"{_MAGIC} {VERSION} {_NO_CRC}\n{text}"})
        return sealed(data)

    def _plain(self, field: Any) -> Any:
        if isinstance(field, torch.Tensor):
            return {"table": self._stored(field)}
        if isinstance(field, StoredRowLinear):
            return {"row_pack": field.number}
        return {"pack": field.number} if isinstance(field, StoredLayer) else field

    def _stored(self, tensor: torch.Tensor) -> str:
        """The name of ``tensor`` in the file, where equal ones are one."""
        tensor = tensor.detach().contiguous()
        facts = f"{tensor.dtype} {tuple(tensor.shape)} ".encode()
        key = hashlib.sha256(facts + tensor.numpy().tobytes()).digest()
        if key not in self._names:
            self._names[key] = f"t{len(self._names)}"
            self._tensors[self._names[key]] = tensor.clone()
        return self._names[key]


def sealed(data: bytes) -> bytes:
    """``data`` with the right checksum in place of the one in it."""
    mark = f"{_MAGIC} {VERSION} ".encode()
    at = data.index(mark) + len(mark)
    blank = b"".join((data[:at], _NO_CRC.encode(), data[at + len(_NO_CRC) :]))
    return b"".join((data[:at], f"{zlib.crc32(blank):08x}".encode(), data[at + len(_NO_CRC) :]))


def _check_type(name: str, does: str) -> None:
    if name not in _TYPES:
        raise UnsupportedError(
            f"the model {does} a tensor of {name}, and a program file knows {', '.join(_TYPES)} "
            "only: let the model convert it, such as `mask != 0` of uint8"
        )
