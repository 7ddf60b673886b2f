"""``to_dynamic``: a model with its linears replaced by int8 ones."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from x86quant.dynamic.layers import (
    DynamicLinear,
    DynamicMultiheadAttention,
    Int8Linear,
    WeightOnlyEmbedding,
    WeightOnlyLinear,
)

#: Activation modules that a linear before them can absorb, by qualified name, so that those of
#: other packages need no import.
_ACTIVATION_MODULES = {
    "torch.nn.modules.activation.ReLU": "relu",
    "torch.nn.modules.activation.SiLU": "silu",
    "transformers.activations.GELUActivation": "gelu",
    "transformers.activations.NewGELUActivation": "gelu_tanh",
    "transformers.activations.GELUTanh": "gelu_tanh",
    "transformers.activations.SiLUActivation": "silu",
}
_ACTIVATION_FUNCTIONS: dict[Any, str] = {
    F.relu: "relu",
    F.gelu: "gelu",
    F.silu: "silu",
    torch.relu: "relu",
}


def activation_name(activation: object) -> str | None:
    """The name under which a linear can absorb ``activation``, a module or function, or None."""
    if isinstance(activation, nn.GELU):
        return {"none": "gelu", "tanh": "gelu_tanh"}[activation.approximate]
    if isinstance(activation, nn.Module):
        kind = type(activation)
        return _ACTIVATION_MODULES.get(f"{kind.__module__}.{kind.__qualname__}")
    return _ACTIVATION_FUNCTIONS.get(activation)


def to_dynamic(
    model: nn.Module,
    *,
    weight_only: bool = False,
    embeddings: bool = False,
    keep: Callable[[str, nn.Module], bool] | None = None,
    inplace: bool = False,
) -> nn.Module:
    """``model`` with its linears in int8, for inference.

    Every ``nn.Linear`` becomes a ``DynamicLinear`` and every ``nn.MultiheadAttention`` a
    ``DynamicMultiheadAttention``, where that is possible. Activations right behind a linear are
    fused into it. Subclasses of these layers, parametrized layers and layers with hooks stay.

    Args:
        model: a float model; it is not changed unless ``inplace``.
        weight_only: keep activations in float (``WeightOnlyLinear``), and attentions whole.
        embeddings: embedding tables to int8 too (``WeightOnlyEmbedding``), which saves memory.
        keep: ``keep(name, module)`` says which layers stay in float.
        inplace: change ``model`` itself, which saves a copy of its weights.
    """
    if not inplace:
        model = copy.deepcopy(model)
    kind = WeightOnlyLinear if weight_only else DynamicLinear
    done: dict[nn.Module, nn.Module] = {}

    def convert(name: str, module: nn.Module) -> nn.Module:
        if module not in done:
            done[module] = module
            kept = _has_hooks(module) or (keep is not None and keep(name, module))
            if type(module) is nn.Linear and not kept:
                done[module] = kind.from_float(module)
            elif type(module) is nn.Embedding and embeddings and not kept:
                if module.max_norm is None:  # a table with one is rewritten as it is read
                    done[module] = WeightOnlyEmbedding.from_float(module)
            elif type(module) is nn.MultiheadAttention:
                if not (kept or weight_only or DynamicMultiheadAttention.refusal(module)):
                    done[module] = DynamicMultiheadAttention.from_float(module)
            else:
                # Not named_children(), which gives a shared child one of its names only.
                for child_name, child in module._modules.items():
                    if child is not None:
                        path = f"{name}.{child_name}" if name else child_name
                        module._modules[child_name] = convert(path, child)
        return done[module]

    model = convert("", model)
    users = _times_used(model)
    for module in model.modules():
        _fuse_children(module, users)
        leave_fast_path(module)
    return model


def _has_hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


def _times_used(model: nn.Module) -> dict[nn.Module, int]:
    """In how many places of ``model`` each module stands."""
    used: dict[nn.Module, int] = {}
    for module in model.modules():
        for child in module._modules.values():
            if child is not None:
                used[child] = used.get(child, 0) + 1
    return used


def _fuse_children(module: nn.Module, users: dict[nn.Module, int]) -> None:
    """Fuse activations that ``module`` applies right behind one of its int8 linears."""
    if isinstance(module, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
        _fuse(module, "linear1", "activation", users)
        return
    kinds = [type(child) for child in module.children()]
    names = [activation_name(child) for child in module.children()]
    if not any(issubclass(kind, Int8Linear) for kind in kinds) or not any(names):
        return
    for linear, activation in _consecutive_children(module):
        _fuse(module, linear, activation, users)


def _fuse(module: nn.Module, linear: str, activation: str, users: dict[nn.Module, int]) -> None:
    first, second = getattr(module, linear), getattr(module, activation)
    name = activation_name(second)
    shared = users.get(first, 0) > 1 or (isinstance(second, nn.Module) and _has_hooks(second))
    if name is None or shared or not isinstance(first, Int8Linear) or first.activation is not None:
        return
    first.activation = name
    setattr(module, activation, nn.Identity())


def _consecutive_children(module: nn.Module) -> list[tuple[str, str]]:
    """Pairs of children such that the second sees the first's result, which nobody else does."""
    try:
        graph = _ChildTracer().trace(module)
    except (torch.fx.proxy.TraceError, AttributeError, TypeError, ValueError):
        return []  # what it does with its children depends on values
    calls = [node for node in graph.nodes if node.op == "call_module"]
    targets = [node.target for node in calls]
    return [
        (str(node.args[0].target), str(node.target))
        for node in calls
        if node.args
        and isinstance(node.args[0], torch.fx.Node)
        and node.args[0].op == "call_module"
        and len(node.args[0].users) == 1
        and targets.count(node.target) == targets.count(node.args[0].target) == 1
    ]


class _ChildTracer(torch.fx.Tracer):
    """Sees a module's children as they are called, and nothing inside of them."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True


def leave_fast_path(module: nn.Module) -> None:
    """Keep torch's transformer layers from reading float weights that are no longer there."""
    if isinstance(module, nn.TransformerEncoderLayer):
        if any(isinstance(m, Int8Linear) for m in module.modules()):
            module.activation_relu_or_gelu = 0
    elif isinstance(module, nn.TransformerEncoder):
        module.use_nested_tensor = False
