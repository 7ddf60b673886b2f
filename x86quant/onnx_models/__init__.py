"""ONNX models as modules: ``from_onnx``."""

from __future__ import annotations

import collections
import os
from typing import TYPE_CHECKING, Any

from torch import nn

from x86quant.onnx_models.reading import STANDARD, read

if TYPE_CHECKING:
    from onnx import GraphProto, ModelProto


def from_onnx(
    source: str | os.PathLike[str] | ModelProto, *, keep_rounding: bool = True
) -> nn.Module:
    """An ONNX model as a module in float, which computes what ONNX Runtime does.

    Args:
        source: the path of the file, or the model. Its external data are read from its folder.
        keep_rounding: round the activations of a model that was quantized before
            (QuantizeLinear and DequantizeLinear) as it says. ``quantize`` of a path does not: it
            chooses ranges of its own.

    Returns:
        A ``torch.fx.GraphModule`` in evaluation mode. It takes the file's inputs by position, in
        its order, or by name (what is no identifier is made one: ``"input.1"`` is ``input_1``),
        and returns its output, or a tuple of them. Its attributes ``input_names`` and
        ``output_names`` are the names in the file. Constant weights are those of PyTorch's layers.

    Raises:
        InvalidInputError: there is no such file, or it is no ONNX model or a damaged one.
        UnsupportedError: an operator cannot be read, which is named; or the package ``onnx`` is
            missing.
    """
    file = read(source)
    from x86quant.onnx_models import special_nodes, weight_layers
    from x86quant.onnx_models.graph_building import GraphBuilder

    assert special_nodes is not weight_layers  # importing them declares their makers
    opsets = {"" if o.domain in STANDARD else o.domain: o.version for o in file.model.opset_import}
    builder = GraphBuilder(file, opsets, keeps_rounding=keep_rounding)
    builder.uses = _uses(file.model.graph)
    names = builder.inputs(file.model.graph)
    module = builder.finish(builder.run(file.model.graph))
    module.input_names = tuple(names)  # type: ignore[assignment]
    module.output_names = tuple(one.name for one in file.model.graph.output)  # type: ignore[assignment]
    return module


def _uses(graph: GraphProto) -> collections.Counter[str]:
    """How often each value is read, within branches and loops too."""
    found: collections.Counter[str] = collections.Counter(one.name for one in graph.output)
    for node in graph.node:
        found.update(node.input)
        for attribute in node.attribute:
            if attribute.HasField("g"):
                found += _uses(attribute.g)
    return found


def is_onnx_source(model: Any) -> bool:
    """Whether ``model`` is a path or an ONNX model, rather than a module."""
    if isinstance(model, str | os.PathLike):
        return True
    kind = type(model)
    return kind.__name__ == "ModelProto" and kind.__module__.startswith("onnx")
