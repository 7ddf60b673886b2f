"""The stock FX workflow, unchanged, with x86quant choosing the kernels; then compiled.

python examples/fx_static.py
"""

from __future__ import annotations

import torch
from torch import nn
from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx

import x86quant


def main() -> None:
    """Quantize a small network and show which kernel runs each layer."""
    torch.manual_seed(0)
    body = (nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.ReLU())
    model = nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)).eval()
    batches = [torch.randn(8, 3, 32, 32) for _ in range(4)]
    example = (batches[0],)

    with x86quant.enable():
        torch.backends.quantized.engine = "x86"
        prepared = prepare_fx(model, x86quant.get_default_qconfig_mapping(), example)
        for batch in batches:
            prepared(batch)
        quantized = convert_fx(prepared)
        print(x86quant.explain(quantized))  # still a stock model

        fast = x86quant.compile(quantized, example)  # one native graph
        print(x86quant.explain(fast))
        error = (fast(batches[0]) - model(batches[0])).abs().max()
        print(f"largest difference from the float model: {float(error):.4f}")


if __name__ == "__main__":
    main()
