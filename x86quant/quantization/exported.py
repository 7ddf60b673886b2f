"""What torch.export sees, as the graph of layers and functions that stock quantization expects.

An exported graph is flat: aten ops on parameters. Ops on the parameters of one of torch's layers
become calls of that layer again, and other ops the functions that stock quantization knows by name.
What has no entry in the tables stays an aten op and runs in float.
"""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.fx import GraphModule, Node

from x86quant.errors import UnsupportedError
from x86quant.lowering.from_export import exported_layer, flat
from x86quant.quantization.batches import Call
from x86quant.quantization.wording import first_line, quiet

aten = torch.ops.aten

#: Ops that a layer stands for, and where among their arguments the layer's weight is.
_LAYERS: dict[Any, tuple[tuple[type[nn.Module], ...], int]] = {
    aten.conv1d.default: ((nn.Conv1d,), 1),
    aten.conv2d.default: ((nn.Conv2d,), 1),
    aten.conv3d.default: ((nn.Conv3d,), 1),
    aten.conv_transpose1d.default: ((nn.ConvTranspose1d,), 1),
    aten.conv_transpose2d.input: ((nn.ConvTranspose2d,), 1),
    aten.conv_transpose3d.input: ((nn.ConvTranspose3d,), 1),
    aten.linear.default: ((nn.Linear,), 1),
    aten.layer_norm.default: ((nn.LayerNorm,), 2),
    aten.embedding.default: ((nn.Embedding,), 0),
    aten._native_batch_norm_legit_no_training.default: (
        (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d),
        1,
    ),
}

_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    aten.relu.default: F.relu,
    aten.relu6.default: F.relu6,
    aten.hardtanh.default: F.hardtanh,
    aten.leaky_relu.default: F.leaky_relu,
    aten.elu.default: F.elu,
    aten.hardswish.default: F.hardswish,
    aten.hardsigmoid.default: F.hardsigmoid,
    aten.silu.default: F.silu,
    aten.gelu.default: F.gelu,
    aten.sigmoid.default: torch.sigmoid,
    aten.tanh.default: torch.tanh,
    aten.softmax.int: F.softmax,
    aten.clamp.default: torch.clamp,
    aten.add.Tensor: torch.add,
    aten.mul.Tensor: torch.mul,
    aten.matmul.default: torch.matmul,
    aten.cat.default: torch.cat,
    aten.max_pool1d.default: F.max_pool1d,
    aten.max_pool2d.default: F.max_pool2d,
    aten.avg_pool2d.default: F.avg_pool2d,
    aten.adaptive_avg_pool1d.default: F.adaptive_avg_pool1d,
    aten.adaptive_avg_pool2d.default: F.adaptive_avg_pool2d,
    aten.adaptive_avg_pool3d.default: F.adaptive_avg_pool3d,
    aten.flatten.using_ints: torch.flatten,
    aten.mean.dim: torch.mean,
    aten.permute.default: torch.permute,
    aten.transpose.int: torch.transpose,
    aten.unsqueeze.default: torch.unsqueeze,
    aten.reshape.default: torch.reshape,
    aten.view.default: torch.reshape,
}


def from_export(model: nn.Module, example: Call, reason: str) -> GraphModule:
    """``model`` as torch.export traces it, with its layers called by their paths.

    Raises:
        UnsupportedError: it cannot; says why, after ``reason``, why torch.fx cannot either.
    """
    args, shapes = _free_sizes(example)
    try:
        with quiet(), _silent(), torch.no_grad():
            program = torch.export.export(model, args, dynamic_shapes=shapes, strict=False)
            gm = flat(program.run_decompositions({}).module(check_guards=False))
    # Export wraps and raises nearly anything, among it errors of the model's own code.
    except Exception as error:
        raise UnsupportedError(f"{reason}, nor can torch.export ({first_line(error)})") from error
    for node in list(gm.graph.nodes):
        _convert(gm, model, node)
    gm.graph.eliminate_dead_code()
    gm.recompile()
    return gm


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """A block in which export neither logs nor prints what it refuses: the error says why."""
    logger = logging.getLogger("torch")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logger.setLevel(before)


def _free_sizes(example: Call) -> tuple[tuple[Any, ...], Any]:
    """Inputs with at least two rows, and the wish that all their sizes stay free."""
    tensors = example.tensors
    rows = {x.shape[0] if x.dim() else None for x in tensors}
    if len(tensors) != len(example.args) or len(rows) != 1 or None in rows:
        return example.args, None
    if rows == {1}:  # export would take a single row for a constant
        tensors = [torch.cat([x, x]) for x in tensors]
    return tuple(tensors), tuple(
        dict.fromkeys(range(x.dim()), torch.export.Dim.AUTO) for x in tensors
    )


def _convert(gm: GraphModule, model: nn.Module, node: Node) -> None:
    if node.op != "call_function":
        return
    node.meta["scope"] = exported_layer(node)
    if node.target in _LAYERS and (path := _layer(model, node)):
        _call_layer(gm, model, node, path)
    elif node.target is aten.dropout.default:  # in evaluation mode
        node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
    elif node.target is aten.sym_size.int:
        node.op, node.target = "call_method", "size"
    elif node.target in _FUNCTIONS:
        node.target = _FUNCTIONS[node.target]


def _layer(model: nn.Module, node: Node) -> str | None:
    """The path of the layer whose op this is, if it is one of torch's own."""
    kinds, position = _LAYERS[node.target]
    weight = node.args[position] if len(node.args) > position else None
    if not isinstance(weight, Node) or weight.op != "get_attr":
        return None
    path, _, name = str(weight.target).rpartition(".")
    if name != "weight" or not path or type(model.get_submodule(path)) not in kinds:
        return None
    return path


def _call_layer(gm: GraphModule, model: nn.Module, node: Node, path: str) -> None:
    parent, _, name = path.rpartition(".")
    holder: nn.Module = gm
    for part in filter(None, parent.split(".")):
        if not hasattr(holder, part):
            setattr(holder, part, nn.Module())
        holder = getattr(holder, part)
    setattr(holder, name, model.get_submodule(path))
    is_embedding = node.target is aten.embedding.default
    with gm.graph.inserting_before(node):
        call = gm.graph.call_module(path, (node.args[1 if is_embedding else 0],))
    call.meta.update(node.meta)
    node.replace_all_uses_with(call)
    if node.target is aten._native_batch_norm_legit_no_training.default:
        for user in list(call.users):  # the op returns a tuple, the layer its first
            user.replace_all_uses_with(call)
            gm.graph.erase_node(user)
    gm.graph.erase_node(node)
