"""Tokens a second of ``generate``: weights by batch by kind of cache, with a streamer and without.

    python -m benchmarks.decoding_table
    python -m benchmarks.decoding_table --forms int8 four-bits --batches 1 4

The decoder is the Llama of ``benchmarks.decoding``, random weights, behind a prompt of 512 tokens.
``prompt`` is the time of the first token of all sequences, ``token`` that of each further step,
``a second`` the tokens of all sequences in it: by medians of rounds, all of ``generate`` included.
Streamers of transformers take one sequence. Forms take turns within a kind of cache.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import warnings
from typing import Any

import torch

import x86quant
from benchmarks.decoding_subjects import decoder, loaded
from benchmarks.environment import print_environment

_CACHES = ("dynamic", "static", "int8")
_FORMS = ("float", "int8", "four-bits")


class _Streamer:
    """Takes tokens as they come."""

    def put(self, value: torch.Tensor) -> None:
        """One token, or the prompt."""

    def end(self) -> None:
        """No more come."""


def options_of(cache: str, model: Any, tokens: int, streamed: bool) -> dict[str, Any]:
    """What ``generate`` is called with."""
    found: dict[str, Any] = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False}
    if cache == "static":
        found["cache_implementation"] = "static"
        found["disable_compile"] = True
    if cache == "int8":
        found["past_key_values"] = x86quant.Int8Cache(model.config)
    if streamed:
        found["streamer"] = _Streamer()
    return found


def measure(
    model: Any, ids: torch.Tensor, cache: str, tokens: int, streamed: bool
) -> tuple[float, float]:
    """Seconds of the first token, and of all of them."""
    times = []
    for count in (1, tokens):
        options = options_of(cache, model, count, streamed)
        start = time.perf_counter()
        model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        times.append(time.perf_counter() - start)
    return times[0], times[1]


def main() -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--forms", nargs="+", choices=_FORMS, default=list(_FORMS))
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 4, 16])
    parser.add_argument("--caches", nargs="+", choices=_CACHES, default=list(_CACHES))
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=17)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(options.threads)
    print_environment()
    base = decoder("llama", options.prompt + 64)
    make = {
        "float": lambda: base,
        "int8": lambda: loaded(base, True),
        "four-bits": lambda: loaded(base, True, 4),
    }
    models = {name: make[name]() for name in options.forms}
    print("form       batch cache    stream  prompt ms  token ms  a second")
    for batch in options.batches:
        draw = torch.Generator().manual_seed(batch)
        ids = torch.randint(3, 1000, (batch, options.prompt), generator=draw)
        for cache in options.caches:
            for streamed in (False, True) if batch == 1 else (False,):
                found: dict[str, list[tuple[float, float]]] = {}
                for number in range(options.rounds + 1):
                    for name, model in models.items():
                        few = name == "float" and batch > 4  # its prompts take half a minute
                        if (name == "float" and cache == "int8") or (few and number != 1):
                            continue  # it has no such cache
                        times = measure(model, ids, cache, options.tokens, streamed)
                        if number:  # the first calls plan
                            found.setdefault(name, []).append(times)
                for name, times_of in found.items():
                    firsts, wholes = zip(*times_of, strict=True)
                    first = statistics.median(firsts)
                    each = (statistics.median(wholes) - first) / (options.tokens - 1)
                    print(
                        f"{name:<11}{batch:>5} {cache:<9}{'yes' if streamed else 'no':<6}"
                        f"{first * 1e3:>11.1f}{each * 1e3:>10.2f}{batch / each:>10.1f}",
                        flush=True,
                    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
