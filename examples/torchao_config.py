"""Our int8 layers under torchao's own ``quantize_``, and a model that torchao made.

pip install 'x86quant[pt2e]'; python examples/torchao_config.py
"""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path

import torch
from torch import nn
from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

import x86quant


def main() -> None:
    """Quantize by torchao's call, then take over what torchao has quantized."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).eval()
    x = torch.randn(8, 64)
    with torch.no_grad():
        ours = copy.deepcopy(model)
        quantize_(ours, x86quant.torchao.Int8Config(), lambda module, name: name == "2")
        print(ours)

        theirs = copy.deepcopy(model)
        quantize_(theirs, Int8DynamicActivationInt8WeightConfig())
        taken = x86quant.to_dynamic(theirs)
        assert torch.equal(taken[0].int8_weight, theirs[0].weight.qdata)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "net.x86q")
            x86quant.save(taken, path, example_inputs=(x,))
            assert torch.allclose(x86quant.load(path)(x), taken(x), atol=1e-5)
        off = (taken(x) - model(x)).norm() / model(x).norm()
        print(f"torchao's codes on our kernels: {100 * float(off):.1f}% off the float model")


if __name__ == "__main__":
    main()
