"""Mixtures of experts of transformers, whose weights are one tensor for all experts of a layer.

transformers lets others compute them: a function by a name in its table, that gets the module, the
tokens, the experts of each and how much these count. Ours has that name in the modules that were
converted; they stay what they are, with a linear for each expert in place of the float tensors.
Only the linears of experts that were chosen run, each on the rows that chose it.
"""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from x86quant.dynamic.group_weights import quantized
from x86quant.dynamic.layers import Int8Linear
from x86quant.errors import InvalidInputError

IMPLEMENTATION = "x86quant"
#: The linears of the experts, by what the float tensor of all of them is called.
LINEARS = {"gate_up_proj": "up_linears", "up_proj": "up_linears", "down_proj": "down_linears"}
_OF_EXPERTS = re.compile(r"(.*)\.(up_linears|down_linears)(?:\.\d+)?")
_INTERFACE = "transformers.integrations.moe"
#: What transformers' decorator gives to every module of experts.
_SAID = ("config", "has_gate", "has_bias", "has_post_expert_norm", "is_transposed", "num_experts")


def is_experts(module: nn.Module) -> bool:
    """Whether ``module`` holds experts that transformers lets others compute."""
    forward = type(module).forward
    decorated = getattr(forward, "__globals__", {}).get("__name__") == _INTERFACE
    return decorated and all(hasattr(module, name) for name in _SAID)


def why_float_experts(module: Any) -> str | None:
    """Why experts stay in float; None if they do not."""
    if getattr(module, "_is_expert_parallel", False):
        return "its experts are shared among processes"
    sizes = {
        name: w.shape for name in expert_tensors(module) if (w := getattr(module, name)).dim() == 3
    }
    if len(sizes) != 2 or any(shape[0] != module.num_experts for shape in sizes.values()):
        return "its weights are not two tensors with a matrix an expert"
    return None


def expert_tensors(module: nn.Module) -> list[str]:
    """The names of the float tensors in ``module`` that hold a matrix for each expert."""
    return [name for name in LINEARS if isinstance(module._parameters.get(name), torch.Tensor)]


def is_expert_tensor(module: nn.Module, name: str) -> bool:
    """Whether the parameter ``name`` of ``module`` holds a matrix for each expert."""
    return name in expert_tensors(module) and is_experts(module)


def unloaded_experts(module: nn.Module) -> dict[str, nn.Linear]:
    """Linears without memory of the sizes of the experts of ``module``, by their paths in it."""
    return {
        f"{LINEARS[name]}.{i}": nn.Linear(x.shape[1], len(x), bias=False, device="meta")
        for name in expert_tensors(module)
        for i, x in enumerate(expert_weights(module, name, module.get_parameter(name)))
    }


def expert_weights(module: Any, name: str, tensor: torch.Tensor) -> list[torch.Tensor]:
    """The float weight [out, in] of each expert in the ``tensor`` called ``name``, as views."""
    if tensor.dim() != 3 or len(tensor) != module.num_experts:
        raise InvalidInputError(
            f"{name} is {tuple(tensor.shape)}, expected a matrix for each of "
            f"{module.num_experts} experts"
        )
    return [x.t() if module.is_transposed else x for x in tensor.unbind()]


def to_int8_experts(
    module: nn.Module,
    kind: type[Int8Linear],
    bits: int,
    known: Mapping[str, tuple[torch.Tensor, torch.Tensor]] | None = None,
) -> nn.Module:
    """``module`` itself, its float weights replaced by linears of ``kind``.

    ``known`` are the codes and scales of some of these, by their paths in it.
    """
    for name in expert_tensors(module):
        give_experts(module, name, module.get_parameter(name).detach(), kind, bits, known)
    return module


def give_experts(
    module: nn.Module,
    name: str,
    tensor: torch.Tensor,
    kind: type[Int8Linear],
    bits: int,
    known: Mapping[str, tuple[torch.Tensor, torch.Tensor]] | None = None,
) -> None:
    """Put linears made of the float ``tensor`` in the place of the one called ``name``."""
    made = nn.ModuleList()
    for i, weight in enumerate(expert_weights(module, name, tensor)):
        operands = (known or {}).get(f"{LINEARS[name]}.{i}")
        made.append(kind(*(operands or quantized(weight.contiguous(), bits))))
    replace_tensor(module, name, made)


