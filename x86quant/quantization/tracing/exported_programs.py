"""An exported program as a module of layers, like that which it was exported from."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node
from torch.fx.graph import CodeGen
from torch.utils import _pytree as pytree

from x86quant.errors import InvalidInputError
from x86quant.quantization.tracing.spelled_ops import spell

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
        elif node.op == "call_function":
            spell(found, node)
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
