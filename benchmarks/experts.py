"""A mixture of experts against float: time of a token and of prompts, memory, and how near it is.

    python -m benchmarks.experts --threads 1

The model is a Mixtral with random weights. ``float`` computes experts as transformers does by
default (one grouped product), ``loop`` expert by expert, both in float32; the others are
``to_dynamic`` in 8 and 4 bits. Times are calls by turns in one process, by least. ``weights MB``
are parameters and buffers, ``float share`` is how many of all weights are still float, and
``cosine`` that of all logits of the longest prompt, ``own`` the same against a
float model of the weights that the codes stand for. ``--data`` adds ``chosen by data``: what
``quantize`` makes, whose codes of 4 bits are rounded with error feedback on other random prompts.
"""

from __future__ import annotations

import argparse
import copy
import functools
from typing import Any

import torch
from torch import nn

import x86quant
from benchmarks.environment import print_environment
from x86quant.profiling.timing import interleaved
from x86quant.torchvision_import import import_torchvision


def mixture(width: int, layers: int, experts: int) -> Any:
    """A Mixtral with random weights."""
    import_torchvision()
    import transformers

    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        vocab_size=8000, hidden_size=width, intermediate_size=width * 7 // 2,
        num_hidden_layers=layers, num_attention_heads=width // 64,
        num_key_value_heads=max(1, width // 256), num_local_experts=experts,
        num_experts_per_tok=2, max_position_embeddings=1024,
    )  # fmt: skip
    return transformers.MixtralForCausalLM(config).eval().requires_grad_(False)


def weights_of(model: Any) -> tuple[float, float]:
    """Megabytes of the tensors of ``model``, and the share of weights that are float."""
    state = [*model.parameters(), *model.buffers()]
    held = sum(x.numel() * x.element_size() for x in state) / 1e6
    in_float = sum(p.numel() for p in model.parameters())
    in_codes = sum(
        b.numel() * (2 if b.dtype == torch.uint8 else 1)
        for name, b in model.named_buffers()
        if name.endswith("int8_weight")
    )
    return held, in_float / (in_float + in_codes)


def in_float(model: Any) -> Any:
    """``model`` with float linears of the weights that its codes stand for."""
    model = copy.deepcopy(model)
    for path, module in list(model.named_modules()):
        if isinstance(module, x86quant.DynamicLinear):
            plain = nn.Linear(module.in_features, module.out_features, module.bias is not None)
            plain.weight.data = module.weight.dequantize()
            if module.bias is not None:
                plain.bias.data = module.bias
            model.set_submodule(path, plain)
    return model


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 16, 128])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--data", action="store_true", help="codes chosen by data, too: minutes")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print_environment()
    model = mixture(options.width, options.layers, options.experts)
    loop = copy.deepcopy(model)
    loop.set_experts_implementation("eager")
    models = {
        "float": model,
        "loop": loop,
        "int8": x86quant.to_dynamic(model),
        "int4": x86quant.to_dynamic(model, weight_bits=4),
    }
    if options.data:
        models["chosen by data"] = x86quant.quantize(
            model,
            [{"input_ids": torch.randint(8000, (4, 128)), "use_cache": False} for _ in range(4)],
            mode="dynamic",
            weight_bits=4,
            speed_check=False,
            fuse_blocks=False,
            progress=False,
        )
    inputs = {n: torch.randint(8000, (1, n)) for n in options.tokens}
    longest = inputs[max(inputs)]
    with torch.no_grad():
        expected = model(longest).logits.flatten().double()
        times = {
            n: interleaved(
                {name: functools.partial(m, ids, use_cache=False) for name, m in models.items()},
                rounds=options.rounds,
            )
            for n, ids in inputs.items()
        }
        head = " ".join(f"{f'{n} tokens ms':>14}" for n in inputs)
        print(f"{'':14} {head} {'weights MB':>11} {'float share':>12} {'cosine':>9} {'own':>9}")
        for name, one in models.items():
            held, share = weights_of(one)
            near = torch.cosine_similarity(one(longest).logits.flatten().double(), expected, 0)
            row = " ".join(f"{times[n][name].minimum * 1e3:14.2f}" for n in inputs)
            own = in_float(one)(longest).logits.flatten().double()
            same = torch.cosine_similarity(one(longest).logits.flatten().double(), own, 0)
            print(
                f"{name:14} {row} {held:11.1f} {share:12.3f} {float(near):9.5f} {float(same):9.5f}"
            )


if __name__ == "__main__":
    main()
