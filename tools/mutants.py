"""Breaks proofs and guards one place at a time, and looks whether a test fails.

    python -m tools.mutants --list
    python -m tools.mutants x86quant.forms.guard --most 40
    python -m tools.mutants --all --most 30

A mutant is a module with one comparison turned, one number off by one, one condition negated, one
"and" for an "or", one sum for a difference, or one statement left out that raises or returns. The
tests of a module are run on each until one fails; where none does, the mutant has survived, and its
line is printed: either a test is missing, or the line is not needed, or the two are the same (a
bound that is only about speed, say; lines with the words ``same either way`` are left out).

Each mutant is a fork of a process that has imported torch. ``--most`` draws as many of a module's
mutants at random, the same each time.
"""

from __future__ import annotations

import argparse
import ast
import copy
import dataclasses
import importlib.abc
import importlib.util
import io
import os
import random
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import torch

_SECONDS = 300
_ROOT = Path(__file__).resolve().parents[1]

#: The modules that prove, guard or check, and the tests that are to notice.
GUARDED: dict[str, tuple[str, ...]] = {
    "x86quant.kernels.saturation": ("tests/kernels/test_saturation.py",),
    "x86quant.tables.conditions": ("tests/tables",),
    "x86quant.tables.errata": ("tests/kernels/test_errata.py", "tests/tables"),
    "x86quant.forms.size_conditions": ("tests/forms", "tests/capture"),
    "x86quant.forms.guard": ("tests/forms", "tests/compiled/test_call_forms.py",
                             "tests/compiled/test_baked_attributes.py"),
    "x86quant.forms.call_form": ("tests/forms", "tests/compiled/test_call_forms.py",
                                 "tests/quantization/test_forms_of_calls.py",
                                 "tests/artifacts/test_artifact_forms.py"),
    "x86quant.capture.proof": ("tests/capture", "tests/quantization/test_faithful.py"),
    "x86quant.capture.variants": ("tests/capture", "tests/quantization/test_other_calls.py"),
    "x86quant.artifacts.file.container": ("tests/artifacts/test_artifacts.py",),
    "x86quant.artifacts.file.values": ("tests/artifacts/test_artifacts.py",
                                       "tests/artifacts/test_other_values.py"),
    "x86quant.huggingface.gguf_file": ("tests/huggingface/test_gguf.py",),
    "x86quant.huggingface.group_formats": ("tests/huggingface/test_group_checkpoints.py",),
}  # fmt: skip

_TURNED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
_OTHER: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.Div: ast.Mult, ast.LShift: ast.RShift, ast.RShift: ast.LShift,
}  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class Mutant:
    """A change of one place of a source.

    Attributes:
        line: where it is.
        said: what is changed.
        place: the number of the node, in the order of ``ast.walk``.
        way: which of the changes that the node has.
    """

    line: int
    said: str
    place: int
    way: int

    def tree(self, source: str) -> ast.Module:
        """The changed tree of ``source``."""
        tree = ast.parse(source)
        _change([*ast.walk(tree)][self.place], self.way)
        return ast.fix_missing_locations(tree)


def mutants(source: str) -> Iterator[Mutant]:
    """Each change that ``source`` has."""
    lines = source.split("\n")
    places = [*ast.walk(ast.parse(source))]
    # Whether a dataclass is frozen or has slots is for readers and for speed.
    decorators = [one for place in places for one in getattr(place, "decorator_list", ())]
    left_out = {id(part) for one in decorators for part in ast.walk(one)}
    for number, place in enumerate(places):
        line = getattr(place, "lineno", 0)
        if not line or id(place) in left_out or "same either way" in lines[line - 1]:
            continue
        for way in range(2):
            if said := _change(copy.copy(place), way):
                yield Mutant(line, said, number, way)


