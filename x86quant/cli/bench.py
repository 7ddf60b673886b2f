"""Measure models on every back end that is installed, and make a page about it.

    x86quant bench resnet18 bert-base lstm --out results
    x86quant bench resnet50 --batch 1,8 --threads 1,2 --backends x86quant,openvino,fp32
    x86quant bench mine:net --shape 1,3,224,224 --instances 4
    x86quant bench compare before/results.json after/results.json --fail-if-slower 3%

A MODEL is a network of torchvision (resnet18) or timm (timm:convnext_atto), a model of
transformers with random weights (bert-base, bert-large, distilbert-base, roberta-base, vit-b-16,
minilm), dlrm, lstm, a saved model, or module:factory. Back ends take turns in one process. --out
gets results.json, results.csv, report.md, report.html and, where matplotlib is installed, plot.png.

To see what another machine would do, cap this one: X86QUANT_ISA=avx2 x86quant bench ...
"""

from __future__ import annotations

import argparse
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from x86quant.cli import loading
from x86quant.errors import InvalidInputError
from x86quant.files import check_target

if TYPE_CHECKING:
    from x86quant.bench.one_model import BenchRequest
    from x86quant.bench.results import BenchResults, ModelRun, RunSetting

HELP = "measure models on every back end that is installed, or compare two such measurements"

_COMPARE = "compare"


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    from x86quant.bench.backends import BACKENDS, USUAL

    parser.add_argument(
        "models",
        nargs="+",
        metavar="MODEL",
        help="what to measure: see above; or compare and two files of results",
    )
    loading.add_input_arguments(parser)
    parser.add_argument(
        "--threads", type=_thread_counts, metavar="N,M", help="threads of each (default: torch's)"
    )
    parser.add_argument(
        "--backends",
        type=functools.partial(_names, known=BACKENDS),
        metavar="A,B",
        help=f"which to measure, of {', '.join(BACKENDS)}; or all (default: {', '.join(USUAL)}, "
        "and what is not installed is left out)",
    )
    parser.add_argument(
        "--batch", type=_counts, metavar="N,M", help="batch sizes (default: as the shape says)"
    )
    parser.add_argument(
        "--instances",
        type=loading.positive,
        default=1,
        metavar="N",
        help="split the cores among N processes of each back end that run at once",
    )
    parser.add_argument(
        "--rounds", type=loading.positive, default=30, help="turns of each (default: %(default)s)"
    )
    parser.add_argument(
        "--no-cold-start",
        dest="alone",
        action="store_false",
        help="leave out what takes processes of their own: cold start and memory",
    )
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="where to write the page")
    parser.add_argument("--resume", action="store_true", help="go on with what is in --out already")
    parser.add_argument(
        "--profile", action="store_true", help="time every step of the int8 model, too"
    )
    parser.add_argument(
        "--trace", type=Path, metavar="FILE", help="write a trace for Perfetto or chrome://tracing"
    )
    comparing = parser.add_argument_group("compare", "bench compare BEFORE.json AFTER.json")
    comparing.add_argument(
        "--fail-if-slower",
        type=_share,
        metavar="3%",
        help="exit with 1 if something is slower by this much, noise aside, or no longer runs",
    )
    comparing.add_argument("--across", action="store_true", help="compare different CPUs, too")


def run(options: argparse.Namespace) -> int:
    """Compare, or measure and print."""
    if options.models[0] == _COMPARE:
        return _compare(options)
    if options.fail_if_slower is not None or options.across:
        raise InvalidInputError("--fail-if-slower and --across belong to bench compare A B")
    if options.resume and options.out is None:
        raise InvalidInputError("--resume goes on with the results in --out: give that, too")
    if options.trace:
        check_target(options.trace, "--trace")  # now, not after measuring
    requests = _requests(options)
    if (options.profile or options.trace) and len(requests) > 1:
        raise InvalidInputError("--profile and --trace are of one model at one setting")
    if options.out is not None:
        _check_folder(options.out)
    return _measure(requests, options)


def _check_folder(folder: Path) -> None:
    from x86quant.bench.campaign import check_folder

    check_folder(folder)


def _requests(options: argparse.Namespace) -> list[BenchRequest]:
    """One for each model and setting; whatever cannot be measured is refused here."""
    from x86quant.bench.backends import BACKENDS, USUAL
    from x86quant.bench.one_model import BenchRequest
    from x86quant.bench.subjects import subject
    from x86quant.hardware.isa import forced_level

    inputs = loading.inputs_of(options)
    names = options.backends or (USUAL if options.backends is None else BACKENDS)
    found = []
    subjects = [subject(model, inputs) for model in dict.fromkeys(options.models)]
    if inputs and not any(one.inputs == inputs for one in subjects):
        raise InvalidInputError(f"{subjects[0].name} takes other inputs: {subjects[0].shapes}")
    for known in subjects:
        known.check()
        for batch in options.batch or (None,):
            resolved = known.resized(batch)
            for threads in _threads(options):
                setting = _setting(options, resolved.batch, threads, forced_level())
                found.append(
                    BenchRequest(
                        known.name, resolved.inputs, setting, options.rounds, names, options.alone
                    )
                )
    return found


