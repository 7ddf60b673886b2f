"""Float layers that stay modules in a graph: how each is written down and built again.

A layer is its class, from a closed list, its constructor arguments, and its tensors. It is built
without memory of its own, then given the tensors, so sizes that do not fit them cost nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from x86quant.artifacts.file.stored_tensors import TensorReader, TensorWriter
from x86quant.artifacts.file.values import decode, encode, typed
from x86quant.dynamic import (
    DynamicGRU,
    DynamicGRUCell,
    DynamicLinear,
    DynamicLSTM,
    DynamicLSTMCell,
    DynamicMultiheadAttention,
    HalfEmbedding,
    Int8Linear,
    RowwiseEmbedding,
    WeightOnlyEmbedding,
    WeightOnlyEmbeddingBag,
    WeightOnlyLinear,
)
from x86quant.errors import ArtifactError
from x86quant.ops.dynamic import check_weight
from x86quant.weight_form import has_groups


@dataclasses.dataclass(frozen=True, slots=True)
class Kind:
    """How a class is built: constructor arguments that are attributes, and ones to work out.

    Loaded models are in eval mode, so dropout within a layer is left out.
    """

    attributes: tuple[str, ...] = ()
    computed: Mapping[str, Callable[[Any], Any]] = dataclasses.field(default_factory=dict)
    #: Arguments that make constructors loop: never more of them than the layer has tensors.
    counts: tuple[str, ...] = ()

    @property
    def arguments(self) -> frozenset[str]:
        """The names of all constructor arguments."""
        return frozenset((*self.attributes, *self.computed))


def _has_bias(module: Any) -> bool:
    return module.bias is not None


_BIAS: Mapping[str, Callable[[Any], Any]] = {"bias": _has_bias}
_CONV = Kind(
    (
        "in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups",
        "padding_mode",
    ),
    _BIAS,
)  # fmt: skip
_CONV_TRANSPOSED = Kind((*_CONV.attributes, "output_padding"), _BIAS)
_BATCH_NORM = Kind(("num_features", "eps", "momentum", "affine", "track_running_stats"))
_RECURRENT = Kind(
    (
        "input_size", "hidden_size", "num_layers", "bias", "batch_first", "bidirectional",
    ),
    counts=("num_layers",),
)  # fmt: skip
_CELL = Kind(("input_size", "hidden_size", "bias"))
_SHAPED_NORM: Mapping[str, Callable[[Any], Any]] = {
    "elementwise_affine": lambda module: module.weight is not None
}

KINDS: dict[type[nn.Module], Kind] = {
    nn.Identity: Kind(),
    nn.Linear: Kind(("in_features", "out_features"), _BIAS),
    nn.Bilinear: Kind(("in1_features", "in2_features", "out_features"), _BIAS),
    **dict.fromkeys((nn.Conv1d, nn.Conv2d, nn.Conv3d), _CONV),
    **dict.fromkeys((nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d), _CONV_TRANSPOSED),
    **dict.fromkeys(
        (
            nn.BatchNorm1d,
            nn.BatchNorm2d,
            nn.BatchNorm3d,
            nn.InstanceNorm1d,
            nn.InstanceNorm2d,
            nn.InstanceNorm3d,
        ),
        _BATCH_NORM,
    ),
    nn.LayerNorm: Kind(("normalized_shape", "eps"), {**_SHAPED_NORM, **_BIAS}),
    nn.RMSNorm: Kind(("normalized_shape", "eps"), _SHAPED_NORM),
    nn.GroupNorm: Kind(("num_groups", "num_channels", "eps", "affine")),
    nn.Embedding: Kind(("num_embeddings", "embedding_dim", "padding_idx", "max_norm", "norm_type")),
    nn.EmbeddingBag: Kind(
        (
            "num_embeddings", "embedding_dim", "max_norm", "norm_type", "mode",
            "include_last_offset", "padding_idx",
        )
    ),
    nn.LSTM: Kind((*_RECURRENT.attributes, "proj_size"), counts=_RECURRENT.counts),
    nn.GRU: _RECURRENT,
    nn.RNN: Kind((*_RECURRENT.attributes, "nonlinearity"), counts=_RECURRENT.counts),
    **dict.fromkeys((nn.LSTMCell, nn.GRUCell), _CELL),
    nn.RNNCell: Kind((*_CELL.attributes, "nonlinearity")),
    nn.MultiheadAttention: Kind(
        ("embed_dim", "num_heads", "batch_first", "kdim", "vdim", "add_zero_attn"),
        {
            "bias": lambda module: module.in_proj_bias is not None,
            "add_bias_kv": lambda module: module.bias_k is not None,
        },
    ),
    nn.PReLU: Kind(("num_parameters",)),
    **dict.fromkeys(
        (nn.ReLU, nn.ReLU6, nn.SiLU, nn.Mish, nn.Hardswish, nn.Hardsigmoid, nn.SELU),
        Kind(("inplace",)),
    ),
    **dict.fromkeys(
        (
            nn.Sigmoid,
            nn.Tanh,
            nn.LogSigmoid,
            nn.Softsign,
            nn.Tanhshrink,
            nn.Softmax2d,
        ),
        Kind(),
    ),
    **dict.fromkeys((nn.Softmax, nn.LogSoftmax, nn.Softmin, nn.GLU), Kind(("dim",))),
    nn.GELU: Kind(("approximate",)),
    **dict.fromkeys((nn.ELU, nn.CELU), Kind(("alpha", "inplace"))),
    nn.LeakyReLU: Kind(("negative_slope", "inplace")),
    nn.Hardtanh: Kind(("min_val", "max_val", "inplace")),
    nn.Softplus: Kind(("beta", "threshold")),
    **dict.fromkeys((nn.Hardshrink, nn.Softshrink), Kind(("lambd",))),
    nn.Threshold: Kind(("threshold", "value", "inplace")),
    **dict.fromkeys(
        (
            nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout,
            nn.FeatureAlphaDropout,
        ),
        Kind(("p",)),
    ),
    nn.RReLU: Kind(("lower", "upper", "inplace")),
    nn.Unflatten: Kind(("dim", "unflattened_size")),
    nn.Unfold: Kind(("kernel_size", "dilation", "padding", "stride")),
    nn.Fold: Kind(("output_size", "kernel_size", "dilation", "padding", "stride")),
    nn.CosineSimilarity: Kind(("dim", "eps")),
    nn.PairwiseDistance: Kind(("norm", "eps", "keepdim")),
    nn.Flatten: Kind(("start_dim", "end_dim")),
    nn.PixelShuffle: Kind(("upscale_factor",)),
    nn.PixelUnshuffle: Kind(("downscale_factor",)),
    nn.ChannelShuffle: Kind(("groups",)),
    nn.Upsample: Kind(("size", "scale_factor", "mode", "align_corners", "recompute_scale_factor")),
    **dict.fromkeys(
        (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d),
        Kind(("kernel_size", "stride", "padding", "dilation", "return_indices", "ceil_mode")),
    ),
    nn.AvgPool1d: Kind(("kernel_size", "stride", "padding", "ceil_mode", "count_include_pad")),
    **dict.fromkeys(
        (nn.AvgPool2d, nn.AvgPool3d),
        Kind(
            (
                "kernel_size", "stride", "padding", "ceil_mode", "count_include_pad",
                "divisor_override",
            )
        ),
    ),
    **dict.fromkeys(
        (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d), Kind(("output_size",))
    ),
    **dict.fromkeys(
        (nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d),
        Kind(("output_size", "return_indices")),
    ),
    **dict.fromkeys(
        (
            nn.ZeroPad1d, nn.ZeroPad2d, nn.ZeroPad3d, nn.CircularPad1d, nn.CircularPad2d,
            nn.CircularPad3d, nn.ReflectionPad1d, nn.ReflectionPad2d, nn.ReflectionPad3d,
            nn.ReplicationPad1d, nn.ReplicationPad2d, nn.ReplicationPad3d,
        ),
        Kind(("padding",)),
    ),
    **dict.fromkeys(
        (nn.ConstantPad1d, nn.ConstantPad2d, nn.ConstantPad3d), Kind(("padding", "value"))
    ),
    **dict.fromkeys(
        (nn.UpsamplingNearest2d, nn.UpsamplingBilinear2d), Kind(("size", "scale_factor"))
    ),
    **dict.fromkeys(
        (nn.LPPool1d, nn.LPPool2d), Kind(("norm_type", "kernel_size", "stride", "ceil_mode"))
    ),
    nn.LocalResponseNorm: Kind(("size", "alpha", "beta", "k")),
}  # fmt: skip

_State = dict[str, torch.Tensor]


def _int8_linear(cls: type[Int8Linear], values: dict[str, Any], state: _State) -> nn.Module:
    weight, scale, bias = _operands(cls.op, state)
    if type(values["transposed"]) is not bool:
        raise ArtifactError("transposed of a linear is no boolean")
    return cls(weight, scale, bias, values["activation"], values["transposed"])


def _int8_embedding(cls: Any, values: dict[str, Any], state: _State) -> nn.Module:
    weight, scale, _ = _operands("embedding", state)
    module: nn.Module = cls(weight, scale, _text(values["name"]))
    return module


def _half_embedding(cls: Any, values: dict[str, Any], state: _State) -> nn.Module:
    weight = state.get("weight")
    if weight is None or weight.dim() != 2 or weight.dtype not in (torch.float16, torch.bfloat16):
        raise ArtifactError("a table of 16 bits has no weight of 16 bits and two dimensions")
    module: nn.Module = cls(weight)
    return module


def _attention(cls: Any, values: dict[str, Any], state: _State) -> nn.Module:
    inner, outer = (
        DynamicLinear(*_operands("linear_dynamic", _within(state, f"{name}.")))
        for name in ("in_proj", "out_proj")
    )
    heads, size = values["num_heads"], inner.in_features
    if type(heads) is not int or heads < 1 or size % heads or inner.out_features != 3 * size:
        raise ArtifactError(f"an attention of size {size} cannot have {heads} heads")
    if type(values["batch_first"]) is not bool:
        raise ArtifactError("batch_first of an attention is no boolean")
    module: nn.Module = cls(inner, outer, heads, values["batch_first"])
    return module


def _within(state: _State, prefix: str) -> _State:
    return {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}


def _operands(op: str, state: _State) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Codes, scales and bias, which fit each other."""
    weight, scale, bias = state["int8_weight"], state["weight_scale"], state.get("bias")
    check_weight(op, weight, scale, bias)
    if not bool(torch.isfinite(scale).all()) or not (
        has_groups(scale) or bool((scale > 0).all())  # offsets and scales of groups have signs
    ):
        raise ArtifactError("its weight_scale holds what is not positive and finite")
    if unknown := state.keys() - {"int8_weight", "weight_scale", "bias"}:
        raise ArtifactError(f"it has the unknown tensor {min(unknown)[:80]!r}")
    return weight, scale, bias


