"""Report on a model: kernels, times, and how precise each layer is, as a page of HTML.

    x86quant report mine:net --data mine:batches --shape 1,3,224,224 --out report.html

``--data`` names a callable that returns the batches to calibrate and compare on; without it they
are random, which tells nothing about precision on real ones.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from x86quant.cli import loading
from x86quant.files import check_target

if TYPE_CHECKING:
    from torch import nn

    from x86quant.reporting import ModelReport

HELP = "a page about a model: kernels, times, precision"

_RANDOM_BATCHES = 4


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    loading.add_model_arguments(parser)
    parser.add_argument(
        "--data",
        metavar="MODULE:CALLABLE",
        help="returns batches like the model's inputs (default: random ones)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("x86quant-report.html"),
        help="the page (default: %(default)s)",
    )


def run(options: argparse.Namespace) -> int:
    """Quantize if need be, measure, write and print."""
    import torch

    from x86quant.profiling.roofline import using_threads

    check_target(options.out, "--out")  # now, not after measuring
    model = loading.load_model(options.model, packed_cache=options.packed_cache)
    call = loading.arguments_for(options, model)
    with using_threads(options.threads or torch.get_num_threads()), torch.no_grad():
        report = _report(model, call, options)
    report.write(options.out)
    loading.tell(f"wrote {options.out}")
    print(report.to_json() if options.json else report)
    return 0


def _report(model: nn.Module, call: loading.Arguments, options: argparse.Namespace) -> ModelReport:
    from x86quant.quantization import quantize
    from x86quant.quantization.layer_statistics import statistics
    from x86quant.reporting import model_report

    title = f"x86quant report: {options.model}"
    if loading.form_of(model) != "float":
        compiled = loading.compile_model(model, call.args, call.kwargs).compiled
        return model_report(compiled, call.args, kwargs=call.kwargs, title=title)
    batches = _batches(options, call)
    example = None if call.kwargs else call.args
    quantized: Any = quantize(model, batches, example_inputs=example, speed_check=False)
    found = statistics(model, quantized, batches, example_inputs=example)
    return model_report(
        quantized,
        call.args,
        kwargs=call.kwargs,
        title=title,
        precision={layer.name: layer for layer in found},
        notes=[("Quantization", str(quantized.quantization))],
    )


def _batches(options: argparse.Namespace, call: loading.Arguments) -> list[Any]:
    if options.data is None:
        loading.tell("no --data: calibrating on random inputs")
        inputs = [*(loading.InputShape(sizes) for sizes in options.shape), *options.input]
        calls = [loading.random_arguments(inputs, seed) for seed in range(_RANDOM_BATCHES)]
        return [dict(one.kwargs) if one.kwargs else one.args for one in calls]
    data = loading.load_object(options.data)
    return list(data() if callable(data) else data)
