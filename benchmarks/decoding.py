"""How fast a decoder adds tokens, against what the memory gives and against other ways to run it.

    python -m benchmarks.decoding                        # a GPT-2 of 124M parameters, one thread
    python -m benchmarks.decoding --threads 2 --peers fp32 torch-int8
    python -m benchmarks.decoding --kind llama --prompt 512
    python -m benchmarks.decoding --prompts 128 512 --peers layers fp32  # prompts instead
    python -m benchmarks.decoding --prompts 128 --peers openvino
    python -m benchmarks.decoding --kind llama --peers loaded loaded-layers
    python -m benchmarks.decoding --kind llama --peers four-bits
    python -m benchmarks.decoding --kind llama --peers four-bits llama.cpp  # and --threads 2
    python -m benchmarks.decoding --kind llama --peers llama.cpp --prompt 1 --tokens 128
    python -m benchmarks.decoding --kind llama --peers llama.cpp --prompts 512
    python -m benchmarks.decoding --cache float int8 --prompt 2048   # the kinds of cache

Batch 1, greedy, by ``generate`` as it is, random weights. A token reads every weight once, so its
time is at least that of reading so many bytes: ``read`` is what streaming a buffer of 512 MB with
the same threads gives, measured in the same run between the models' turns; ``of memory`` is how
much of it the model's bytes of weights a second are: of its median by the median step, and of its
best by the least. ``step`` is a call of the model alone, without
what generate does around it. ``prompt`` is the time of the first token. With ``--prompts`` that
alone is measured, for prompts of so many tokens. ``--cache int8`` runs ours with an
``x86quant.Int8Cache``; ``--cache float int8`` compares both kinds alone, step by step by turns,
behind a prompt, with what the tokens that are held take.

Peers: loaded (ours, int8 while loaded by ``from_pretrained``), loaded-layers (the same with
fuse_blocks=False) and four-bits (loaded, with weight_bits=4); llama.cpp (the same weights in Q8_0
and in Q4_0, of llama and qwen3: ``benchmarks.decoding_llama``; its llama-bench measures prompts of
512, and 128 tokens behind one, as in the last two of these); fp32; stock (dynamic quantization by
torch); layers (ours, each by itself: ``to_dynamic``); weight-only (the same with float
activations); torch-int8 (torch._weight_int8pack_mm on float32 activations, by torch.compile with a
static cache, called as a step); of prompts, openvino: int8 by NNCF, from ids to the last token's
logits, without a cache.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import warnings

import torch

from benchmarks.decoding_subjects import (
    LLAMA_PEERS,
    LOADED_PEERS,
    PEERS,
    PROMPT_PEERS,
    Subject,
    decoder,
    subjects,
)
from benchmarks.environment import print_environment

_STREAM_BYTES = 512 << 20


def stream_once(buffer: torch.Tensor) -> float:
    """Bytes a second of reading ``buffer`` from end to end."""
    start = time.perf_counter()
    buffer.sum()
    return buffer.numel() * buffer.element_size() / (time.perf_counter() - start)


def measure(found: list[Subject], ids: torch.Tensor, tokens: int, rounds: int) -> list[float]:
    """Times of each subject by turns; returns what streaming gave between them."""
    # Floats of one type: sum() of them reads at the speed of memory, by all threads.
    buffer = torch.ones(_STREAM_BYTES // 4)
    read = []
    for _ in range(rounds):
        for subject in found:
            read.append(stream_once(buffer))
            assert subject.step is not None
            add = subject.step(ids)
            add(), add()  # the first ones plan
            for _ in range(tokens):
                start = time.perf_counter()
                add()
                subject.note("step", time.perf_counter() - start)
            if subject.generate is not None:
                start = time.perf_counter()
                subject.generate(ids, 1)
                first = time.perf_counter() - start
                start = time.perf_counter()
                subject.generate(ids, tokens)
                rest = time.perf_counter() - start - first
                subject.note("prompt", first)
                subject.note("token", rest / (tokens - 1))
    return read


def compare_caches(found: list[Subject], ids: torch.Tensor, steps: int) -> None:
    """A table of steps with each kind of cache, one by one by turns, behind the same prompt."""
    adds = [subject.step(ids) for subject in found if subject.step is not None]
    for number in range(steps + 2):
        for subject, add in zip(found, adds, strict=True):
            start = time.perf_counter()
            add()
            if number >= 2:  # the first ones plan
                subject.note("step", time.perf_counter() - start)
    columns = ("held", "cache MB", "median ms", "least ms", "by median", "by least")
    print(("{:<14}" + "{:>11}" * 6).format("", *columns))
    ours = found[0].times["step"]
    for subject in found:
        median, least = subject.median("step"), min(subject.times["step"])
        print(
            f"{subject.name:<14}{ids.shape[1]:>11}{subject.cache_bytes / 1e6:>11.1f}"
            f"{median * 1e3:>11.2f}{least * 1e3:>11.2f}"
            f"{median / statistics.median(ours):>11.3f}{least / min(ours):>11.3f}"
        )


def measure_prompts(found: list[Subject], prompts: list[torch.Tensor], rounds: int) -> None:
    """Times of each subject by turns, of each prompt."""
    for number in range(rounds + 1):
        for prompt in prompts:
            for subject in found:
                assert subject.generate is not None
                start = time.perf_counter()
                subject.generate(prompt, 1)
                if number:  # the first one plans
                    subject.note(f"prompt {prompt.shape[1]}", time.perf_counter() - start)


def print_prompts(found: list[Subject], prompts: list[torch.Tensor]) -> None:
    """A table of what ``measure_prompts`` found."""
    columns = ("tokens", "median ms", "least ms", "over ours, by median", "by minimum")
    print(("{:<12}{:>8}{:>12}{:>12}{:>22}{:>12}").format("", *columns))
    for prompt in prompts:
        of_ours = found[0].times[f"prompt {prompt.shape[1]}"]
        for subject in found:
            times = subject.times[f"prompt {prompt.shape[1]}"]
            median, least = statistics.median(times), min(times)
            print(
                f"{subject.name:<12}{prompt.shape[1]:>8}{median * 1e3:>12.1f}{least * 1e3:>12.1f}"
                f"{median / statistics.median(of_ours):>22.2f}{least / min(of_ours):>12.2f}"
            )


def main() -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kind", choices=("gpt2", "llama", "qwen3"), default="gpt2")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of the prompt")
    parser.add_argument("--tokens", type=int, default=24, help="new tokens of a turn")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--cache", nargs="+", choices=("float", "int8"), default=["float"])
    parser.add_argument("--prompts", type=int, nargs="*", default=[], help="measure these alone")
    known = (*PEERS, *LOADED_PEERS, *PROMPT_PEERS, *LLAMA_PEERS, "llama.cpp")
    parser.add_argument("--peers", nargs="*", choices=known, default=PEERS)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(options.threads)
    print_environment()
    if bool(options.prompts) < bool({*options.peers} & {*PROMPT_PEERS}):
        parser.error("openvino is a peer of --prompts alone")
    if options.kind == "gpt2" and any("llama.cpp" in name for name in options.peers):
        parser.error("llama.cpp is a peer of --kind llama and qwen3")
    if options.prompts and options.cache != ["float"]:
        parser.error("--cache is for steps: leave out --prompts")
    if options.prompts and "torch-int8" in options.peers:
        parser.error("torch-int8 is a peer of steps alone: give --peers")
    draw = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, 1000, (1, n), generator=draw) for n in options.prompts]
    longest = max([options.prompt, *options.prompts])
    # Room for what is added, in both ways of measuring.
    positions = longest + 2 * (options.tokens + 2) * (options.rounds + 1)
    comparing = len(options.cache) > 1
    both = list(LLAMA_PEERS)
    given = [both if name == "llama.cpp" else [name] for name in options.peers]
    peers = [] if comparing else [name for names in given for name in names]
    found = subjects(decoder(options.kind, positions), peers, prompts, options.cache)
    if prompts:
        measure_prompts(found, prompts, options.rounds)
        print_prompts(found, prompts)
        return 0
    ids = torch.randint(3, 1000, (1, options.prompt), generator=torch.Generator().manual_seed(1))
    if comparing:
        compare_caches(found, ids, options.tokens * options.rounds)
        return 0
    read = measure(found, ids, options.tokens, options.rounds)
    best = max(read)
    print(f"read: {statistics.median(read) / 1e9:.1f} GB/s, at best {best / 1e9:.1f}")
    columns = ("MB", "step ms", "of memory", "least ms", "of memory", "token ms", "prompt ms")
    print(
        ("{:<16}" + "{:>11}" * 7 + "{:>18}{:>11}").format("", *columns, "steps over ours", "least")
    )
    ours = found[0].times["step"]
    for subject in found:
        step, least = subject.median("step"), min(subject.times["step"])
        size = subject.weight_bytes
        shares = size / step / statistics.median(read), size / least / best
        print(
            f"{subject.name:<16}{size / 1e6:>11.0f}{step * 1e3:>11.2f}{shares[0]:>11.0%}"
            f"{least * 1e3:>11.2f}{shares[1]:>11.0%}{subject.median('token') * 1e3:>11.2f}"
            f"{subject.median('prompt') * 1e3:>11.1f}{step / statistics.median(ours):>18.2f}"
            f"{least / min(ours):>11.2f}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
