"""Run in a process of its own: everything but the stock engine, without torch.ao.

``import torch`` itself imports torch.ao today, so it is taken away again, as a torch without it
would be: its modules are forgotten, an import of one raises, and so does every constructor of
quantized tensors.
"""

from __future__ import annotations

import importlib.abc
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

#: What makes quantized tensors of torch.
CONSTRUCTORS = (
    "quantize_per_tensor",
    "quantize_per_tensor_dynamic",
    "quantize_per_channel",
    "_empty_affine_quantized",
    "_empty_per_channel_affine_quantized",
    "_make_per_tensor_quantized_tensor",
    "_make_per_channel_quantized_tensor",
    "quantized_batch_norm",
)


class _NoTorchAo(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name == "torch.ao" or name.startswith("torch.ao."):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def take_away() -> None:
    """Let this process be one of a torch without torch.ao and quantized tensors."""
    for name in [name for name in sys.modules if f"{name}.".startswith("torch.ao.")]:
        del sys.modules[name]
    del torch.ao
    sys.meta_path.insert(0, _NoTorchAo())

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("a quantized tensor of torch was made")

    for name in CONSTRUCTORS:
        setattr(torch, name, refuse)
    for name in ("dequantize", "int_repr", "q_scale", "q_zero_point", "q_per_channel_scales"):
        setattr(torch.Tensor, name, refuse)


class Block(nn.Module):
    """Convolutions, a sum, a join and a function with a weight of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.second = nn.Conv2d(8, 8, 3, padding=1)
        self.up = nn.ConvTranspose2d(16, 4, 2, stride=2)
        self.weight = nn.Parameter(torch.randn(5, 4) / 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        x = torch.cat([torch.relu(x + self.second(x)), x], 1)
        x = torch.sigmoid(self.up(x)).mean((2, 3))
        return nn.functional.linear(x, self.weight)


class Tagger(nn.Module):
    """An LSTM with a linear behind."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(12, 256, batch_first=True)
        self.out = nn.Linear(256, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.out(self.lstm(x)[0])
        return result


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


#: What stays in float: attention itself.
_FLOAT = (
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "layers.0.self_attn",
    "layers.1.self_attn",
)

MODELS: dict[str, tuple[Any, tuple[int, ...], float]] = {
    "convolutions": (Block, (4, 3, 16, 16), 25),
    "transformer": (encoder, (2, 8, 16), 25),
    "lstm": (Tagger, (2, 6, 12), 25),
}


def check(name: str) -> None:
    """Quantize a model, save it, load it, and run all three."""
    import x86quant

    make, shape, least = MODELS[name]
    torch.manual_seed(0)
    model = make().eval()
    batches = [torch.randn(shape) for _ in range(3)]
    int8 = x86quant.quantize(model, batches, progress=False, speed_check=False)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        x86quant.save(int8, path, example_inputs=(batches[0],))
        loaded = x86quant.load(path)
    for form in (int8, loaded):
        found = sqnr(model, form, batches[0])
        assert found > least, f"{name}: {found:.1f} dB"
    x86quant.assert_int8(int8, (batches[0],), allow=_FLOAT)
    assert x86quant.explain(int8, (batches[0],)).layers
    print(f"{name}: {found:.1f} dB")


def sqnr(exact: nn.Module, actual: nn.Module, x: torch.Tensor) -> float:
    """Signal to noise of ``actual``, in dB."""
    with torch.no_grad():
        expected, got = exact(x), actual(x)
    noise = (expected - got).square().sum()
    return float(10 * torch.log10(expected.square().sum() / noise))


def main() -> None:
    take_away()
    for name in MODELS:
        check(name)
    assert not [name for name in sys.modules if name.startswith("torch.ao")]


if __name__ == "__main__":
    main()
