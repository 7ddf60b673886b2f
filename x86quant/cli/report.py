"""Report on a model: kernels, times, and how precise each layer is, as a page of HTML.

    x86quant report mine:net --data mine:batches --out report.html
    x86quant report net.x86q --float mine:net --data mine:batches

``--data`` names a callable that returns the batches to calibrate and compare on; without it they
are random, of ``--shape``, which tells nothing about precision on real ones. An int8 model is
compared with the float model that ``--float`` names.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from x86quant.cli import loading
from x86quant.errors import InvalidInputError
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
        "--float",
        metavar="MODULE:NAME",
        dest="float_model",
        help="the float model that MODEL was made from, to compare it with",
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
    batches = _batches(options, model)
    with using_threads(options.threads or torch.get_num_threads()), torch.no_grad():
        report = _report(model, batches, options)
    report.write(options.out)
    loading.tell(f"wrote {options.out}")
    print(report.to_json() if options.json else report)
    return 0


def _report(model: nn.Module, batches: list[Any], options: argparse.Namespace) -> ModelReport:
    from x86quant.quantization import quantize
    from x86quant.reporting.written import gathered

    first = batches[0]
    kwargs = dict(first) if isinstance(first, Mapping) else None
    args = () if kwargs else _arguments(model, first)
    known: dict[str, Any] = {"title": f"x86quant report: {options.model}"}
    if options.float_model is not None:
        known |= {"float_model": loading.load_model(options.float_model), "data": batches}
    if loading.form_of(model) == "float":
        known |= {"float_model": model, "data": batches}
        model = quantize(model, batches, example_inputs=args or None, speed_check=False)
    else:
        model = loading.compile_model(model, args, kwargs).compiled
    return gathered(model, args, kwargs, **known)


def _arguments(model: nn.Module, batch: Any) -> tuple[Any, ...]:
    """The positional arguments in a batch: targets behind them are none."""
    from x86quant.quantization.batches import Calibration

    return Calibration([batch], model).example.args


def _batches(options: argparse.Namespace, model: nn.Module) -> list[Any]:
    if options.data is not None:
        data = loading.load_object(options.data)
        found = loading.called(f"--data {options.data}", data) if callable(data) else data
        if not isinstance(found, Iterable):
            raise InvalidInputError(
                f"--data {options.data}: {type(found).__name__} is nothing that holds batches"
            )
        batches = list(found)
        if not batches:
            raise InvalidInputError(f"--data {options.data}: there are no batches in it")
        return batches
    inputs = loading.inputs_of(options)
    if not inputs:
        call = loading.arguments_for(options, model)  # what a saved model knows, or an error
        return [dict(call.kwargs) if call.kwargs else call.args]
    loading.tell("no --data: calibrating on random inputs")
    calls = [loading.random_arguments(inputs, seed) for seed in range(_RANDOM_BATCHES)]
    return [dict(one.kwargs) if one.kwargs else one.args for one in calls]
