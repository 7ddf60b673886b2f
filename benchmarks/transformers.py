"""Whole transformers in int8: x86quant against every other way to run them on a CPU.

    pip install --no-build-isolation -e '.[benchmarks]'
    python -m benchmarks.transformers --out results              # all models, one thread
    python -m benchmarks.transformers --out results --models minilm gpt2
    python -m benchmarks.transformers --out results2 --threads 2 --peers openvino
    python -m benchmarks.transformers --out results3 --isa avx2  # as on a lesser CPU

This is ``x86quant bench`` on the models and sizes below. At the end stand a table of all and the
targets that four are held to. Weights are random but for MiniLM's. What is measured is kept, in a
folder for each size, as soon as it is there: interrupted, the same command goes on, and one with
more models measures only those.
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
from x86quant.bench.results import OURS, ModelRun, RunSetting, geometric_mean
from x86quant.bench.summary_page import write_pages
from x86quant.bench.summary_text import digits, markdown, notes, title_of
from x86quant.errors import X86QuantError
from x86quant.given_model import InputShape
from x86quant.hardware import isa

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
# Those that the targets are for.
HELD = ("bert-base", "minilm", "vit-b-16", "swin_t")
PEERS = ("openvino", "onnxruntime", "x86", "bf16", "fp32")
# What openvino takes over what we take.
MEAN_WANTED, LEAST_WANTED = 2.0, 1.3


def requests_for(
    models: Sequence[str],
    threads: int,
    rounds: int,
    peers: Sequence[str],
    level: str | None = None,
) -> list[BenchRequest]:
    """One for each model and size; all that obey are held to ``level``."""
    found = []
    for model in models:
        name, sizes = model, [_inputs(size) for size in SIZES.get(model, ())]
        if model in MORE:
            name, sizes = f"benchmarks.transformer_models:{model}", [(MORE[model],)]
        for inputs in sizes:
            setting = RunSetting(inputs[0].sizes[0], threads, isa=level)
            found.append(BenchRequest(name, inputs, setting, rounds, (OURS, *peers), alone=False))
    return found


def _inputs(size: tuple[int, int] | None) -> tuple[InputShape, ...]:
    if size is None:
        return (InputShape((1, 3, 224, 224)),)
    return (InputShape(size, "int64"),) * 2


def place(request: BenchRequest) -> str:
    """The name of the folder for its results."""
    name = request.name.rpartition(":")[2]
    return "-".join([name, *(str(size) for size in request.inputs[0].sizes)])


def table(runs: Sequence[ModelRun]) -> str:
    """A row for each model and size: our time, who takes how many times as long, and the SQNRs.

    Below it: who did not run, and why.
    """
    found = {name for run in runs for name in run.results}
    peers = [name for name in BACKENDS if name in found and name != OURS]
    rows = [
        ["", f"{OURS}, ms", *map(title_of, peers)],
        ["---"] * (2 + len(peers)),
        *([_name(run), *(_cell(run, name) for name in (OURS, *peers))] for run in runs),
    ]
    missing = [f"- {_name(run)}: {run.error}" for run in runs if run.error]
    missing += [f"- {_name(run)}: {note}" for run in runs for note in notes(run)]
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([*lines, "", *dict.fromkeys(missing)])


def _cell(run: ModelRun, name: str) -> str:
    """Our median, or the ratio by median and by minimum; and the SQNR."""
    result = run.measured(name)
    if result is None:
        return run.results[name].status if name in run.results else ""
    ratios = [run.ratio(name, statistic=statistic) for statistic in ("median", "minimum")]
    told = " / ".join(f"{ratio:.2f}" for ratio in ratios if ratio is not None)
    if name == OURS or not told:
        told = digits(result.median * 1e3) + (" ms" if name != OURS else "")
    return told + ("" if result.sqnr_db is None else f", {result.sqnr_db:.1f} dB")


def targets(runs: Sequence[ModelRun], threads: int) -> list[Target]:
    """What encoders are held to, and what came of it; other models are compared, no more."""
    runs = [run for run in runs if run.model in HELD]
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
    """The model, and the sizes of its first input; none if it could not be built."""
    return " ".join([run.model.rpartition(":")[2], *run.inputs.split(",")[0].split()[:1]])


def main() -> int:
    """Run the command line; returns the exit status."""
    parser = parser_of("benchmarks.transformers", __doc__)
    parser.add_argument("--models", nargs="+", default=[*SIZES, *MORE], choices=[*SIZES, *MORE])
    parser.add_argument("--peers", nargs="*", default=PEERS, choices=[*BACKENDS])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--isa", choices=isa.LEVELS, help="hold all peers that obey to this level")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    options = parser.parse_args()
    peers = [name for name in options.peers if name != OURS]
    runs = []
    try:
        for request in requests_for(
            options.models, options.threads, options.rounds, peers, options.isa
        ):
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
    print(f"## All\n\n{table(runs)}\n\n## Targets\n")
    print(*(f"- {target}" for target in targets(runs, options.threads)), sep="\n")
    return int(any(run.measured(OURS) is None for run in runs))


if __name__ == "__main__":
    sys.exit(main())