def _bag(cls: Any, values: dict[str, Any], state: _State) -> nn.Module:
    if state.keys() != {"rows"}:
        raise ArtifactError("a table of bags has rows and nothing else")
    padding, last = values["padding_idx"], values["include_last_offset"]
    if type(last) is not bool or (padding is not None and type(padding) is not int):
        raise ArtifactError("the arguments of a table of bags are of wrong types")
    module: nn.Module = cls(
        state["rows"],
        values["mode"],
        padding_idx=padding,
        include_last_offset=last,
        name=_text(values["name"]),
        bits=typed(int, values["bits"], "the bits of a table"),
        half_scale=typed(bool, values["half_scale"], "half_scale of a table"),
        scale_first=typed(bool, values["scale_first"], "scale_first of a table"),
        embedding_dim=typed(int, values["embedding_dim"], "the size of a row"),
    )
    return module


def _rowwise(cls: Any, values: dict[str, Any], state: _State) -> nn.Module:
    if state.keys() != {"rows"}:
        raise ArtifactError("a table has rows and nothing else")
    bits = typed(int, values["bits"], "the bits of a table")
    module: nn.Module = cls(state["rows"], bits=bits, name=_text(values["name"]))
    return module


def _recurrent(cls: Any, values: dict[str, Any], state: _State) -> nn.Module:
    products = _products(state)
    layers = sum(name.startswith("ih_l") and not name.endswith("_reverse") for name in products)
    directions = ("", "_reverse") if "ih_l0_reverse" in products else ("",)
    kinds = ("ih", "hh", "hr") if "hr_l0" in products else ("ih", "hh")
    suffixes = [f"_l{i}{direction}" for i in range(layers) for direction in directions]
    if products.keys() != {f"{kind}{suffix}" for kind in kinds for suffix in suffixes}:
        raise ArtifactError(f"a recurrent layer cannot consist of {', '.join(products)[:200]}")
    if type(values["batch_first"]) is not bool:
        raise ArtifactError("batch_first of a recurrent layer is no boolean")
    found = cls(products, batch_first=values["batch_first"])
    for suffix in suffixes:
        width = found.proj_size or found.hidden_size
        inputs = width * len(directions) if not suffix.startswith("_l0") else found.input_size
        sizes = {
            "ih": (inputs, cls.gates * found.hidden_size),
            "hh": (width, cls.gates * found.hidden_size),
            "hr": (found.hidden_size, width),
        }
        _check_sizes({kind: products[kind + suffix] for kind in kinds}, sizes)
    return found  # type: ignore[no-any-return]


