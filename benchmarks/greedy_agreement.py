"""How long greedy decoding in int8 gives the float model's tokens, and why it stops.

python -m benchmarks.greedy_agreement                    # random decoders of three kinds
python -m benchmarks.greedy_agreement --model FOLDER     # a model of transformers, with tokenizer
python -m benchmarks.greedy_agreement --int8-cache       # with keys and values in int8, too

A token must be the float model's as long as the margin between its best two logits is more than
twice what int8 changes any logit by. For each prompt: how many tokens are equal; and at the first
that is not, that margin; the largest change of a logit when int8 reads the text at once; and by
how much its logits differ from those when it reads a token at a time through its cache, as it
decoded. That is rounding too, and must be of the same size: what a cache lost would be more.
Random weights make flat logits and so small margins: they show that nothing but the margin ends
the agreement, not how long it lasts on text.
Exits with 1 if a token differs in spite of its margin, or the cache changes more than rounding.
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
from x86quant.torchvision_import import import_torchvision

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
        error: the largest difference of a logit up to there, from float, of a text read at once.
        drift: the largest between int8's logits a token at a time and at once.
        least: the smallest margin among the tokens that are equal.
    """

    equal: int
    margin: float
    error: float
    drift: float
    least: float

    @property
    def is_explained(self) -> bool:
        """Whether the margin was small enough for int8 to change the token, and the cache right."""
        if self.drift > 2 * self.error:
            return False
        return self.margin == float("inf") or self.margin <= 2 * (self.error + self.drift)


def decoder(kind: str, width: int = 128, layers: int = 4, vocabulary: int = 1000) -> Any:
    """A decoder with random weights, spread so that its layers matter."""
    import_torchvision()
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
    made = [
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        for model in (float_model, int8)
    ]
    expected, found = (x.sequences[0] for x in made)
    start, length = ids.shape[1], min(len(expected), len(found))
    differs = (expected[:length] != found[:length]).nonzero()
    end = int(differs[0]) if len(differs) else length
    # Logits at a place tell of the token after it.
    last = end if len(differs) else end - 1
    logits, at_once = (m(expected[None, :last]).logits[0, start - 1 :] for m in (float_model, int8))
    by_token = torch.cat(made[1].logits)[: len(at_once)]
    best = logits.topk(2).values
    margins = best[:, 0] - best[:, 1]
    return Agreement(
        equal=end - start,
        margin=float(margins[end - start]) if len(differs) else float("inf"),
        error=float((logits - at_once).abs().max()),
        drift=float((by_token - at_once).abs().max()),
        least=float(margins[: end - start].min()) if end > start else float("inf"),
    )


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
        print(f"{row}{found.margin:>12.4f}{found.error:>12.4f}{found.drift:>12.4f}")
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
    print(f"{head}{'at the end':>12}{'error':>12}{'by cache':>12}")
    if options.model:
        import_torchvision()
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
