"""``to_dynamic``: a model with its linears replaced by int8 ones."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from x86quant.compiled import CompiledModule
from x86quant.dynamic.embedding_bag import RowwiseEmbedding, WeightOnlyEmbeddingBag, table_bits
from x86quant.dynamic.experts import is_experts, to_int8_experts, why_float_experts
from x86quant.dynamic.group_weights import check_bits, quantized
from x86quant.dynamic.layers import (
    DynamicLinear,
    Int8Linear,
    Int8Sequential,
    WeightOnlyEmbedding,
    WeightOnlyLinear,
    carry_attributes,
    is_conv1d,
)
from x86quant.dynamic.layers import has_hooks as has_hooks
from x86quant.dynamic.multihead_attention import DynamicMultiheadAttention
from x86quant.dynamic.recurrent import RECURRENT
from x86quant.dynamic.shared_codes import share_codes
from x86quant.dynamic.torchao_weights import is_torchao, refusal, stored_codes
from x86quant.dynamic.transformers_config import note_in_config
from x86quant.errors import InvalidInputError
from x86quant.lowering.builder import Builder
from x86quant.lowering.graph_tools import emit
from x86quant.module_copy import alike
from x86quant.ops.float_type import OTHER_FLOATS, Int8Module


def to_dynamic(
    model: nn.Module,
    *,
    weight_only: bool = False,
    embeddings: bool | int | Literal["tied"] = False,
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
            as ``WeightOnlyEmbedding``, by which tied linears multiply in int8. "tied": embeddings
            alone whose weight is that of a linear converted here, whose codes they look up.
        weight_bits: of the weights of linears, and of tables where ``embeddings`` is True: 8, or 4
            with a scale for each group of 32 input features. Attentions of torch's own class and
            recurrent layers have 8.
        weights: codes and scales of linears by name, in place of those made here.
        keep: ``keep(name, module)`` says which layers stay in float.
        inplace: change ``model`` itself, which saves a copy of its weights.
    """
    tied, tables = isinstance(embeddings, str), not isinstance(embeddings, str) and embeddings
    if tied and embeddings != "tied":
        raise InvalidInputError(f'embeddings is True, False, bits or "tied", not {embeddings!r}')
    if tables not in (False, True):
        table_bits(8, tables)
    check_bits(weight_bits)
    if not inplace:
        model = alike(model)
    kind = WeightOnlyLinear if weight_only else DynamicLinear
    done: dict[nn.Module, nn.Module] = {}
    heads = _converted_by_weight(model, keep) if tied else {}

    def replaced(name: str, module: nn.Module) -> nn.Module:
        """What takes the place of ``module``, a layer with weights in float32."""
        if why_float(module) or (keep is not None and keep(name, module)):
            return module
        if isinstance(module, nn.MultiheadAttention):
            return module if weight_only else DynamicMultiheadAttention.from_float(module)
        if is_linear(module):
            if takes_codes_of(module):
                return from_torchao(module, kind)
            operands = None if weights is None else weights.get(name)
            return kind.from_float(module, bits=weight_bits, operands=operands)
        if is_recurrent(module):
            return module if weight_only else RECURRENT[_base(module)].from_float(module)  # type: ignore[arg-type]
        if isinstance(module, nn.EmbeddingBag):
            bits = 8 if tables is True else tables
            return WeightOnlyEmbeddingBag.from_float(module, name, bits) if tables else module
        if isinstance(module, nn.Embedding):
            if tables is True:
                return WeightOnlyEmbedding.from_float(module, name, weight_bits)
            return RowwiseEmbedding.from_float(module, name, tables) if tables else module
        inside = {
            path.removeprefix(f"{name}."): operands
            for path, operands in (weights or {}).items()
            if path.startswith(f"{name}.")
        }
        to_int8_experts(module, kind, weight_bits, inside)
        return module

    def tied_table(name: str, table: nn.Embedding) -> nn.Module:
        """``table`` as a look-up of the codes of the linear that its weight is tied to."""
        if id(table.weight) not in heads or why_float(table):
            return table
        operands = (weights or {}).get(heads[id(table.weight)])
        found = WeightOnlyEmbedding(*(operands or quantized(table.weight, weight_bits)), name)
        carry_attributes(table, found)
        return found

    def convert(name: str, module: nn.Module) -> nn.Module:
        if module in done:
            return done[module]
        done[module] = module
        if tied and isinstance(module, nn.Embedding):
            with weights_in_float32(module) as own:
                done[module] = taking(own, tied_table(name, module))
        elif is_replaceable(module):
            with weights_in_float32(module) as own:
                done[module] = taking(own, replaced(name, module))
        else:
            # Not named_children(), which gives a shared child one of its names only.
            for child_name, child in module._modules.items():
                if child is not None:
                    path = f"{name}.{child_name}" if name else child_name
                    module._modules[child_name] = convert(path, child)
        return done[module]

    model = convert("", model)
    share_codes(model)
    adapt_containers(model)
    note_in_config(model)
    return model