def _recurrent_cell(cls: Any, values: dict[str, Any], state: _State) -> nn.Module:
    products = _products(state)
    if products.keys() != {"ih", "hh"}:
        raise ArtifactError("a recurrent cell has two products")
    found = cls(products["ih"], products["hh"])
    gates = cls.gates * found.hidden_size
    _check_sizes(products, {"ih": (found.input_size, gates), "hh": (found.hidden_size, gates)})
    return found  # type: ignore[no-any-return]


def _products(state: _State) -> dict[str, DynamicLinear]:
    names = dict.fromkeys(key.partition(".")[0] for key in state)
    return {n: DynamicLinear(*_operands("linear_dynamic", _within(state, f"{n}."))) for n in names}


def _check_sizes(
    products: Mapping[str, DynamicLinear], sizes: Mapping[str, tuple[int, int]]
) -> None:
    for name, product in products.items():
        if (product.in_features, product.out_features) != sizes[name]:
            raise ArtifactError(
                f"the product {name} of a recurrent layer is {product.in_features} to "
                f"{product.out_features}, and must be {sizes[name][0]} to {sizes[name][1]}"
            )


def _text(value: object) -> str:
    return typed(str, value, "a name")


_LINEAR = Kind(("activation", "transposed"))
_BATCH_FIRST = Kind(("batch_first",))

