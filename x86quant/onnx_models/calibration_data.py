"""What ``quantize`` takes of an ONNX model: a module, and batches as the module is called."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.fx import GraphModule

from x86quant.errors import InvalidInputError
from x86quant.onnx_models import from_onnx
from x86quant.onnx_models.operators.rearranging import of_sizes

if TYPE_CHECKING:
    from onnx import ModelProto


def model_and_data(source: str | os.PathLike[str] | ModelProto, data: Any) -> tuple[nn.Module, Any]:
    """The module that ``source`` is, with activations that are not rounded, and ``data`` for it."""
    module = from_onnx(source, keep_rounding=False)
    if data is None:
        return module, None
    assert isinstance(module, GraphModule)
    if isinstance(data, np.ndarray):
        data = torch.from_numpy(data)
    if isinstance(data, torch.Tensor):
        rows = _fixed_batch(module)
        # The file takes so many at a time; quantize would choose a number of its own.
        if rows is None or data.dim() == 0 or len(data) % rows:
            return module, data
        return module, list(torch.split(data, rows))
    if isinstance(data, str | bytes | Mapping) or not isinstance(data, Iterable):
        return module, data  # which quantize refuses
    return module, _Batches(data, module)


def _fixed_batch(module: GraphModule) -> int | None:
    """The first size of the first input, if the file fixes it."""
    for node in module.graph.nodes:
        if node.op == "call_function" and node.target is of_sizes:
            sizes: Sequence[int | None] = node.args[2]
            return sizes[0] if sizes else None
    return None


class _Batches:
    """Batches with tensors in place of arrays and the module's names in place of the file's."""

    def __init__(self, data: Iterable[Any], module: GraphModule) -> None:
        self._data = data
        inputs = [str(node.target) for node in module.graph.find_nodes(op="placeholder")]
        names: Sequence[str] = module.input_names  # type: ignore[assignment]
        self._renamed = dict(zip(names, inputs, strict=True))

    def __iter__(self) -> Iterator[Any]:
        for number, batch in enumerate(self._data):
            yield self._converted(batch, number)

    def _converted(self, batch: Any, number: int) -> Any:
        if isinstance(batch, Mapping):
            unknown = sorted(set(batch) - set(self._renamed) - set(self._renamed.values()))
            known = {self._renamed.get(name, name): value for name, value in batch.items()}
            missing = sorted(set(self._renamed.values()) - set(known))
            if missing:
                raise InvalidInputError(
                    f"calibration batch {number} lacks {', '.join(missing)}: the inputs of the "
                    f"ONNX model are {', '.join(self._renamed)}"
                    + (f"; it has {', '.join(map(str, unknown))}" if unknown else "")
                )
            return {name: _tensor(value) for name, value in known.items() if name not in unknown}
        if isinstance(batch, list | tuple):
            return tuple(map(_tensor, batch))
        return _tensor(batch)


def _tensor(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        return torch.from_numpy(np.array(value))
    return value
