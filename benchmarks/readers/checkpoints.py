"""Quantized weights by others: settings with tensors, as in a folder of safetensors."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import nn

from benchmarks.readers.changes import anything, json_changes
from benchmarks.readers.reader import Depth, Reader
from tests.huggingface.test_compressed_codes import W8A8
from tests.huggingface.test_group_checkpoints import PACKED, awq, drawn, gptq, packed
from x86quant.errors import InvalidInputError, UnsupportedError
from x86quant.huggingface.checkpoint_formats import FORMATS
from x86quant.huggingface.load_settings import X86QuantConfig
from x86quant.huggingface.unloaded_layer import UnloadedLayer, loaded

_LENGTH = 8
_OUTPUTS, _FEATURES = 24, 64


def _joined(settings: Any, tensors: bytes) -> bytes:
    head = json.dumps(settings).encode()
    return len(head).to_bytes(_LENGTH, "little") + head + tensors


def _parts(data: bytes) -> tuple[bytes, bytes]:
    end = _LENGTH + int.from_bytes(data[:_LENGTH], "little")
    return data[_LENGTH:end], data[end:]


def _samples() -> list[bytes]:
    codes, zeros, scales = drawn(_OUTPUTS, _FEATURES, 32, 4, 1)
    eight = drawn(_OUTPUTS, _FEATURES, 32, 8, 1)
    order = (torch.arange(_FEATURES) % 2).int()
    integers = {
        "weight": torch.randint(-127, 128, (_OUTPUTS, _FEATURES), dtype=torch.int8),
        "weight_scale": torch.rand(_OUTPUTS, 1) + 0.01,
    }
    found: list[tuple[Any, dict[str, torch.Tensor]]] = [
        ({"quant_method": "gptq", "bits": 4}, gptq(codes, zeros, scales, 4)),
        (
            {"quant_method": "gptq", "bits": 4, "desc_act": True},
            {**gptq(codes, zeros, scales, 4), "g_idx": order},
        ),
        ({"quant_method": "gptq", "bits": 8, "checkpoint_format": "gptq_v2"}, gptq(*eight, 8, 0)),
        ({"quant_method": "auto-round", "bits": 4}, gptq(codes, zeros, scales, 4)),
        ({"quant_method": "awq", "bits": 4, "version": "gemm"}, awq(codes, zeros, scales)),
        (PACKED, packed(codes, zeros, scales)),
        (W8A8, integers),
    ]
    return [_joined(settings, save(tensors)) for settings, tensors in found]


def _change(rng: random.Random, data: bytes) -> bytes:
    """Other settings, another description of a tensor, or other numbers in one."""
    head, tensors = _parts(data)
    how = rng.randrange(10)
    if how == 0:
        return anything(rng, data)
    if how < 4:
        return _joined(json_changes(rng, json.loads(head)), tensors)
    end = _LENGTH + int.from_bytes(tensors[:_LENGTH], "little")
    described = json.loads(tensors[_LENGTH:end])
    content = bytearray(tensors[end:])
    if how < 7:
        described = json_changes(rng, described)
    else:
        for _ in range(rng.choice((1, 3, 30))):
            content[rng.randrange(len(content))] = rng.choice((0, 127, 128, 255, 124, 252))
    return _joined(json.loads(head), _joined(described, bytes(content)))


def checkpoint(folder: Path) -> Reader:
    """A linear of a checkpoint by compressed-tensors, GPTQ, AWQ or AutoRound."""
    path = folder / "model.safetensors"
    x = torch.randn(3, _FEATURES)

    def read(data: bytes) -> Depth:
        head, stored = _parts(data)
        try:
            settings = json.loads(head)
        except (ValueError, RecursionError):
            return Depth.FIRST
        if not isinstance(settings, dict):
            return Depth.FIRST  # transformers reads it before
        path.write_bytes(stored)
        try:
            tensors = load_file(path)
        except (SafetensorError, ValueError, OverflowError, TypeError, RuntimeError):
            return Depth.FIRST  # as transformers, which opens the same file
        try:
            kind = FORMATS[X86QuantConfig.from_others(settings).checkpoint]
            if not all(name in tensors for name in kind.needed):
                return Depth.REFUSED
            known = {name: tensors[name] for name in kind.names if name in tensors}
            with torch.device("meta"):
                linear = nn.Linear(_FEATURES, _OUTPUTS, bias=False)
            layer = UnloadedLayer(linear, 4, known, kind)
            for name, tensor in known.items():
                setattr(layer, name, loaded(tensor))
            layer.int8_form("layer", "weight_only")(x)
        except (InvalidInputError, UnsupportedError):
            return Depth.REFUSED
        return Depth.READ

    return Reader(_samples(), _change, read)
