"""Models of transformers say in their configuration that they are int8.

``save_pretrained`` writes int8 layers as they are. By what config.json says of them,
``x86quant.huggingface`` makes the layers again; by marks in the file ``from_pretrained`` fails in a
process that has not imported it, where it would otherwise fill the layers with random numbers.
"""

from __future__ import annotations

import contextlib
import importlib
from typing import Any, Literal

from torch import nn

from x86quant.dynamic.layers import (
    HalfEmbedding,
    Int8Linear,
    Int8Sequential,
    WeightOnlyEmbedding,
    WeightOnlyLinear,
)
from x86quant.dynamic.reordered import ReorderedLinear
from x86quant.errors import UnsupportedError
from x86quant.weight_form import bits_of


def note_in_config(model: nn.Module, fuse_blocks: bool | Literal["auto"] = "auto") -> None:
    """Let the configurations of models of transformers in ``model`` tell of their int8 layers.

    ``fuse_blocks`` is whether they are to run as native graphs where they are loaded.
    """
    told: set[int] = set()
    for module in model.modules():
        layers = [m for m in module.modules() if _is_layer(m)] if _is_pretrained(module) else []
        if not layers:
            continue
        _let_transformers_save_and_load(module)
        config: Any = module.config
        if id(config) in told:  # of a model around this one, which has more layers
            continue
        told.add(id(config))
        config.quantization_config = {
            "quant_method": "x86quant",
            "bits": 4 if any(_has_four_bits(m) for m in layers) else 8,
            "scheme": _scheme(layers),
            "embeddings": any(isinstance(m, WeightOnlyEmbedding) for m in layers),
            "modules_to_not_convert": None,
            "fuse_blocks": fuse_blocks,
            "checkpoint": "x86quant",
        }


def _let_transformers_save_and_load(model: nn.Module) -> None:
    """Make the method known to transformers, and let files of ``model`` be marked as int8."""
    # By name: that package is built on this one. A transformers too old for it cannot load anyway.
    with contextlib.suppress(ImportError, UnsupportedError):
        importlib.import_module("x86quant.huggingface.load_quantizer").let_save(model)


_NO_LAYERS = (HalfEmbedding, Int8Sequential, ReorderedLinear)


def _is_layer(module: nn.Module) -> bool:
    """Whether ``module`` stands for one of a float layer, rather than for a sequence of them."""
    kind = type(module)
    return kind.__module__.startswith("x86quant.") and kind not in _NO_LAYERS


def _has_four_bits(layer: Any) -> bool:
    return isinstance(layer, Int8Linear | WeightOnlyEmbedding) and bits_of(layer.int8_weight) == 4


def _scheme(layers: list[nn.Module]) -> str:
    """Which kind of linear there is; "mixed" if there is more than one layer can be made for."""
    linears = {type(m) for m in layers if isinstance(m, Int8Linear)}
    known = all(isinstance(m, Int8Linear | WeightOnlyEmbedding) for m in layers)
    if not known or len(linears) > 1:
        return "mixed"
    return "weight_only" if linears == {WeightOnlyLinear} else "dynamic"


def _is_pretrained(module: nn.Module) -> bool:
    """Whether ``module`` is a ``transformers.PreTrainedModel``, which is not imported for this."""
    return any(
        (kind.__module__, kind.__name__) == ("transformers.modeling_utils", "PreTrainedModel")
        for kind in type(module).__mro__
    )
