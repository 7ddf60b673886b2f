"""The function that each class of torch's modules calls, and the arguments that it has for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn


def _attributes(function: object, *names: str) -> Callable[[Any], tuple[object, dict[str, Any]]]:
    return lambda module: (function, {name: getattr(module, name) for name in names})


def _batch_norm_module(module: Any) -> tuple[object, dict[str, Any]]:
    names = ("running_mean", "running_var", "weight", "bias", "eps")
    return F.batch_norm, {
        **{name: getattr(module, name) for name in names},
        "training": module.training or module.running_mean is None,
    }


def _pad_module(mode: str) -> Callable[[Any], tuple[object, dict[str, Any]]]:
    return lambda module: (F.pad, {"pad": module.padding, "mode": mode})


def _unflatten_module(module: Any) -> tuple[object, dict[str, Any]]:
    return torch.unflatten, {"dim": module.dim, "sizes": tuple(module.unflattened_size)}


_POOL = ("kernel_size", "stride", "padding", "ceil_mode")

#: How a module is spelled as a function: (function, keyword arguments); tensors become constants.
MODULES: dict[type[nn.Module], Callable[[Any], tuple[object, dict[str, Any]]]] = {
    nn.Identity: _attributes(torch.ops.aten.alias.default),
    nn.ReLU: _attributes(F.relu),
    nn.ReLU6: _attributes(F.relu6),
    nn.Hardtanh: _attributes(F.hardtanh, "min_val", "max_val"),
    nn.Hardswish: _attributes(F.hardswish),
    nn.Hardsigmoid: _attributes(F.hardsigmoid),
    nn.Sigmoid: _attributes(torch.sigmoid),
    nn.SiLU: _attributes(F.silu),
    nn.Mish: _attributes(F.mish),
    nn.GELU: _attributes(F.gelu, "approximate"),
    nn.Tanh: _attributes(torch.tanh),
    nn.ELU: _attributes(F.elu, "alpha"),
    nn.CELU: _attributes(F.celu, "alpha"),
    nn.SELU: _attributes(F.selu),
    nn.LeakyReLU: _attributes(F.leaky_relu, "negative_slope"),
    nn.LogSigmoid: _attributes(F.logsigmoid),
    nn.Softplus: _attributes(F.softplus, "beta", "threshold"),
    nn.Hardshrink: _attributes(F.hardshrink, "lambd"),
    nn.PReLU: _attributes(F.prelu, "weight"),
    nn.Flatten: _attributes(torch.flatten, "start_dim", "end_dim"),
    nn.Unflatten: _unflatten_module,
    nn.PixelShuffle: _attributes(F.pixel_shuffle, "upscale_factor"),
    nn.PixelUnshuffle: _attributes(F.pixel_unshuffle, "downscale_factor"),
    nn.GroupNorm: _attributes(F.group_norm, "num_groups", "weight", "bias", "eps"),
    nn.LayerNorm: _attributes(F.layer_norm, "normalized_shape", "weight", "bias", "eps"),
    nn.AvgPool1d: _attributes(F.avg_pool1d, *_POOL, "count_include_pad"),
    nn.AvgPool2d: _attributes(F.avg_pool2d, *_POOL, "count_include_pad", "divisor_override"),
    nn.AvgPool3d: _attributes(F.avg_pool3d, *_POOL, "count_include_pad", "divisor_override"),
    nn.Upsample: _attributes(
        F.interpolate, "size", "scale_factor", "mode", "align_corners", "recompute_scale_factor"
    ),
    nn.AlphaDropout: _attributes(F.alpha_dropout, "p", "training"),
    nn.Dropout: _attributes(F.dropout, "p", "training"),
    **dict.fromkeys((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d), _batch_norm_module),
}
for _dims in (1, 2, 3):
    MODULES[getattr(nn, f"Dropout{_dims}d")] = _attributes(
        getattr(F, f"dropout{_dims}d"), "p", "training"
    )
    MODULES[getattr(nn, f"MaxPool{_dims}d")] = _attributes(
        getattr(F, f"max_pool{_dims}d"), *_POOL, "dilation", "return_indices"
    )
    MODULES[getattr(nn, f"ZeroPad{_dims}d")] = _pad_module("constant")
    MODULES[getattr(nn, f"ReflectionPad{_dims}d")] = _pad_module("reflect")
    MODULES[getattr(nn, f"ReplicationPad{_dims}d")] = _pad_module("replicate")
    MODULES[getattr(nn, f"AdaptiveAvgPool{_dims}d")] = _attributes(
        getattr(F, f"adaptive_avg_pool{_dims}d"), "output_size"
    )
