"""Models that torchao quantized, run by torchao and taken over by ``to_dynamic``.

python -m benchmarks.torchao_models                       # all models, schemes and ways to run
python -m benchmarks.torchao_models --models mlp --schemes dynamic --without-inductor

Each is torchao's own model: in eager mode, by ``torch.compile`` with Inductor, and ours with the
same codes and scales, which quantizes inputs by rows whatever the scheme is, but for static ranges.
Beside them stock ``quantize_dynamic`` and the float model. All take turns.
"""

from __future__ import annotations

import argparse
import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import x86quant
from benchmarks.environment import print_environment
from benchmarks.side_by_side import bound, compare
from x86quant.torchvision_import import import_torchvision

import_torchvision()

Model = tuple[nn.Module, torch.Tensor]


def mlp(rows: int) -> Model:
    layers = (nn.Linear(768, 3072), nn.GELU(), nn.Linear(3072, 768))
    return nn.Sequential(*layers), torch.randn(rows, 768)


class _Encoder(nn.Module):
    """A BERT of transformers with random weights, as a function of embeddings."""

    def __init__(self, size: int, layers: int) -> None:
        super().__init__()
        from transformers import BertConfig, BertModel

        config = BertConfig(
            vocab_size=100,
            hidden_size=size,
            num_hidden_layers=layers,
            num_attention_heads=size // 64,
            intermediate_size=4 * size,
        )
        self.bert = BertModel(config, add_pooling_layer=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.bert(inputs_embeds=x).last_hidden_state
        return found


def encoder(tokens: int) -> Model:
    return _Encoder(768, 2), torch.randn(1, tokens, 768)


MODELS: dict[str, Callable[[], Model]] = {
    "mlp, 1 row": lambda: mlp(1),
    "mlp, 32 rows": lambda: mlp(32),
    "mlp, 256 rows": lambda: mlp(256),
    "bert, 16 tokens": lambda: encoder(16),
    "bert, 128 tokens": lambda: encoder(128),
}


def schemes() -> dict[str, tuple[Any, dict[str, Any]]]:
    """torchao's configuration of each, and the arguments of ``to_dynamic``."""
    from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig
    from torchao.quantization import (
        Int8DynamicActivationInt8WeightConfig,
        Int8StaticActivationInt8WeightConfig,
        Int8WeightOnlyConfig,
    )
    from torchao.quantization.granularity import PerRow, PerTensor

    static = Int8StaticActivationInt8WeightConfig(
        act_quant_scale=torch.tensor([[0.04]]), granularity=[PerTensor(), PerRow()]
    )
    return {
        "dynamic": (Int8DynamicActivationInt8WeightConfig(), {}),
        "static": (static, {}),
        "weight-only": (Int8WeightOnlyConfig(), {}),
        "int4": (PrototypeInt4WeightOnlyConfig(group_size=32), {}),
    }


def run(name: str, scheme: str, inductor: bool, rounds: int) -> None:
    from torchao.quantization import quantize_

    torch.manual_seed(0)
    model, x = MODELS[name]()
    model = model.eval().requires_grad_(False)
    config, options = schemes()[scheme]
    if scheme == "static" and x.dim() == 3:  # torchao wants a scale of the input's rank
        config.act_quant_scale = config.act_quant_scale[None]
    theirs = copy.deepcopy(model)
    quantize_(theirs, config)
    ways: dict[str, Any] = {"x86quant": x86quant.to_dynamic(theirs, **options)}
    ways["torchao, eager"] = theirs
    if inductor:
        torch._dynamo.reset()
        ways["torchao, Inductor"] = torch.compile(theirs)
    if scheme == "dynamic":
        ways["stock quantize_dynamic"] = torch.ao.quantization.quantize_dynamic(model, {nn.Linear})
    compare(
        f"{name}, {scheme}",
        {k: bound(v) for k, v in {**ways, "float": model}.items()},
        (x,),
        rounds,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--models", nargs="*", default=[*MODELS], help="starts of their names")
    parser.add_argument(
        "--schemes", nargs="*", default=["dynamic", "static", "weight-only", "int4"]
    )
    parser.add_argument("--without-inductor", action="store_true")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    warnings.simplefilter("ignore")
    print_environment()
    with torch.no_grad():
        for name in MODELS:
            if name.startswith(tuple(given.models)):
                for scheme in given.schemes:
                    run(name, scheme, not given.without_inductor, given.rounds)


if __name__ == "__main__":
    main()