#: The layers that ``to_dynamic`` makes: constructor arguments that are attributes, and the builder.
_INT8: dict[type[nn.Module], tuple[Kind, Callable[..., nn.Module]]] = {
    DynamicLinear: (_LINEAR, _int8_linear),
    WeightOnlyLinear: (_LINEAR, _int8_linear),
    WeightOnlyEmbedding: (Kind(("name",)), _int8_embedding),
    HalfEmbedding: (Kind(), _half_embedding),
    RowwiseEmbedding: (Kind(("bits", "name")), _rowwise),
    WeightOnlyEmbeddingBag: (
        Kind(
            (
                "mode",
                "padding_idx",
                "include_last_offset",
                "name",
                "bits",
                "half_scale",
                "scale_first",
                "embedding_dim",
            )
        ),
        _bag,
    ),
    DynamicMultiheadAttention: (Kind(("num_heads", "batch_first")), _attention),
    DynamicLSTM: (_BATCH_FIRST, _recurrent),
    DynamicGRU: (_BATCH_FIRST, _recurrent),
    DynamicLSTMCell: (Kind(), _recurrent_cell),
    DynamicGRUCell: (Kind(), _recurrent_cell),
}

_BY_NAME: dict[str, type[nn.Module]] = {kind.__qualname__: kind for kind in (*KINDS, *_INT8)}

#: What constructors raise for arguments that make no sense.
_NONSENSE = (
    TypeError, ValueError, RuntimeError, AssertionError, ArithmeticError, KeyError,
    AttributeError, IndexError,
)  # fmt: skip

