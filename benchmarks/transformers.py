"""Whole transformers in int8: x86quant against every other way to run them on a CPU.

    pip install --no-build-isolation -e '.[benchmarks]'
    python -m benchmarks.transformers --out results
    python -m benchmarks.transformers --out results2 --threads 2
    python -m benchmarks.transformers --out results3 --models minilm --peers openvino
    python -m benchmarks.transformers --out results4 --models gpt2 t5_encoder clip_text

This is ``x86quant bench`` on the models and sizes below, with the targets that they are held to at
the end. Weights are random but for MiniLM's. Interrupted, the same command goes on; a folder of
results is kept for each size, since the same model is measured at several.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.against_peers import Target, parser_of
from x86quant.bench.backends import BACKENDS
from x86quant.bench.campaign import check_folder, measure_apart, run_campaign
from x86quant.bench.one_model import BenchRequest
from x86quant.bench.pages import write_pages
from x86quant.bench.results import OURS, ModelRun, RunSetting, geometric_mean
from x86quant.bench.summary_text import markdown, title_of
from x86quant.errors import X86QuantError
from x86quant.given_model import InputShape

# Models of ``transformer_models``, and what a call of each takes.
MORE: dict[str, InputShape] = {
    "clip_text": InputShape((1, 77), "int64"),
    "clip_vision": InputShape((1, 3, 224, 224)),
    "t5_encoder": InputShape((1, 128), "int64"),
    "whisper_encoder": InputShape((1, 80, 3000)),
    "gpt2": InputShape((1, 128), "int64"),
    "small_llama": InputShape((1, 128), "int64"),
    "qwen_embedder": InputShape((1, 128), "int64"),
}
# Sentences and tokens of a call; None: a picture.
SIZES: dict[str, tuple[tuple[int, int] | None, ...]] = {
    "bert-base": ((1, 128), (1, 384)),
    "minilm": ((1, 16), (1, 32), (1, 128), (32, 32)),
    "vit-b-16": (None,),
    "swin_t": (None,),
    "distilbert-base": ((1, 128),),
    "roberta-base": ((1, 128),),
    "maxvit_t": (None,),
}
USUAL = ("bert-base", "minilm", "vit-b-16", "swin_t")
PEERS = ("openvino", "onnxruntime", "x86", "bf16", "fp32")
# What openvino takes over what we take.
MEAN_WANTED, LEAST_WANTED = 2.0, 1.3


def requests_for(
    models: Sequence[str], threads: int, rounds: int, peers: Sequence[str]
) -> list[BenchRequest]:
    """One for each model and size."""
    found = []
    for model in models:
        if model in MORE:
            path, setting = f"benchmarks.transformer_models:{model}", RunSetting(1, threads)
            one = (MORE[model],)
            found.append(BenchRequest(path, one, setting, rounds, (OURS, *peers), alone=False))
            continue
        for size in SIZES[model]:
            inputs = (
                (InputShape((1, 3, 224, 224)),)
                if size is None
                else (InputShape(size, "int64"),) * 2
            )
            setting = RunSetting(1 if size is None else size[0], threads)
            found.append(BenchRequest(model, inputs, setting, rounds, (OURS, *peers), alone=False))
    return found


def place(request: BenchRequest) -> str:
    """The name of the folder for its results."""
    name = request.name.rpartition(":")[2]
    return "-".join([name, *(str(size) for size in request.inputs[0].sizes)])


def targets(runs: Sequence[ModelRun], threads: int) -> list[Target]:
    """What encoders are held to, and what came of it; other models are compared, no more."""
    runs = [run for run in runs if run.model in USUAL]
    ratios = {_name(run): ratio for run in runs if (ratio := run.ratio("openvino")) is not None}
    found = []
    if ratios:
        mean, least = geometric_mean(list(ratios.values())), min(ratios, key=lambda n: ratios[n])
        found = [
            Target(
                f"{MEAN_WANTED:g} times the speed of OpenVINO int8 (geometric mean), "
                f"{threads} threads",
                f"{mean:.2f} over {len(ratios)} of {len(runs)} sizes",
                mean >= MEAN_WANTED,
            ),
            Target(
                f"on none below {LEAST_WANTED:g} times",
                f"{ratios[least]:.2f} on {least}",
                ratios[least] >= LEAST_WANTED,
            ),
        ]
    slower = [
        f"{_name(run)}: {title_of(name)} takes {ratio:.2f} times our time"
        for run in runs
        for name in run.results
        if name != OURS and (ratio := run.ratio(name)) is not None and ratio < 1
    ]
    found.append(Target("slower than no other", "; ".join(slower) or "none", not slower))
    worse = [
        f"{_name(run)}: {ours.sqnr_db:.1f} dB against {theirs.sqnr_db:.1f}"
        for run in runs
        if (ours := run.results.get(OURS)) and (theirs := run.results.get("openvino"))
        if ours.sqnr_db is not None and theirs.sqnr_db is not None
        if ours.sqnr_db < theirs.sqnr_db
    ]
    found.append(Target("SQNR on none below OpenVINO's", "; ".join(worse) or "none", not worse))
    return found


def _name(run: ModelRun) -> str:
    return f"{run.model} {run.inputs.split(',')[0].split()[0]}"


def main() -> int:
    """Run the command line; returns the exit status."""
    parser = parser_of("benchmarks.transformers", __doc__)
    parser.add_argument("--models", nargs="+", default=USUAL, choices=[*SIZES, *MORE])
    parser.add_argument("--peers", nargs="*", default=PEERS, choices=[*BACKENDS])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    options = parser.parse_args()
    peers = [name for name in options.peers if name != OURS]
    runs = []
    try:
        for request in requests_for(options.models, options.threads, options.rounds, peers):
            folder = options.out / place(request)
            check_folder(folder)
            measure = functools.partial(measure_apart, longest=900)
            done = functools.partial(write_pages, folder=folder)
            results = run_campaign([request], measure, folder=folder, resume=True, done=done)
            print(markdown(results), flush=True)
            runs += [run for run in results.runs if run.setting == request.setting]
    except X86QuantError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print("## Targets\n")
    print(*(f"- {target}" for target in targets(runs, options.threads)), sep="\n")
    return int(any(run.measured(OURS) is None for run in runs))


if __name__ == "__main__":
    sys.exit(main())
