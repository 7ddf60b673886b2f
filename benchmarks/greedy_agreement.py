"""How long greedy decoding in int8 gives the float model's tokens, and why it stops.

python -m benchmarks.greedy_agreement                    # random decoders of three kinds
python -m benchmarks.greedy_agreement --model FOLDER     # a model of transformers, with tokenizer
python -m benchmarks.greedy_agreement --int8-cache       # with keys and values in int8, too

A token must be the float model's as long as the margin between its best two logits is more than
twice what int8 changes any logit by. For each prompt: how many tokens are equal; and at the first
that is not, that margin, and the largest change of a logit. Random weights make flat logits and so
small margins: they show that nothing but the margin ends the agreement, not how long it lasts on
text.
Exits with 1 if a token differs in spite of its margin.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import x86quant
from benchmarks.environment import print_environment
from benchmarks.networks import declare_missing_ops

PROMPTS = (
    "The capital of France is",
    "A sentence encoder turns text into",
    "def fibonacci(n):\n",
    "Once upon a time there was",
)


@dataclass(frozen=True)
class Agreement:
    """What one prompt gave.

    Attributes:
        equal: how many new tokens are equal, up to the number asked for.
        margin: between the float model's best two logits where they part; infinite if never.
        error: the largest difference of a logit there.
        least: the smallest margin among the tokens that are equal.
    """

    equal: int
    margin: float
    error: float
    least: float

    @property
    def is_explained(self) -> bool:
        """Whether the margin was small enough for int8 to change the token."""
        return self.margin == float("inf") or self.margin <= 2 * self.error


def decoder(kind: str, width: int = 128, layers: int = 4, vocabulary: int = 1000) -> Any:
    """A decoder with random weights, spread so that its layers matter."""
    declare_missing_ops()
    import transformers

    torch.manual_seed(0)
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    sizes = {
        "vocab_size": vocabulary,
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 2 * width,
        "max_position_embeddings": 512,
        **ids,
    }
    if kind == "gpt2":
        config: Any = transformers.GPT2Config(
            vocab_size=vocabulary, n_embd=width, n_layer=layers, n_head=4, n_positions=512, **ids
        )
        model: Any = transformers.GPT2LMHeadModel(config)
    elif kind == "llama":
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    else:
        config = transformers.Qwen3Config(**sizes, head_dim=width // 4)
        model = transformers.Qwen3ForCausalLM(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data *= 6
    model.generation_config.eos_token_id = None  # it never stops early
    return model.eval()


@torch.no_grad()
def agreement(float_model: Any, int8: Any, ids: torch.Tensor, tokens: int) -> Agreement:
    """Decode ``tokens`` new tokens after ``ids`` [1, length] greedily by both models."""
    mask = torch.ones_like(ids)
    options: dict[str, Any] = {"max_new_tokens": tokens, "do_sample": False}
    expected, found = (
        model.generate(ids, attention_mask=mask, **options)[0] for model in (float_model, int8)
    )
    start, length = ids.shape[1], min(len(expected), len(found))
    differs = (expected[:length] != found[:length]).nonzero()
    end = int(differs[0]) if len(differs) else length
    # Logits at a place tell of the token after it.
    logits, others = (m(expected[None, :end]).logits[0, start - 1 :] for m in (float_model, int8))
    best = logits.topk(2).values
    margins = best[:, 0] - best[:, 1]
    least = float(margins[: end - start].min()) if end > start else float("inf")
    if not len(differs):
        return Agreement(end - start, float("inf"), 0.0, least)
    error = float((logits[end - start] - others[end - start]).abs().max())
    return Agreement(end - start, float(margins[end - start]), error, least)


class OnInt8Cache:
    """A decoder that generates with an ``Int8Cache``; calls of it are as they are."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        cache = x86quant.Int8Cache(self.model.config)
        return self.model.generate(*args, **kwargs, past_key_values=cache)

    def __call__(self, ids: torch.Tensor) -> Any:
        return self.model(ids)


def _show(
    name: str, model: nn.Module, prompts: list[torch.Tensor], tokens: int, int8_cache: bool
) -> bool:
    int8: Any = x86quant.to_dynamic(model)
    if int8_cache:
        int8 = OnInt8Cache(int8)
    explained = True
    for number, ids in enumerate(prompts):
        found = agreement(model, int8, ids, tokens)
        explained &= found.is_explained
        row = f"{name:<10}{number:>7}{found.equal:>9}/{tokens}{found.least:>14.4f}"
        print(f"{row}{found.margin:>12.4f}{found.error:>12.4f}")
    return explained


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a folder with a decoder and its tokenizer")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--int8-cache", action="store_true")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    print_environment()
    head = f"{'model':<10}{'prompt':>7}{'equal':>12}{'least margin':>14}"
    print(f"{head}{'at the end':>12}{'error':>12}")
    if options.model:
        declare_missing_ops()
        from transformers import AutoModelForCausalLM, AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(options.model)
        model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
        texts = [tokenizer(text, return_tensors="pt")["input_ids"] for text in PROMPTS]
        return 0 if _show("model", model, texts, options.tokens, options.int8_cache) else 1
    explained = True
    for kind in ("gpt2", "llama", "qwen3"):
        generator = torch.Generator().manual_seed(1)
        prompts = [torch.randint(3, 1000, (1, 16), generator=generator) for _ in range(4)]
        explained &= _show(kind, decoder(kind), prompts, options.tokens, options.int8_cache)
    return 0 if explained else 1


if __name__ == "__main__":
    sys.exit(main())
