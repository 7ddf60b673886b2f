"""An int8 model as a part of one that torch.compile compiles.

python examples/torch_compile.py
"""

from __future__ import annotations

import torch
from torch import nn

import x86quant


def main() -> None:
    """Turn the linears of a model into int8 and compile what is around them."""
    torch.manual_seed(0)
    layers = (nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.LayerNorm(64))
    model = nn.Sequential(*layers).eval()
    int8 = x86quant.to_dynamic(model)
    compiled = torch.compile(int8, backend="x86quant")
    x = torch.randn(8, 64)
    with torch.no_grad():
        assert torch.allclose(compiled(x), int8(x), atol=1e-5)
    print(x86quant.explain(int8))
    print(x86quant.compute_ops(compiled, (x,)))


if __name__ == "__main__":
    main()
