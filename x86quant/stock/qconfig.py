"""Default qconfig mappings and the backend config, for the stock FX workflow.

They go where the stock ones go, and work on every engine::

    mapping = x86quant.get_default_qconfig_mapping()
    prepared = prepare_fx(model, mapping, example_inputs)

One mapping serves every ISA level. Stock mappings keep results exact by shrinking activations to
7 bits (``reduce_range``, about 6 dB lost), because some kernels multiply into 16 bits and saturate.
x86quant keeps them exact by routing: a kernel that could saturate with a layer's weights is not
eligible for that layer. So neither the CPU nor ``torch.backends.quantized.engine`` is asked here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch

# get_native_backend_config() needs this submodule and does not import it.
import torch.ao.quantization.backend_config.utils
from torch import nn
from torch.ao.quantization import (
    FixedQParamsObserver,
    FusedMovingAvgObsFakeQuantize,
    MinMaxObserver,
    MovingAverageMinMaxObserver,
    MovingAveragePerChannelMinMaxObserver,
    PerChannelMinMaxObserver,
    QConfig,
    QConfigMapping,
    default_dynamic_qconfig,
    default_embedding_qat_qconfig,
    float_qparams_weight_only_qconfig,
)
from torch.ao.quantization import get_default_qat_qconfig_mapping as _stock_qat_mapping
from torch.ao.quantization import get_default_qconfig_mapping as _stock_mapping
from torch.ao.quantization.backend_config import BackendConfig, get_native_backend_config
from torch.ao.quantization.observer import default_placeholder_observer

from x86quant.errors import InvalidInputError
from x86quant.observing.observer import named
from x86quant.stock.observers import (
    OBSERVERS,
    WEIGHT_OBSERVERS,
    FixedRangeObserver,
    ObserverName,
    WeightObserverName,
)

# What `Observer.with_args` makes: called without arguments, it builds an observer.
_Factory: TypeAlias = Callable[[], nn.Module]

_CONV_TRANSPOSE = (
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
    nn.functional.conv_transpose1d,
    nn.functional.conv_transpose2d,
    nn.functional.conv_transpose3d,
)
_LAYER_NORM = (nn.LayerNorm, nn.functional.layer_norm)
_EMBEDDING = (nn.Embedding, nn.EmbeddingBag)
_RECURRENT = (nn.LSTM, nn.GRU, nn.LSTMCell, nn.GRUCell, nn.RNNCell)

# Symmetric about zero: the largest weight is represented exactly instead of being clipped, and
# no kernel meets -128. The zero point is 0, the only one that oneDNN computes with.
_WEIGHT_RANGE = {"dtype": torch.qint8, "quant_min": -127, "quant_max": 127}
_PER_CHANNEL = {**_WEIGHT_RANGE, "qscheme": torch.per_channel_symmetric}
_PER_TENSOR = {**_WEIGHT_RANGE, "qscheme": torch.per_tensor_symmetric}


def get_default_qconfig_mapping(
    *,
    activation_bits: int = 8,
    observer: ObserverName = "histogram",
    weight_observer: WeightObserverName = "minmax",
) -> QConfigMapping:
    """The mapping for post-training static quantization (``prepare_fx``).

    =====================================  ==================  ===========================
    ops                                    activations         weights
    =====================================  ==================  ===========================
    conv, linear, other ops                uint8, observed     int8 -127..127, per channel
    transposed conv                        uint8, observed     int8 -127..127, per tensor
    sigmoid, tanh, hardsigmoid, softmax    uint8, fixed scale  none
    embedding, embedding bag               float               uint8, per row
    LSTM, GRU and their cells              uint8, dynamic      int8 -127..127, per channel
    PReLU                                  float               float
    =====================================  ==================  ===========================

    Transposed convolutions have per-tensor weights because stock PyTorch has no per-channel ones:
    its modules refuse to convert them and its prepacks refuse to pack them, on every engine. Run
    them with routing on: both stock engines compute some of their shapes wrongly.

    Args:
        activation_bits: 8, or 7 to choose scales that use the codes 0..127. Ops with fixed scales
            keep 8. Stock quantize and requantize still clamp at 255, so a value beyond the
            calibrated range gets a code above 127: 7 bits make saturation rarer, not impossible.
        observer: how activation ranges are chosen: "minmax", "histogram" (stock), "percentile",
            "mse" or "kl" (``x86quant.stock.observers``).
        weight_observer: "minmax", or "mse" to clip weights where that lowers their error.
    """
    activation = named(OBSERVERS, "observer", observer).with_args(
        **_activation_range(activation_bits)
    )
    weight = named(WEIGHT_OBSERVERS, "weight_observer", weight_observer)
    mapping = _stock_mapping("x86")
    _set_ops(
        mapping,
        activation=activation,
        per_channel=weight.with_args(**_PER_CHANNEL),
        per_tensor=MinMaxObserver.with_args(**_PER_TENSOR),
    )
    _set_fixed(mapping, activation)
    # Stock PyTorch has no static recurrent modules without a custom-module config.
    _set_types(mapping, _RECURRENT, _dynamic_qconfig())
    return _set_types(mapping, _EMBEDDING, float_qparams_weight_only_qconfig)


def get_default_qat_qconfig_mapping(*, activation_bits: int = 8) -> QConfigMapping:
    """The mapping for quantization-aware training (``prepare_qat_fx``).

    As :func:`get_default_qconfig_mapping`, with fake quantization, and recurrent layers left float.
    Activation ranges are moving averages over batches. Weight ranges are those of the current
    weights: an average would lag behind training and clip weights that still grow. Stock PyTorch
    cannot prepare a transposed convolution followed by batch norm for training.

    Args:
        activation_bits: as in :func:`get_default_qconfig_mapping`.
    """
    fake_quantize: Callable[..., _Factory] = FusedMovingAvgObsFakeQuantize.with_args
    mapping = _stock_qat_mapping("x86")
    _set_ops(
        mapping,
        activation=fake_quantize(
            observer=MovingAverageMinMaxObserver, **_activation_range(activation_bits)
        ),
        per_channel=fake_quantize(
            observer=MovingAveragePerChannelMinMaxObserver, averaging_constant=1.0, **_PER_CHANNEL
        ),
        per_tensor=fake_quantize(
            observer=MovingAverageMinMaxObserver, averaging_constant=1.0, **_PER_TENSOR
        ),
    )
    return _set_types(mapping, _EMBEDDING, default_embedding_qat_qconfig)


def get_default_dynamic_qconfig_mapping() -> QConfigMapping:
    """The mapping for dynamic quantization: linear, LSTM, GRU and their cells, embeddings.

    Weights are int8 -127..127 per channel, embeddings uint8 per row, activations uint8 with a
    scale chosen at each call. There is no ``activation_bits``: which range a dynamic op uses is
    fixed by stock modules when they run, not by the mapping. Convolutions stay float, since the
    stock FX workflow has no dynamic ones.
    """
    mapping = QConfigMapping().set_global(_dynamic_qconfig())
    # Even where they stay float, stock code refuses per-channel weights for them.
    _set_types(mapping, _CONV_TRANSPOSE, None)
    return _set_types(mapping, _EMBEDDING, float_qparams_weight_only_qconfig)


def get_backend_config() -> BackendConfig:
    """The backend config: stock PyTorch's native one, the default of ``prepare_fx``.

    Not the stock onednn one. It fuses conv + add (+ ReLU), linear + leaky ReLU and linear + tanh
    into ops that only take weights packed by oneDNN: with weights packed by FBGEMM
    ``conv2d_add_relu`` crashes the process, and the others refuse to run under the "x86" engine.
    Not the stock x86 one either: it is the native one without quantized layer norm.
    """
    return get_native_backend_config()


def _activation_range(bits: int) -> dict[str, object]:
    """Observer arguments for unsigned activations of ``bits`` bits."""
    if bits not in (7, 8):
        raise InvalidInputError(f"activation_bits must be 7 or 8, not {bits!r}")
    return {"dtype": torch.quint8, "quant_min": 0, "quant_max": 2**bits - 1}


def _dynamic_qconfig() -> QConfig:
    weight = PerChannelMinMaxObserver.with_args(**_PER_CHANNEL)
    return _qconfig(activation=default_dynamic_qconfig.activation, weight=weight)


def _qconfig(*, activation: _Factory, weight: _Factory) -> QConfig:
    return QConfig(activation, weight)  # type: ignore[no-untyped-call]


def _set_ops(
    mapping: QConfigMapping, *, activation: _Factory, per_channel: _Factory, per_tensor: _Factory
) -> None:
    """Replace whatever depends on a range or an engine; reshape and fixed-scale ops stay stock."""
    mapping.set_global(_qconfig(activation=activation, weight=per_channel))
    _set_types(mapping, _CONV_TRANSPOSE, _qconfig(activation=activation, weight=per_tensor))
    # The quantized layer norm takes float weights.
    placeholder = default_placeholder_observer
    _set_types(mapping, _LAYER_NORM, _qconfig(activation=activation, weight=placeholder))
    # Stays float: quantized::prelu multiplies positive inputs by the weight too (torch 2.13).
    _set_types(mapping, (nn.PReLU,), None)


def _set_fixed(mapping: QConfigMapping, activation: _Factory) -> None:
    """Give ops of a fixed range an observer that sees where the range is not theirs."""
    for kind, qconfig in list(mapping.object_type_qconfigs.items()):
        if qconfig is None:
            continue
        fixed = qconfig.activation()
        if isinstance(fixed, FixedQParamsObserver):
            observer = FixedRangeObserver.with_args(
                scale=float(fixed.scale),
                zero_point=int(fixed.zero_point),
                observer=activation,
                quant_min=fixed.quant_min,
                quant_max=fixed.quant_max,
            )
            mapping.set_object_type(kind, _qconfig(activation=observer, weight=qconfig.weight))


def _set_types(
    mapping: QConfigMapping, types: tuple[Callable[..., object], ...], qconfig: QConfig | None
) -> QConfigMapping:
    for kind in types:
        mapping.set_object_type(kind, qconfig)
    return mapping