def _converted_by_weight(
    model: nn.Module, keep: Callable[[str, nn.Module], bool] | None
) -> dict[int, str]:
    """The names of linears in ``model`` that are to be converted, by the identity of the weight."""
    return {
        id(module.weight): name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and not (keep is not None and keep(name, module))
        and why_float(module) is None
    }


def adapt_containers(model: nn.Module) -> None:
    """Let the containers in ``model`` deal with the int8 linears in them, in place."""
    for module in model.modules():
        _leave_fast_path(module)
        if type(module) is nn.Sequential and any(isinstance(m, Int8Linear) for m in module):
            module.__class__ = Int8Sequential


def is_replaceable(module: nn.Module) -> bool:
    """Whether ``module`` is of a kind that ``to_dynamic`` replaces."""
    tables = nn.Embedding | nn.EmbeddingBag
    whole = isinstance(module, nn.MultiheadAttention | tables) or is_recurrent(module)
    return whole or is_linear(module) or is_experts(module)


@contextlib.contextmanager
def weights_in_float32(module: nn.Module) -> Iterator[torch.dtype | None]:
    """``module`` with its weights in float32 for a while; yields the type they have, if another."""
    others = [
        (x, x.data) for x in module.parameters() if x.dtype in OTHER_FLOATS and not is_torchao(x)
    ]
    for parameter, value in others:
        parameter.data = value.float()
    try:
        yield others[0][1].dtype if others else None
    finally:
        for parameter, value in others:
            parameter.data = value


def taking(float_type: torch.dtype | None, module: nn.Module) -> nn.Module:
    """``module``, whose int8 layers take and return ``float_type``, if one is given."""
    if float_type is not None:
        if isinstance(module, Int8Module):
            return module.to(float_type)
        for child in module.children():
            taking(float_type, child)
    return module


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


# --- linears of torchao ---
#
# Some do more to an input than choose its range by rows. Their codes and scales become a linear of
# ours as any weight's do. What torchao does before the product stands in front of it, in a graph
# that runs natively: features are scaled (SmoothQuant, AWQ), and an input is quantized by a range
# that was chosen beforehand (static int8).

#: Codes of int8, and those of a range that is made half as wide where there is no VNNI.
_RANGES = {False: (-128, 127), True: (-64, 63)}
#: What a signed code lacks to the unsigned one of ours.
_TO_UNSIGNED = 128


@dataclass(frozen=True)
class _StaticRange:
    """By which an input is quantized: real = scale * (code - zero_point), from low to high."""

    scale: float
    zero_point: int
    low: int
    high: int


def from_torchao(linear: nn.Module, kind: type[Int8Linear]) -> nn.Module:
    """``linear``, whose weight is torchao's, as a ``kind``, or as a graph around its product.

    Raises:
        UnsupportedError: torchao treats the input in a way that has no form here.
    """
    weight = linear.get_parameter("weight")
    product = kind.from_float(linear, operands=stored_codes(weight))
    before = getattr(weight, "act_pre_scale", None)
    static = None if kind is WeightOnlyLinear else _static_range(weight)
    found: nn.Module = product
    if before is not None or static is not None:
        found = _graph(product, before, static)
        carry_attributes(linear, found)
    # Of float32 they are made; to say so again would convert scales of 16 bits.
    return found if weight.dtype is torch.float32 else found.to(weight.dtype)


