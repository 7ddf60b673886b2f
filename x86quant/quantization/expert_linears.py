"""Experts of a float model as linears, so that the data can choose the codes of each."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from x86quant.calling.state import with_shared_tensors
from x86quant.dynamic.experts import LINEARS, expert_tensors, expert_weights, replace_tensor


def with_float_linears(model: nn.Module, paths: Sequence[str]) -> tuple[nn.Module, list[str]]:
    """A copy of ``model`` in which experts at ``paths`` are float linears, and what these are.

    The copy has the same tensors; its linears are called as those in codes will be.
    """
    model = with_shared_tensors(model)
    found = []
    for path in paths:
        module = model.get_submodule(path)
        for name in expert_tensors(module):
            linears = nn.ModuleList()
            for i, weight in enumerate(expert_weights(module, name, module.get_parameter(name))):
                linears.append(nn.Linear(weight.shape[1], len(weight), False, device="meta"))
                linears[-1].weight = nn.Parameter(weight.detach(), requires_grad=False)
                found.append(f"{path}.{LINEARS[name]}.{i}")
            replace_tensor(module, name, linears)
    return model, found
