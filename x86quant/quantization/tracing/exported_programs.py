"""An exported program as a module of layers, like that which it was exported from.

``torch.export`` leaves aten ops on parameters. Where such an op is the whole of one of torch's
layers, the layer stands in its place again, at the path of its weight: everything that is known
about layers, from folding batch norms to names in reports, holds for exported programs, too.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node
from torch.fx.graph import CodeGen
from torch.utils import _pytree as pytree

from x86quant.errors import InvalidInputError
from x86quant.quantization.tracing.exported import spelled_as_function

aten = torch.ops.aten

#: Where a placeholder of such a module says which sizes the program was exported for alone.
FIXED_SIZES = "x86quant_fixed_sizes"


def is_exported(model: object) -> bool:
    """Whether ``model`` is an exported program, or the module of one."""
    if isinstance(model, ExportedProgram):
        return True
    return isinstance(model, GraphModule) and any(map(_is_aten, model.graph.nodes))


def _is_aten(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "aten"


def with_layers(model: Any) -> GraphModule:
    """``model``, for which :func:`is_exported` holds, as a graph that calls layers.

    A hook of it refuses other sizes than the program was exported for, as the program does.
    """
    if isinstance(model, ExportedProgram):
        found: Any = model.module(check_guards=False)
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch's, of its own trees
            found = copy.deepcopy(model)
    for hooks in (found._forward_pre_hooks, found._forward_hooks):
        for number, hook in list(hooks.items()):
            if str(getattr(hook, "__module__", "")).startswith("torch.export"):
                del hooks[number]
    for node in list(found.graph.nodes):
        if node.op == "placeholder":
            node.meta[FIXED_SIZES] = _fixed(node.meta.get("val"))
        elif node.op == "call_module" and node.target == "_guards_fn":
            found.graph.erase_node(node)
        elif node.op == "call_function" and not _as_layer(found, node):
            spelled_as_function(node)
    _call_plainly(found)
    found.graph.eliminate_dead_code()
    found.delete_all_unused_submodules()
    found.recompile()
    for name in ("train", "eval"):  # which export replaces by functions that refuse
        vars(found).pop(name, None)
    inputs = found.graph.find_nodes(op="placeholder")
    refuse = _OtherSizes([node.meta[FIXED_SIZES] for node in inputs])
    refuse.attach(found)
    found._register_deepcopy_hook(refuse.attach)  # copies of graph modules lose their hooks
    result: GraphModule = found.eval()
    return result


def without_hook(model: nn.Module) -> None:
    """Take the hook off ``model``, whose guard asks for the same."""
    hooks = model._forward_pre_hooks
    for number in [n for n, hook in hooks.items() if isinstance(hook, _OtherSizes)]:
        del hooks[number]


class _OtherSizes:
    """A hook that refuses calls with other sizes than those that a program was exported for."""

    def __init__(self, fixed: Sequence[tuple[tuple[int, int], ...]]) -> None:
        self._fixed = fixed

    def attach(self, module: nn.Module) -> None:
        """Look at all calls of ``module``."""
        module.register_forward_pre_hook(self, with_kwargs=True)

    def __call__(self, _: nn.Module, args: Any, kwargs: Any) -> None:
        leaves = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        for number, (x, fixed) in enumerate(zip(leaves, self._fixed, strict=False)):
            for dim, size in fixed:
                if dim >= x.dim() or x.shape[dim] != size:
                    raise InvalidInputError(
                        f"input {number} has the shape {tuple(x.shape)}; the program was exported "
                        f"for size {size} in dimension {dim} alone: export it with dynamic_shapes"
                    )


def _call_plainly(gm: GraphModule) -> None:
    """Let the code of ``gm`` name its arguments and build its result, where both are simple."""
    info = getattr(gm.graph._codegen, "pytree_info", None)
    if info is None or info.in_spec is None or info.out_spec is None:
        return
    arguments = [x for group in info.in_spec.children() for x in group.children()]
    (output,) = gm.graph.find_nodes(op="output")
    leaves = output.args[0]
    result = pytree.tree_unflatten(
        list(leaves) if isinstance(leaves, list | tuple) else [leaves], info.out_spec
    )
    if not all(spec.is_leaf() for spec in arguments) or not _is_simple(result):
        return
    inputs = gm.graph.find_nodes(op="placeholder")
    for node, name in zip(inputs, info.orig_args, strict=True):
        node.target = name
    output.args = (result,)
    gm.graph.set_codegen(CodeGen())
    for name in ("_in_spec", "_out_spec"):
        vars(gm).pop(name, None)


def _is_simple(value: Any) -> bool:
    if type(value) is dict:
        return all(isinstance(key, str) for key in value) and all(map(_is_simple, value.values()))
    if type(value) in (tuple, list):
        return all(map(_is_simple, value))
    return value is None or isinstance(value, Node | int | float)


def _fixed(value: Any) -> tuple[tuple[int, int], ...]:
    """The dimensions of an example that have only one size, and that."""
    if not isinstance(value, torch.Tensor):
        return ()
    return tuple((dim, size) for dim, size in enumerate(value.shape) if isinstance(size, int))


# --- layers ---


def _as_layer(gm: GraphModule, node: Node) -> bool:
    """Call a layer in place of ``node``, if it is all that a layer does."""
    entry = _LAYERS.get(node.target)
    if entry is None or node.kwargs:
        return False
    schema = node.target._schema.arguments  # type: ignore[union-attr]
    given: dict[str, Any] = {a.name: a.default_value for a in schema}
    given |= {a.name: value for a, value in zip(schema, node.args, strict=False)}
    weight = given["weight"]
    if not isinstance(weight, Node) or weight.op != "get_attr":
        return False
    path, _, name = str(weight.target).rpartition(".")
    if not path or name != "weight":
        return False
    tensors = {name: given[name] for name in _TENSORS if isinstance(given.get(name), Node)}
    if any(x.op != "get_attr" or str(x.target) != f"{path}.{n}" for n, x in tensors.items()):
        return False
    home = gm.get_submodule(path)
    layer = entry(home.weight, given)
    if layer is None or not _put(gm, path, home, layer):
        return False
    with gm.graph.inserting_before(node):
        call = gm.graph.call_module(path, (given["indices" if "indices" in given else "input"],))
    call.meta.update(node.meta)
    node.replace_all_uses_with(call)
    gm.graph.erase_node(node)
    return True


_TENSORS = ("weight", "bias", "running_mean", "running_var")


def _put(gm: GraphModule, path: str, home: nn.Module, layer: nn.Module) -> bool:
    """Let ``layer`` stand at ``path`` with the tensors of ``home``; False if another one does."""
    if type(home) is not nn.Module:
        return type(home) is type(layer) and repr(home) == repr(layer)
    if home._modules:
        return False
    for group in ("_parameters", "_buffers"):
        mine, its = getattr(layer, group), getattr(home, group)
        if {n for n, x in mine.items() if x is not None} - its.keys():
            return False
    for group in ("_parameters", "_buffers"):
        getattr(layer, group).update(getattr(home, group))
    gm.set_submodule(path, layer.eval())
    return True


def _conv(kind: type[nn.Module]) -> Callable[..., nn.Module | None]:
    def build(weight: torch.Tensor, given: dict[str, Any]) -> nn.Module | None:
        rank, groups = weight.dim() - 2, given["groups"]
        transposed = "output_padding" in given
        channels = (weight.shape[0], weight.shape[1] * groups)
        names = ("stride", "padding", "dilation", *(["output_padding"] if transposed else []))
        sizes = {name: _sizes(given[name], rank) for name in names}
        make: Any = kind
        return make(  # type: ignore[no-any-return]
            *(channels if transposed else (weight.shape[1] * groups, weight.shape[0])),
            tuple(weight.shape[2:]),
            groups=groups,
            bias=given["bias"] is not None,
            device="meta",
            **sizes,
        )

    return build


def _sizes(value: Any, rank: int) -> tuple[int, ...]:
    found = tuple(value)
    return found * rank if len(found) == 1 else found


def _linear(weight: torch.Tensor, given: dict[str, Any]) -> nn.Module:
    bias = given["bias"] is not None
    return nn.Linear(weight.shape[1], weight.shape[0], bias=bias, device="meta")


def _layer_norm(weight: torch.Tensor, given: dict[str, Any]) -> nn.Module:
    bias = given["bias"] is not None
    return nn.LayerNorm(given["normalized_shape"], given["eps"], bias=bias, device="meta")


def _embedding(weight: torch.Tensor, given: dict[str, Any]) -> nn.Module | None:
    if given["scale_grad_by_freq"] or given["sparse"]:
        return None
    return nn.Embedding(weight.shape[0], weight.shape[1], device="meta")


def _batch_norm(weight: torch.Tensor, given: dict[str, Any]) -> nn.Module | None:
    value = given["input"].meta.get("val")
    kind = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}.get(
        value.dim() if isinstance(value, torch.Tensor) else 0
    )
    if given["training"] or kind is None or given["running_mean"] is None:
        return None
    return kind(len(weight), eps=given["eps"], device="meta")


_LAYERS: dict[Any, Callable[..., nn.Module | None]] = {
    aten.conv1d.default: _conv(nn.Conv1d),
    aten.conv2d.default: _conv(nn.Conv2d),
    aten.conv3d.default: _conv(nn.Conv3d),
    aten.conv_transpose1d.default: _conv(nn.ConvTranspose1d),
    aten.conv_transpose2d.input: _conv(nn.ConvTranspose2d),
    aten.conv_transpose3d.input: _conv(nn.ConvTranspose3d),
    aten.linear.default: _linear,
    aten.layer_norm.default: _layer_norm,
    aten.embedding.default: _embedding,
    aten.batch_norm.default: _batch_norm,
}
