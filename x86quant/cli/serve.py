"""Serve a sentence encoder or a reranker over HTTP, in int8.

    x86quant serve all-MiniLM-L6-v2
    x86quant serve reranker/ --host 0.0.0.0 --port 8080 --threads 4

FOLDER holds what save_pretrained of a SentenceTransformer, a CrossEncoder or an encoder of
transformers wrote, in float (which is quantized now) or in int8. It answers POST /v1/embeddings
(OpenAI's), /embed and /rerank (text-embeddings-inference's), GET /health, /info and /metrics.
SIGTERM ends it when what was asked is answered.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path

from x86quant.cli import loading
from x86quant.service.limits import Limits

HELP = "serve a sentence encoder or a reranker over HTTP"


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    usual = Limits()
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="where the model is")
    parser.add_argument("--host", default="127.0.0.1", help="(default: %(default)s)")
    parser.add_argument(
        "--port", type=int, default=8080, help="0 is any that is free (default: %(default)s)"
    )
    parser.add_argument(
        "--threads",
        type=loading.thread_count,
        help="of the model (default: the cores that it may use)",
    )
    parser.add_argument("--name", help="what clients are told the model is (default: the folder's)")
    for name, value, text in (
        ("--batch-tokens", usual.batch_tokens, "tokens that one call of the model computes"),
        ("--waiting", usual.waiting, "texts that may wait; a request beyond gets 429"),
        ("--inputs", usual.inputs, "texts that a request may hold"),
        ("--body-bytes", usual.body_bytes, "bytes of a request"),
    ):
        parser.add_argument(
            name, type=loading.positive, default=value, help=f"{text} (default: %(default)s)"
        )
    parser.add_argument(
        "--timeout",
        type=float,
        default=usual.timeout_s,
        metavar="S",
        help="seconds that a text waits for its turn (default: %(default)g)",
    )
    parser.add_argument(
        "--grace",
        type=float,
        default=30.0,
        metavar="S",
        help="seconds that are left to what was asked, when it ends (default: %(default)g)",
    )


def run(options: argparse.Namespace) -> int:
    """Load, listen, answer."""
    import torch

    from x86quant.hardware.cpu import cpu
    from x86quant.service import EncoderService, load_engine
    from x86quant.service.server import listening, serve

    limits = Limits(
        body_bytes=options.body_bytes,
        inputs=options.inputs,
        batch_tokens=options.batch_tokens,
        waiting=options.waiting,
        timeout_s=options.timeout,
    )
    # Tokenizers would start a thread for every core, whatever the quota.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # The first process of a container ends by no signal that it does not handle.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    at = listening(options.host, options.port)  # now, not after loading
    threads = options.threads or cpu().best_threads
    loading.tell(f"loading {options.folder}, {threads} threads ...")
    torch.set_num_threads(threads)  # to load with; torch's own choice knows no quota
    engine = load_engine(options.folder, threads=threads, name=options.name)
    facts = engine.facts
    padding = "is computed" if facts.pads else "is left out"
    loading.tell(
        f"{facts.name}: {facts.task}, {facts.dtype}, up to {facts.max_tokens} tokens, padding "
        f"{padding}"
    )
    at.listen()  # who connects from now on waits for the server's first turn, and is not refused
    loading.tell(f"listening at http://{options.host}:{at.getsockname()[1]}")
    serve(EncoderService(engine, limits), at, options.grace)
    loading.tell("ended")
    return 0
