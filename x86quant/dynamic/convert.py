"""``to_dynamic``: a model with its linears replaced by int8 ones."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping

import torch
from torch import nn

from x86quant.dynamic.embedding_bag import RowwiseEmbedding, WeightOnlyEmbeddingBag, table_bits
from x86quant.dynamic.experts import is_experts, to_int8_experts, why_float_experts
from x86quant.dynamic.group_weights import check_bits
from x86quant.dynamic.layers import (
    DynamicLinear,
    DynamicMultiheadAttention,
    Int8Linear,
    Int8Sequential,
    WeightOnlyEmbedding,
    WeightOnlyLinear,
    is_conv1d,
)
from x86quant.dynamic.layers import has_hooks as has_hooks
from x86quant.dynamic.own_linears import computes_linear
from x86quant.dynamic.recurrent import RECURRENT
from x86quant.dynamic.torchao_layers import from_torchao, takes_codes_of
from x86quant.dynamic.transformers_config import note_in_config


def to_dynamic(
    model: nn.Module,
    *,
    weight_only: bool = False,
    embeddings: bool | int = False,
    weight_bits: int = 8,
    weights: Mapping[str, tuple[torch.Tensor, torch.Tensor]] | None = None,
    keep: Callable[[str, nn.Module], bool] | None = None,
    inplace: bool = False,
) -> nn.Module:
    """``model`` with its linears in int8, for inference.

    Every ``nn.Linear`` (and Hugging Face's ``Conv1D``) becomes a ``DynamicLinear`` and every
    ``nn.MultiheadAttention`` a ``DynamicMultiheadAttention``, every ``nn.LSTM`` and ``nn.GRU`` a
    ``DynamicLSTM`` and ``DynamicGRU``, and so their cells, where that is possible and gains.
    Experts of transformers that are one tensor become a ``DynamicLinear`` each.
    What stays in float: see ``why_float``.

    Args:
        model: a float model; it is not changed unless ``inplace``.
        weight_only: keep activations in float (``WeightOnlyLinear``), attentions and recurrent
            layers whole.
        embeddings: embedding tables too, which saves memory: 8, 4 or 2 bits, in FBGEMM's rows
            (``RowwiseEmbedding``, ``WeightOnlyEmbeddingBag``). True: bags in 8 bits, and embeddings
            as ``WeightOnlyEmbedding``, by which tied linears multiply in int8.
        weight_bits: of the weights of linears, and of tables where ``embeddings`` is True: 8, or 4
            with a scale for each group of 32 input features. Attentions of torch's own class and
            recurrent layers have 8.
        weights: codes and scales of linears by name, in place of those made here.
        keep: ``keep(name, module)`` says which layers stay in float.
        inplace: change ``model`` itself, which saves a copy of its weights.
    """
    if embeddings not in (False, True):
        table_bits(8, embeddings)
    check_bits(weight_bits)
    if not inplace:
        model = copy.deepcopy(model)
    kind = WeightOnlyLinear if weight_only else DynamicLinear
    done: dict[nn.Module, nn.Module] = {}

    def convert(name: str, module: nn.Module) -> nn.Module:
        if module not in done:
            done[module] = module
            kept = keep is not None and keep(name, module)
            if isinstance(module, nn.MultiheadAttention):
                if not (kept or weight_only or why_float(module)):
                    done[module] = DynamicMultiheadAttention.from_float(module)
            elif is_linear(module):
                if not (kept or why_float(module)):
                    operands = None if weights is None else weights.get(name)
                    done[module] = (
                        from_torchao(module, kind)
                        if takes_codes_of(module)
                        else kind.from_float(module, bits=weight_bits, operands=operands)
                    )
            elif is_recurrent(module):
                if not (kept or weight_only or why_float(module)):
                    done[module] = RECURRENT[_base(module)].from_float(module)  # type: ignore[arg-type]
            elif isinstance(module, nn.Embedding):
                if embeddings and not (kept or why_float(module)):
                    done[module] = (
                        WeightOnlyEmbedding.from_float(module, name, weight_bits)
                        if embeddings is True
                        else RowwiseEmbedding.from_float(module, name, embeddings)
                    )
            elif isinstance(module, nn.EmbeddingBag):
                if embeddings and not (kept or why_float(module)):
                    bits = 8 if embeddings is True else embeddings
                    done[module] = WeightOnlyEmbeddingBag.from_float(module, name, bits)
            elif is_experts(module):
                if not (kept or why_float(module)):
                    to_int8_experts(module, kind, weight_bits)
            else:
                # Not named_children(), which gives a shared child one of its names only.
                for child_name, child in module._modules.items():
                    if child is not None:
                        path = f"{name}.{child_name}" if name else child_name
                        module._modules[child_name] = convert(path, child)
        return done[module]

    model = convert("", model)
    adapt_containers(model)
    note_in_config(model)
    return model


def adapt_containers(model: nn.Module) -> None:
    """Let the containers in ``model`` deal with the int8 linears in them, in place."""
    for module in model.modules():
        _leave_fast_path(module)
        if type(module) is nn.Sequential and any(isinstance(m, Int8Linear) for m in module):
            module.__class__ = Int8Sequential


def is_linear(module: nn.Module) -> bool:
    """Whether ``module`` is a linear layer: torch's, a subclass of it, or Hugging Face's Conv1D."""
    return isinstance(module, nn.Linear) or is_conv1d(module)


def is_recurrent(module: nn.Module) -> bool:
    """Whether ``module`` is a recurrent layer or cell of torch."""
    return isinstance(module, nn.RNNBase | nn.RNNCellBase)


def why_float(module: nn.Module) -> str | None:
    """Why ``to_dynamic`` leaves a linear, an attention or a table in float; None if it does not.

    Only layers whose computation is known are replaced: those of torch's own classes, and
    subclasses that change neither what is called nor what is stored.
    """
    if has_hooks(module):
        return "it has hooks, which read or change its float tensors"
    if "forward" in vars(module):
        return "its forward was replaced on the object"
    if is_experts(module):
        return why_float_experts(module)
    base = _base(module)
    if nn.utils.parametrize.is_parametrized(module):
        return "a parametrization computes its weight at each call"
    if not _behaves_as(type(module), base) and not (
        isinstance(module, nn.Linear)
        and _behaves_as(type(module), base, but="forward")
        and computes_linear(module)
    ):
        return f"its class {type(module).__name__} has a computation of its own"
    if is_recurrent(module):
        if base not in RECURRENT:
            return f"there is no int8 form of {type(module).__name__}"
        if int(module.hidden_size) < LEAST_UNITS:  # type: ignore[arg-type]
            return f"with fewer than {LEAST_UNITS} units a step costs more than int8 saves"
        return None
    unknown = (set(module._parameters) | set(module._buffers)) - _STATE.get(base, _WEIGHT_AND_BIAS)
    if unknown:
        return f"it has more tensors than weight and bias: {', '.join(sorted(unknown))}"
    if isinstance(module, nn.MultiheadAttention):
        return DynamicMultiheadAttention.refusal(module) or why_float(module.out_proj)
    if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
        return "its max_norm rewrites the table as it is read"
    return None


#: Smaller recurrent layers are quicker in float, where all steps are one call.
LEAST_UNITS = 256

_BASES = (nn.Linear, nn.MultiheadAttention, nn.Embedding, nn.EmbeddingBag, *RECURRENT)


def _base(module: nn.Module) -> type[nn.Module]:
    """The class of torch's that ``module`` is of."""
    return next((kind for kind in _BASES if isinstance(module, kind)), type(module))


_WEIGHT_AND_BIAS = frozenset({"weight", "bias"})
_STATE: dict[type, frozenset[str]] = {
    nn.MultiheadAttention: frozenset(
        {"in_proj_weight", "in_proj_bias", "bias_k", "bias_v"}
        | {f"{name}_proj_weight" for name in "qkv"}
    )
}
#: What a subclass may define without changing what a call computes.
_HARMLESS = frozenset({"__init__", "reset_parameters", "extra_repr", "__constants__"})


def _behaves_as(kind: type, base: type, but: str = "") -> bool:
    """Whether ``kind`` computes as its base class ``base`` does, ``but`` for what is named so."""
    between = kind.__mro__[: kind.__mro__.index(base)]
    return not any(
        name not in _HARMLESS and name != but and (callable(value) or isinstance(value, property))
        for one in between
        for name, value in vars(one).items()
    )


def _leave_fast_path(module: nn.Module) -> None:
    """Keep torch's transformer layers from reading float weights that are no longer there."""
    if isinstance(module, nn.TransformerEncoderLayer):
        if any(isinstance(m, Int8Linear) for m in module.modules()):
            module.activation_relu_or_gelu = 0
    elif isinstance(module, nn.TransformerEncoder):
        module.use_nested_tensor = False