def float_tensors(module: nn.Module) -> list[str]:
    """The names of the float tensors that the int8 experts of ``module`` took the place of."""
    if not is_experts(module):
        return []
    up = "gate_up_proj" if module.has_gate else "up_proj"
    return [name for name in (up, "down_proj") if LINEARS[name] in module._modules]


def replace_tensor(module: nn.Module, name: str, linears: nn.ModuleList) -> None:
    """Put ``linears`` in the place of the float tensor ``name`` of experts."""
    del module._parameters[name]
    take_linears(module, name, linears)


def drop_tensors(module: nn.Module) -> None:
    """Take the float tensors from experts, whose linears are to come."""
    for name in expert_tensors(module):
        del module._parameters[name]
    for part in module.modules():
        part._is_hf_initialized = True  # type: ignore[assignment]


def take_linears(module: nn.Module, name: str, linears: nn.ModuleList) -> None:
    """Let experts compute with ``linears`` what the float tensor ``name`` was for."""
    setattr(module, LINEARS[name], linears)
    for part in module.modules():  # transformers would fill the tensors that are gone
        part._is_hf_initialized = True  # type: ignore[assignment]
    _compute_here(module)


def open_experts(model: nn.Module, paths: Iterable[str]) -> None:
    """Let there be linears of experts in ``model`` at those of ``paths`` where such would be.

    Each is empty, to be replaced, and the float tensor that they stand for is gone.
    """
    wanted = {(found[1], found[2]) for path in paths if (found := _OF_EXPERTS.fullmatch(path))}
    for path, linears in wanted:
        try:
            module = model.get_submodule(path)
        except AttributeError:  # whoever asks finds that out, too
            continue
        tensor = next((t for t in expert_tensors(module) if LINEARS[t] == linears), None)
        if tensor is not None and is_experts(module):
            count = int(module.num_experts)  # type: ignore[arg-type]
            replace_tensor(module, tensor, nn.ModuleList(nn.Identity() for _ in range(count)))


def _compute_here(module: Any) -> None:
    """Let transformers call :func:`experts_forward` for ``module``, and for no other."""
    interface: Any = sys.modules[_INTERFACE]
    interface.ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, experts_forward)
    if module.config._experts_implementation != IMPLEMENTATION:
        module.config = copy.copy(module.config)  # the model's says how the others are computed
        module.config._experts_implementation_internal = IMPLEMENTATION


def experts_forward(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """What transformers' own functions compute, by the linears of the experts that were chosen.

    Args:
        self: the module of experts.
        hidden_states: [tokens, features].
        top_k_index: [tokens, k], the experts of each token; none of these numbers may repeat there.
        top_k_weights: [tokens, k], what each of them counts.
    """
    chosen = top_k_index.shape[-1]
    experts, order = torch.sort(top_k_index.reshape(-1), stable=True)
    counts = torch.bincount(experts, minlength=self.num_experts).tolist()
    if len(counts) > self.num_experts:
        raise InvalidInputError(
            f"a token asks for expert {len(counts) - 1}, and there are {self.num_experts}"
        )
    rows = _products(self.up_linears, hidden_states[order // chosen], counts)
    if self.has_bias:
        rows += getattr(self, "gate_up_proj_bias" if self.has_gate else "up_proj_bias")[experts]
    rows = self._apply_gate(rows) if self.has_gate else self.act_fn(rows)
    rows = _products(self.down_linears, rows, counts)
    if self.has_bias:
        rows += self.down_proj_bias[experts]
    if self.has_post_expert_norm:
        rows = self.post_expert_norm(rows)
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order))
    weighted = rows[back].reshape(*top_k_index.shape, -1) * top_k_weights.unsqueeze(-1)
    return weighted.sum(1).to(hidden_states.dtype)


def _products(linears: nn.ModuleList, rows: torch.Tensor, counts: list[int]) -> torch.Tensor:
    """The rows of each expert, which lie one behind the other, through its linear."""
    # Empty rows, where there are no tokens, go through one for the sizes.
    parts = zip(linears, torch.split(rows, counts), strict=True)
    found = [linear(part) for linear, part in parts if len(part)]
    return torch.cat(found) if found else linears[0](rows)