def _change(node: ast.AST, way: int) -> str | None:
    """What was changed in ``node``, or None: it has no such change. What it consists of is not."""
    if way == 0:
        if isinstance(node, ast.Compare) and type(node.ops[0]) in _TURNED:
            node.ops = [_TURNED[type(node.ops[0])](), *node.ops[1:]]
            return "comparison turned"
        if isinstance(node, ast.BoolOp):
            node.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
            return "and for or"
        if isinstance(node, ast.BinOp) and type(node.op) in _OTHER:
            node.op = _OTHER[type(node.op)]()
            return "another operation"
        if isinstance(node, ast.Constant) and type(node.value) is int:
            node.value += 1
            return "one more"
        if isinstance(node, ast.Constant) and type(node.value) is bool:
            node.value = not node.value
            return "the other truth"
    if way == 1:
        if isinstance(node, ast.If | ast.IfExp):
            node.test = ast.UnaryOp(ast.Not(), copy.deepcopy(node.test))
            return "condition negated"
        body = getattr(node, "body", None)
        if isinstance(body, list) and body and isinstance(body[0], ast.Raise | ast.Continue):
            node.body = [ast.Pass(), *body[1:]]  # type: ignore[attr-defined]
            return "nothing raised"
    return None


class _Loader(importlib.abc.Loader):
    def __init__(self, tree: ast.Module, path: str) -> None:
        self._code = compile(tree, path, "exec")

    def create_module(self, spec: object) -> None:
        """The usual one."""

    def exec_module(self, module: ModuleType) -> None:
        """Run the changed tree."""
        exec(self._code, module.__dict__)


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, name: str, tree: ast.Module, path: str) -> None:
        self._name, self._tree, self._path = name, tree, path

    def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:
        """The changed module."""
        if name != self._name:
            return None
        loader = _Loader(self._tree, self._path)
        return importlib.util.spec_from_file_location(name, self._path, loader=loader)


def _survives(name: str, tree: ast.Module, path: str, tests: Sequence[str]) -> bool:
    """Whether the tests pass with this tree as the module ``name``."""
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        signal.alarm(_SECONDS)
        assert "x86quant" not in sys.modules
        sys.meta_path.insert(0, _Finder(name, tree, path))
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 1)
            os.dup2(null, 2)
            import pytest

            options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
            os._exit(int(pytest.main([*options, *tests])))
    status = os.waitpid(child, 0)[1]
    return os.waitstatus_to_exitcode(status) == 0


def tried(name: str, most: int) -> tuple[int, list[str]]:
    """How many mutants of ``name`` were tried, and the lines of those that survived."""
    # Not by find_spec, which imports the package, whose modules are to be imported in the forks.
    origin = str(_ROOT / f"{name.replace('x86quant.kernels', 'kernels').replace('.', '/')}.py")
    source = Path(origin).read_text()
    found = [*mutants(source)]
    chosen = sorted(random.Random(0).sample(range(len(found)), min(most, len(found))))
    lines, left = source.split("\n"), []
    began = time.monotonic()
    for done, place in enumerate(chosen, 1):
        one = found[place]
        if _survives(name, one.tree(source), origin, GUARDED[name]):
            text = lines[one.line - 1].strip()
            left.append(f"{Path(origin).name}:{one.line}: {one.said}: {text}")
            print(left[-1], flush=True)
        if sys.stderr.isatty():
            print(f"\r{name}: {done} of {len(chosen)}", end="\r", file=sys.stderr)
    print(
        f"{name}: {len(chosen)} of {len(found)} mutants, {len(left)} survived, "
        f"{time.monotonic() - began:.0f} s", flush=True
    )  # fmt: skip
    return len(chosen), left


def main() -> int:
    """Try the modules that were named; 1 if any mutant survived."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("modules", nargs="*", metavar="MODULE")
    parser.add_argument("--all", action="store_true", help="every module on the list")
    parser.add_argument("--list", action="store_true", help="print the list")
    parser.add_argument("--most", type=int, default=10**6, help="mutants of each module")
    options = parser.parse_args()
    if options.list:
        print(*(f"{name}: {' '.join(tests)}" for name, tests in GUARDED.items()), sep="\n")
        return 0
    names = [*GUARDED] if options.all else options.modules
    if unknown := [name for name in names if name not in GUARDED]:
        parser.error(f"{', '.join(unknown)}: not on the list (--list)")
    torch.set_num_threads(1)
    results = [tried(name, options.most) for name in names]
    total, left = sum(n for n, _ in results), sum(len(found) for _, found in results)
    print(f"{total} mutants, {left} survived")
    return int(left > 0)


if __name__ == "__main__":
    raise SystemExit(main())