def _threads(options: argparse.Namespace) -> tuple[int, ...]:
    import torch

    usual = torch.get_num_threads()
    if options.instances > 1:
        from x86quant.bench.instances import split_cores

        usual = len(split_cores(sorted(os.sched_getaffinity(0)), options.instances)[0])
    threads: tuple[int, ...] = options.threads or (usual,)
    return threads


def _setting(options: argparse.Namespace, batch: int, threads: int, isa: str | None) -> RunSetting:
    from x86quant.bench.results import RunSetting

    return RunSetting(batch, threads, options.instances, isa)


def _measure(requests: list[BenchRequest], options: argparse.Namespace) -> int:
    from x86quant.bench import campaign
    from x86quant.bench.summary_page import write_pages
    from x86quant.bench.summary_text import markdown

    done: Callable[[BenchResults], object] = lambda results: None  # noqa: E731
    if options.out is not None:
        done = functools.partial(write_pages, folder=options.out)
    results = campaign.run_campaign(
        requests, campaign.measure_apart, folder=options.out, resume=options.resume, done=done
    )
    print(results.to_json() if options.json else markdown(results), end="")
    if options.out is not None:
        done(results)
        loading.tell(f"wrote {options.out / 'report.html'}")
    if options.profile or options.trace:
        _profile(requests[0], options)
    missing = [run for run in results.runs if _lacks_ours(run)]
    if missing:
        names = dict.fromkeys(f"{run.model} ({run.setting})" for run in missing)
        loading.tell(f"x86quant bench: x86quant did not run {', '.join(names)}: see the reasons")
    return int(bool(missing))


def _lacks_ours(run: ModelRun) -> bool:
    from x86quant.bench.results import OURS

    return bool(run.error) or (OURS in run.results and run.measured(OURS) is None)


def _profile(request: BenchRequest, options: argparse.Namespace) -> None:
    """The time of every step of the model that was measured, made once more."""
    import torch

    from x86quant.bench.backends.own_backend import int8_model
    from x86quant.bench.one_model import task_of
    from x86quant.bench.subjects import subject
    from x86quant.profiling import profile
    from x86quant.profiling.roofline import using_threads

    found = subject(request.name, request.inputs)
    with using_threads(request.setting.threads), torch.no_grad():
        task = task_of(request, found, found.model())
        model, _ = int8_model(task)
        call = task.example
        measured = profile(model, call.args, kwargs=call.kwargs, runs=options.rounds)
    if options.trace:
        measured.to_chrome_trace(options.trace)
        loading.tell(f"wrote {options.trace}")
    if options.profile:
        (loading.tell if options.json else print)(f"\n{measured}")


def _compare(options: argparse.Namespace) -> int:
    from x86quant.bench.comparison import compare_results, differing_environment, slower_than
    from x86quant.bench.results import read_results
    from x86quant.bench.summary_text import as_json, as_text

    files = [Path(name) for name in options.models[1:]]
    if len(files) != 2:
        raise InvalidInputError(
            f"bench compare takes two files of results, not {len(files)}: "
            "bench compare before.json after.json"
        )
    before, after = (read_results(file) for file in files)
    verdicts = compare_results(before, after, across=options.across, only=options.backends or ())
    changes = differing_environment(before, after)
    print((as_json if options.json else as_text)(verdicts, changes))
    if options.fail_if_slower is None:
        return 0
    slower = slower_than(verdicts, options.fail_if_slower)
    for verdict in slower:
        loading.tell(f"{verdict.model}, {verdict.setting}, {verdict.backend}: {verdict}")
    return int(bool(slower))


def _names(text: str, known: tuple[str, ...]) -> tuple[str, ...]:
    """``"x86quant,fp32"`` as names, for argparse; "all" is an empty tuple."""
    if text == "all":
        return ()
    names = tuple(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in known:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(known)}, all")
    return names


def _counts(text: str) -> tuple[int, ...]:
    """``"1,8"`` as numbers, for argparse."""
    return tuple(dict.fromkeys(map(loading.positive, text.split(","))))


def _thread_counts(text: str) -> tuple[int, ...]:
    """The same of threads."""
    return tuple(dict.fromkeys(map(loading.thread_count, text.split(","))))


def _share(text: str) -> float:
    """``"3%"`` or ``"0.03"`` as 0.03, for argparse."""
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = -1.0
    if not 0 <= share < 10:
        raise argparse.ArgumentTypeError(f"{text!r} is not like 3% or 0.03")
    return share
