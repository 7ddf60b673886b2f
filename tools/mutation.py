"""What both mutation tests share: which mutants are drawn, tests on each in a fork, what is said.

``tools.mutants`` changes Python modules, ``tools.native_mutants`` C++ files.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import pytest
import torch

_SECONDS = 600
_NO_MUTANT = 77  # a status that pytest has not


class Mutant(NamedTuple):
    """A change of one place of a source.

    Attributes:
        line: where it is, from 1.
        said: what is changed.
        text: the line as it was; how it is now, if that is told.
        use: lets what runs next in this process use it, or says that it cannot be.
    """

    line: int
    said: str
    text: str
    use: Callable[[], bool]


def fails(use: Callable[[], bool], tests: Sequence[str]) -> bool | None:
    """Whether a test fails once ``use`` was called; None where it could not be used.

    In a fork of this process, which has imported torch and pytest, and nothing of x86quant.
    """
    assert "x86quant" not in sys.modules
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        signal.alarm(_SECONDS)
        null = os.open(os.devnull, os.O_RDWR)
        for place in range(3):
            os.dup2(null, place)
        status = _NO_MUTANT
        try:
            if use():
                options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
                status = int(pytest.main([*options, *tests]))
        finally:
            os._exit(status)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with contextlib.suppress(ProcessLookupError):  # what it started, which may run for ever
        os.killpg(child, signal.SIGKILL)
    return None if code == _NO_MUTANT else code != 0


def run(
    description: str,
    tests: Mapping[str, Sequence[str]],
    mutants: Callable[[str], Sequence[Mutant]],
    unchanged: Callable[[str], bool],
) -> int:
    """The command line of a mutation test: 1 if any mutant survived.

    Args:
        description: of the command.
        tests: those that are to notice a change, by the name of what is changed.
        mutants: of what has this name.
        unchanged: uses what has this name as a mutant is used, but as it is: its tests must pass.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--all", action="store_true", help="everything on the list")
    parser.add_argument("--list", action="store_true", help="print the list")
    parser.add_argument("--most", type=int, default=10**6, help="mutants of each, drawn at random")
    options = parser.parse_args()
    if options.list:
        print(*(f"{name}: {' '.join(of)}" for name, of in tests.items()), sep="\n")
        return 0
    names = [*tests] if options.all else options.names
    if unknown := [name for name in names if name not in tests]:
        parser.error(f"{', '.join(unknown)}: not on the list (--list)")
    if not names:
        parser.error("give names, or --all")
    torch.set_num_threads(1)
    for name in names:
        if fails(functools.partial(unchanged, name), tests[name]) is not False:
            raise SystemExit(f"{name}: it cannot be used as it is, or its tests fail")
    results = [_tried(name, mutants(name), tests[name], options.most) for name in names]
    total, left = sum(tried for tried, _ in results), sum(left for _, left in results)
    print(f"{total} mutants, {left} survived")
    return int(left > 0)


def _tried(name: str, found: Sequence[Mutant], tests: Sequence[str], most: int) -> tuple[int, int]:
    """How many were tried and how many survived, which are printed."""
    began, tried, left = time.monotonic(), 0, 0
    for one in random.Random(0).sample(found, len(found)):
        if tried == most:
            break
        failed = fails(one.use, tests)
        if failed is None:
            continue
        tried += 1
        if not failed:
            left += 1
            print(f"{name}:{one.line}: {one.said}: {one.text.strip()}", flush=True)
        if sys.stderr.isatty():
            print(f"\r{name}: {tried} of {min(most, len(found))}", end="\r", file=sys.stderr)
    took = time.monotonic() - began
    print(f"{name}: {tried} of {len(found)} mutants, {left} survived, {took:.0f} s", flush=True)
    return tried, left
