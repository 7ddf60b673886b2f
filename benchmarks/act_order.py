"""What act-order costs a decoder: the same sizes with features in order, and in another order.

    python -m benchmarks.act_order --rounds 5

The model is a Llama of 12 layers, 768 wide, as ``benchmarks.decoding`` has it, in GPTQ's codes of 4
bits by groups of 128, random: once with features side by side in their groups, once as act-order
puts them, one order for the linears of an input. Both run as fused graphs and, where they can, as a
token's native run; by turns, one thread, milliseconds.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.environment import print_environment
from benchmarks.gptq_files import save_llama_config

_WIDE, _LAYERS, _HEADS, _KEYS, _BETWEEN, _WORDS = 768, 12, 12, 4, 2048, 32000
_GROUP = 128
#: Outputs and inputs of the linears of a layer, and what names the order of those inputs.
_LINEARS = {
    "self_attn.q_proj": (_WIDE, _WIDE, "attention"),
    "self_attn.k_proj": (_WIDE // _HEADS * _KEYS, _WIDE, "attention"),
    "self_attn.v_proj": (_WIDE // _HEADS * _KEYS, _WIDE, "attention"),
    "self_attn.o_proj": (_WIDE, _WIDE, "heads"),
    "mlp.gate_proj": (_BETWEEN, _WIDE, "mlp"),
    "mlp.up_proj": (_BETWEEN, _WIDE, "mlp"),
    "mlp.down_proj": (_WIDE, _BETWEEN, "between"),
}


def write(folder: Path, reordered: bool) -> None:
    """The model as a folder of a GPTQ library, version 1, with a g_idx."""
    torch.manual_seed(0)
    save_llama_config(
        folder, _GROUP, reordered, vocab_size=_WORDS, hidden_size=_WIDE, num_hidden_layers=_LAYERS,
        num_attention_heads=_HEADS, num_key_value_heads=_KEYS, intermediate_size=_BETWEEN,
    )  # fmt: skip
    tensors = {
        "model.embed_tokens.weight": torch.randn(_WORDS, _WIDE),
        "lm_head.weight": torch.randn(_WORDS, _WIDE).mul(0.02),
        "model.norm.weight": torch.ones(_WIDE),
    }
    for layer in range(_LAYERS):
        at = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{at}.{norm}.weight"] = torch.ones(_WIDE)
        orders: dict[str, torch.Tensor] = {}
        for name, (outputs, features, source) in _LINEARS.items():
            groups = features // _GROUP
            places = torch.randperm(features) if reordered else torch.arange(features)
            places = orders.setdefault(source, places)
            codes = torch.randint(-(2**31), 2**31 - 1, (features // 8, outputs), dtype=torch.int32)
            zeros = torch.full((groups, outputs // 8), 0x77777777, dtype=torch.int32)
            found = {
                "qweight": codes, "qzeros": zeros, "g_idx": (places // _GROUP).int(),
                "scales": torch.full((groups, outputs), 0.004, dtype=torch.float16),
            }  # fmt: skip
            tensors.update({f"{at}.{name}.{key}": x for key, x in found.items()})
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def loaded(reordered: bool) -> Any:
    """The model with native graphs; says what loading took and what its runs are made of."""
    from x86quant import huggingface

    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), reordered)
        start = time.perf_counter()
        model: Any = huggingface.load(Path(folder), fuse_blocks=True)
        took = time.perf_counter() - start
    print(f"act-order {reordered}: loaded in {took:.1f} s; {'; '.join(model.quantization.notes)}")
    return model


def step_of(model: Any, ids: torch.Tensor) -> Any:
    """A call that adds one token behind ``ids``."""
    cache = model(input_ids=ids, use_cache=True, return_dict=True, logits_to_keep=1).past_key_values
    return lambda: model(
        input_ids=ids[:, -1:], past_key_values=cache, use_cache=True, return_dict=True
    )


def main() -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=24, help="tokens of a turn")
    parser.add_argument("--prompts", type=int, nargs="*", default=[128, 512])
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print_environment()
    models = {name: loaded(name == "act-order") for name in ("in order", "act-order")}
    draw = torch.Generator().manual_seed(1)
    prompts = {
        f"prompt {n}": torch.randint(3, 1000, (1, n), generator=draw) for n in options.prompts
    }
    ids = torch.randint(3, 1000, (1, 64), generator=draw)
    times: dict[tuple[str, str], list[float]] = {}
    with torch.no_grad():
        for number in range(options.rounds + 1):
            for name, model in models.items():
                add = step_of(model, ids)
                runs = [("token", add)] * (options.tokens + 2)
                runs += [
                    (
                        key,
                        lambda x=x, m=model: m(
                            input_ids=x, use_cache=True, return_dict=True, logits_to_keep=1
                        ),
                    )
                    for key, x in prompts.items()
                ]
                for key, run in runs:
                    start = time.perf_counter()
                    run()
                    took = time.perf_counter() - start
                    if number:  # the first ones plan
                        times.setdefault((name, key), []).append(took * 1e3)
    for key in ("token", *prompts):
        before, after = times["in order", key], times["act-order", key]
        print(
            f"{key:<12} in order {statistics.median(before):8.2f} / {min(before):8.2f}   act-order "
            f"{statistics.median(after):8.2f} / {min(after):8.2f}   "
            f"{statistics.median(after) / statistics.median(before):6.3f} / "
            f"{min(after) / min(before):6.3f}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