#: Hooks that would be lost, by the attribute that holds them.
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")


def hooks_within(module: nn.Module) -> bool:
    """Whether ``module``, or anything in it, has hooks, which no file can hold."""
    return any(getattr(child, hooks) for child in module.modules() for hooks in _HOOKS)


def is_int8(module: nn.Module) -> bool:
    """Whether ``to_dynamic`` put ``module`` where a float layer was, or took one away."""
    return type(module) in _INT8 or type(module) is nn.Identity


def is_known(module: object) -> bool:
    """Whether ``module`` can be written down as a layer."""
    return type(module) in KINDS or type(module) in _INT8


def write_layer(layer: nn.Module, path: str, tensors: TensorWriter) -> dict[str, Any]:
    """``layer`` as JSON; its tensors go to ``tensors`` under names that begin with ``path``."""
    layer = _plain(layer)
    name, arguments = describe(layer)
    prefix = f"{path}." if path else ""
    state = {key: tensors.add(f"{prefix}{key}", t) for key, t in layer.state_dict().items()}
    return {"class": name, "arguments": arguments, "tensors": state}


def _plain(layer: nn.Module) -> nn.Module:
    """``layer`` itself, or with the weights that its parametrizations compute.

    In evaluation mode these are always the same.
    """
    if not parametrize.is_parametrized(layer):
        return layer
    base = type(layer).__mro__[1]
    computed = {name: getattr(layer, name).detach() for name in layer.parametrizations}  # type: ignore[union-attr]
    plain: nn.Module = object.__new__(base)
    plain.__dict__.update(layer.__dict__)
    plain.__dict__.update(_modules={}, _parameters={**computed, **layer._parameters})
    return plain


def read_layer(content: Mapping[str, Any], tensors: TensorReader) -> nn.Module:
    """The layer that ``write_layer`` wrote."""
    names = typed(dict, content["tensors"], "tensors of a layer")
    state = {key: tensors.take(name) for key, name in names.items()}
    arguments = typed(dict, content["arguments"], "arguments of a layer")
    return build(typed(str, content["class"], "class"), arguments, state)


def describe(module: nn.Module) -> tuple[str, dict[str, Any]]:
    """The class name and constructor arguments of ``module``."""
    kind = _INT8[type(module)][0] if type(module) in _INT8 else KINDS.get(type(module))
    if kind is None:
        known = type(module).__name__
        raise ArtifactError(f"a layer of class {known} has no form in an artifact")
    if hooks_within(module):
        raise ArtifactError("its hooks have no form in an artifact: remove them first")
    arguments = {name: getattr(module, name) for name in kind.attributes}
    arguments.update({name: compute(module) for name, compute in kind.computed.items()})
    return type(module).__qualname__, {name: encode(v, {}) for name, v in arguments.items()}


def build(name: str, arguments: Mapping[str, Any], state: dict[str, torch.Tensor]) -> nn.Module:
    """The layer of class ``name`` with ``arguments`` and the tensors ``state``."""
    cls = _BY_NAME.get(name)
    if cls is None:
        raise ArtifactError(f"the layer class {name[:80]!r} is not one an artifact may hold")
    kind = _INT8[cls][0] if cls in _INT8 else KINDS[cls]
    if arguments.keys() != kind.arguments:
        raise ArtifactError(f"a {name} is built from {sorted(kind.arguments)}")
    values = {key: decode(value, ()) for key, value in arguments.items()}
    for key in kind.counts:
        if type(values[key]) is not int or not 0 < values[key] <= len(state):
            raise ArtifactError(f"a {name} with {len(state)} tensors has {key} {values[key]}")
    try:
        if cls in _INT8:
            return _INT8[cls][1](cls, values, state).requires_grad_(False).eval()
        with torch.device("meta"):
            module = cls(**values)
        module.load_state_dict(state, assign=True)
    except ArtifactError:
        raise
    except _NONSENSE as error:
        raise ArtifactError(f"a {name} cannot be built as described: {error}") from error
    return module.requires_grad_(False).eval()