def takes_codes_of(linear: nn.Module) -> bool:
    """Whether the weight of ``linear`` is torchao's."""
    weight = linear._parameters.get("weight")
    return weight is not None and is_torchao(weight)


def _static_range(weight: torch.Tensor) -> _StaticRange | None:
    scale = getattr(weight, "act_quant_scale", None)
    if scale is None:
        return None
    if scale.numel() != 1:
        raise refusal(
            weight,
            f"which quantizes inputs by {scale.numel()} scales that were chosen beforehand, one "
            "for each of so many rows (take granularity=PerTensor() for the inputs)",
        )
    zero_point = getattr(weight, "act_quant_zero_point", None)
    low, high = _RANGES[bool(getattr(weight, "reduce_range", False))]
    return _StaticRange(float(scale), 0 if zero_point is None else int(zero_point), low, high)


def _graph(
    product: Int8Linear, before: torch.Tensor | None, static: _StaticRange | None
) -> CompiledModule:
    builder = Builder()
    x: Node = builder.graph.placeholder("x")
    x.meta.update(shape=(1, product.in_features), input_dtype=torch.float32)
    operands = {
        "weight": builder.constant("weight", product.int8_weight),
        "weight_scale": builder.constant("weight_scale", product.weight_scale),
        "bias": None if product.bias is None else builder.constant("bias", product.bias),
    }
    if before is not None:
        factors = before.to(torch.float32).flatten()
        x = builder.call(torch.mul, x, builder.constant("factors", factors))
    if static is None:
        out = emit(builder.graph, product.op, x=x, **operands)
    else:
        if (static.low, static.high) != _RANGES[False]:
            ends = [(end - static.zero_point) * static.scale for end in (static.low, static.high)]
            x = builder.call(torch.clamp, x, *ends)
        scale, zero_point = static.scale, static.zero_point + _TO_UNSIGNED
        codes = emit(builder.graph, "quantize", x=x, out_scale=scale, out_zp=zero_point)
        out = emit(
            builder.graph, "linear_real", x=codes, x_scale=scale, x_zp=zero_point, **operands
        )
    builder.graph.output(out)
    return CompiledModule(GraphModule(builder.root, builder.graph))


aten = torch.ops.aten
# --- subclasses of nn.Linear that spell out its product: x @ self.weight.T + self.bias ---

#: Of nothing but these, a result is a sum of products of what they are given.
_AFFINE = frozenset(
    [
        aten.t.default, aten.transpose.int, aten.permute.default, aten.numpy_T.default,
        aten.detach.default, aten.view.default, aten._unsafe_view.default, aten.reshape.default,
        aten.linear.default, aten.matmul.default, aten.mm.default, aten.addmm.default,
        aten.add.Tensor,
    ]
)  # fmt: skip


def computes_linear(module: nn.Linear) -> bool:
    """Whether a call of ``module``, of a class with a ``forward`` of its own, is ``F.linear``.

    Its ops must be affine in what it is given, and its answer that of ``F.linear`` for numbers
    drawn at random, weights and all: other such ops would answer otherwise.
    """
    taken = inspect.signature(module.forward).parameters
    if len(taken) != 1 or module._modules or not isinstance(module.weight, torch.Tensor):
        return False
    draw = torch.Generator().manual_seed(0)
    drawn: dict[str, Any] = {
        name: torch.randn(x.shape, generator=draw, dtype=torch.float32)
        for name, x in module.named_parameters()
    }

    def answer(x: torch.Tensor) -> Any:
        return torch.func.functional_call(module, drawn, (x,))

    for shape in ((3,), (2, 3)):
        x = torch.randn(*shape, module.in_features, generator=draw, dtype=torch.float32)
        try:
            with torch.no_grad():
                graph = make_fx(answer)(x).graph
                found = answer(x)
        except Exception:  # whatever its own code raises
            return False
        calls = [node.target for node in graph.nodes if node.op == "call_function"]
        expected = F.linear(x, drawn["weight"], drawn.get("bias"))
        if not _AFFINE.issuperset(calls) or not isinstance(found, torch.Tensor):
            return False
        if found.shape != expected.shape or not torch.allclose(
            found, expected, rtol=1e-4, atol=1e-5 * module.in_features**0.5
        ):
            return False
    return True
