"""Check whole torchvision networks layer by layer: what runs natively, and what it stands for.

    python -m benchmarks.check_networks --models resnet18 mobilenet_v2 --size 224

Weights are random, batch norms take their statistics from a few batches of noise, so the figures
compare int8 executions of one network; they say nothing about accuracy on real images. Prints,
for each network: nodes left in float and why, ops by kind, SQNR against fp32 of the stock engine
and of the compiled model; how every op as it runs natively compares with the plain torch op on the
same inputs; and how every op compares with the stock engine's layers that it replaces. Those round
to 8 bits in between where the fused op does not, so a few may be a step further off.
Ends with status 1 if a native op is more than one step from the plain one.
"""

from __future__ import annotations

import argparse
import collections
import copy
import sys
import time
import warnings

import torch
from torch.ao.quantization import get_default_qconfig_mapping
from torch.ao.quantization.quantize_fx import (
    convert_fx,
    convert_to_reference_fx,
    prepare_fx,
)

from benchmarks.networks import NETWORKS, torchvision_model
from tests.op_checks import check_ops
from x86quant.compiled import CompiledModule
from x86quant.lowering import lower, verify
from x86quant.lowering.graph_tools import is_op, op_name


def sqnr(expected: torch.Tensor, actual: torch.Tensor) -> float:
    noise = (expected - actual).square().sum()
    return float(10 * torch.log10(expected.square().sum() / noise))


def check(name: str, size: int, images: int, reference: bool) -> int:
    """Check one network; returns how many native ops are off by more than a step."""
    model = torchvision_model(name, size)
    calibration, x = torch.randn(4, 3, size, size), torch.randn(images, 3, size, size)
    torch.backends.quantized.engine = "onednn"
    prepared = prepare_fx(copy.deepcopy(model), get_default_qconfig_mapping("x86"), (x,))
    with torch.no_grad():
        prepared(calibration)
        stock = (convert_to_reference_fx if reference else convert_fx)(prepared)
        start = time.perf_counter()
        lowering = lower(stock, (x[:1],))
        seconds = time.perf_counter() - start
        fp32 = model(x)
        figures = {
            "stock": sqnr(fp32, stock(x)),
            "canonical": sqnr(fp32, lowering.canonical(x)),
            "compiled": sqnr(fp32, CompiledModule(lowering.graph_module)(x)),
        }
        native = check_ops(lowering.graph_module, (x[:1],))
        checks = verify(lowering.graph_module, stock, (x[:1],))
    kinds = collections.Counter(op_name(n) for n in lowering.graph_module.graph.nodes if is_op(n))
    wrong = [check for check in native if check.steps > 1]
    beyond = [layer for layer in checks if layer.beyond > 0]
    print(f"{name}: lowered in {seconds:.2f} s; {len(lowering.float_nodes)} float nodes")
    print("  ops:", ", ".join(f"{count} {kind}" for kind, count in kinds.most_common()))
    print("  SQNR against fp32, dB:", ", ".join(f"{k} {v:.1f}" for k, v in figures.items()))
    saturated = max((layer.saturated for layer in checks), default=0.0)
    print(
        f"  native against plain: {len(native)} ops, {len(wrong)} beyond one step, "
        f"{sum(check.different == 0 for check in native)} equal in every code"
    )
    print(f"  against stock layers: {len(checks)} ops, {len(beyond)} beyond one step")
    print(f"  left out because the stock engine clips: at most {saturated:.2%} of a layer")
    for line in (*lowering.float_nodes, *wrong, *beyond):
        print("  ", line)
    return len(wrong)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--models", nargs="+", default=NETWORKS, metavar="NAME")
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--images", type=int, default=2)
    parser.add_argument("--reference", action="store_true", help="lower the reference form")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", message=".*torch.ao.quantization is deprecated.*")
    warnings.filterwarnings("ignore", message=".*quantize_per.*")
    return int(
        sum(check(name, options.size, options.images, options.reference) for name in options.models)
        > 0
    )


if __name__ == "__main__":
    sys.exit(main())
