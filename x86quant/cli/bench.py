"""Time a model: float, as stock PyTorch runs it, and compiled; in turn, so that it is fair.

    x86quant bench torchvision.models:resnet18 --shape 1,3,224,224 --profile --trace trace.json

To see what another machine would do, cap this one: X86QUANT_ISA=avx2 x86quant bench ...
"""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from x86quant.cli import loading
from x86quant.errors import InvalidInputError
from x86quant.files import check_target

if TYPE_CHECKING:
    from torch import nn

    from x86quant.compiled import CompiledModule
    from x86quant.profiling.timing import Timing

HELP = "time a model: float, stock int8, compiled"

_COMPILED = "x86quant"


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    loading.add_model_arguments(parser)
    parser.add_argument(
        "--rounds", type=loading.positive, default=30, help="times each is measured (default: 30)"
    )
    parser.add_argument("--profile", action="store_true", help="the time of every step, too")
    parser.add_argument(
        "--trace", type=Path, metavar="FILE", help="write a trace for Perfetto or chrome://tracing"
    )


def run(options: argparse.Namespace) -> int:
    """Measure and print."""
    import torch

    from x86quant.profiling import profile
    from x86quant.profiling.roofline import using_threads
    from x86quant.profiling.timing import interleaved

    if options.trace:
        check_target(options.trace, "--trace")  # now, not after measuring
    model = loading.load_model(options.model)
    call = loading.arguments_for(options, model)
    threads = options.threads or torch.get_num_threads()
    with using_threads(threads), torch.no_grad():
        forms = loading.compile_model(model, call.args, call.kwargs)
        loading.tell(f"timing {options.rounds} rounds on {threads} threads")
        timings = interleaved(_candidates(forms, call), rounds=options.rounds)
        measured = (
            profile(_one_graph(forms.compiled), call.args, kwargs=call.kwargs, runs=options.rounds)
            if options.profile or options.trace
            else None
        )
    if options.trace and measured is not None:
        measured.to_chrome_trace(options.trace)
        loading.tell(f"wrote {options.trace}")
    if options.json:
        facts: dict[str, Any] = {
            "model": options.model,
            "shapes": [tuple(x.shape) for x in (*call.args, *call.kwargs.values())],
            "threads": threads,
            "rounds": options.rounds,
            "timings": _facts(timings),
        }
        if options.profile and measured is not None:
            facts["profile"] = measured.to_dict()
        print(json.dumps(facts, indent=2))
        return 0
    print(_table(timings))
    if options.profile:
        print(f"\n{measured}")
    return 0


def _one_graph(model: nn.Module) -> CompiledModule:
    """``model``, which must be compiled as a whole for its steps to be timed."""
    from x86quant.compiled import CompiledModule

    if not isinstance(model, CompiledModule):
        raise InvalidInputError(
            "--profile and --trace time the steps of one compiled graph, and this model has "
            "several parts: x86quant report tells the times of each"
        )
    return model


def _candidates(forms: loading.Forms, call: loading.Arguments) -> dict[str, Callable[[], object]]:
    models = {"float": forms.float_model, "stock int8": forms.converted, _COMPILED: forms.compiled}
    return {
        name: functools.partial(model, *call.args, **call.kwargs)
        for name, model in models.items()
        if model is not None
    }


def _facts(timings: dict[str, Timing]) -> dict[str, dict[str, float]]:
    ours = timings[_COMPILED].median
    return {
        name: {
            "median_ms": timing.median * 1e3,
            "minimum_ms": timing.minimum * 1e3,
            "times_x86quant": timing.median / ours,
        }
        for name, timing in timings.items()
    }


def _table(timings: dict[str, Timing]) -> str:
    from x86quant.terminal.text_table import text_table

    header = ("", "median ms", "least ms", "× x86quant")
    rows = [
        (
            name,
            f"{facts['median_ms']:.3f}",
            f"{facts['minimum_ms']:.3f}",
            f"{facts['times_x86quant']:.2f}",
        )
        for name, facts in _facts(timings).items()
    ]
    return text_table(header, rows, right=header[1:])
