"""Breaks proofs and guards one place at a time, and looks whether a test fails.

    python -m tools.mutants --list
    python -m tools.mutants x86quant.forms.guard --most 40
    python -m tools.mutants --all --most 30

A mutant is a module with one comparison turned, one number off by one, one condition negated, one
"and" for an "or", one sum for a difference, or one statement left out that raises or returns. The
tests of a module are run on each until one fails; where none does, the mutant has survived, and its
line is printed: either a test is missing, or the line is not needed, or the two are the same (a
bound that is only about speed, say; lines with the words ``same either way`` are left out).
"""

from __future__ import annotations

import ast
import copy
import functools
import importlib.abc
import importlib.util
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

from tools.mutation import Mutant, run

_ROOT = Path(__file__).resolve().parents[1]

#: The modules that prove, guard or check, and the tests that are to notice.
GUARDED: dict[str, tuple[str, ...]] = {
    "x86quant.kernels.saturation": ("tests/kernels/test_saturation.py",),
    "x86quant.tables.conditions": ("tests/tables",),
    "x86quant.tables.errata": ("tests/routing/test_router.py", "tests/tables",
                                "tests/kernels/test_errata.py"),
    "x86quant.forms.size_conditions": ("tests/forms", "tests/capture"),
    "x86quant.forms.guard": ("tests/forms", "tests/compiled/test_baked_attributes.py"),
    "x86quant.forms.call_form": ("tests/forms", "tests/quantization/test_forms_of_calls.py",
                                 "tests/artifacts/test_artifact_forms.py"),
    "x86quant.capture.proof": ("tests/capture", "tests/quantization/test_faithful.py"),
    "x86quant.capture.variants": ("tests/capture", "tests/quantization/test_other_calls.py"),
    "x86quant.artifacts.file.container": ("tests/artifacts/test_container.py",
                                          "tests/artifacts/test_artifacts.py"),
    "x86quant.artifacts.file.values": ("tests/artifacts/test_values.py",
                                       "tests/artifacts/test_artifacts.py",
                                       "tests/artifacts/test_other_values.py"),
    "x86quant.huggingface.gguf_file": ("tests/huggingface/test_gguf.py",
                                       "tests/huggingface/test_gguf_families.py"),
    "x86quant.huggingface.group_formats": ("tests/huggingface/test_group_checkpoints.py",
                                           "tests/huggingface/test_compressed_tensors.py"),
}  # fmt: skip

_TURNED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
_OTHER: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.Div: ast.Mult, ast.LShift: ast.RShift, ast.RShift: ast.LShift,
}  # fmt: skip


def mutants(name: str) -> list[Mutant]:
    """Each change that the module ``name`` has."""
    path = _path(name)
    source, found = Path(path).read_text(), []
    lines, places = source.split("\n"), [*ast.walk(ast.parse(source))]
    # Whether a dataclass is frozen or has slots is for readers and for speed.
    decorators = [one for place in places for one in getattr(place, "decorator_list", ())]
    left_out = {id(part) for one in decorators for part in ast.walk(one)}
    for number, place in enumerate(places):
        line = getattr(place, "lineno", 0)
        if not line or id(place) in left_out or "same either way" in lines[line - 1]:
            continue
        for way in range(2):
            if said := _change(copy.copy(place), way):
                use = functools.partial(_use, name, path, number, way)
                found.append(Mutant(line, said, lines[line - 1], use))
    return found


def _unchanged(name: str) -> bool:
    """Let the module ``name`` be imported as a mutant is."""
    path = _path(name)
    sys.meta_path.insert(0, _Finder(name, ast.parse(Path(path).read_text()), path))
    return True


def _path(name: str) -> str:
    # Not by find_spec, which imports the package, whose modules are to be imported in the forks.
    return str(_ROOT / f"{name.replace('x86quant.kernels', 'kernels').replace('.', '/')}.py")


def _use(name: str, path: str, place: int, way: int) -> bool:
    """Let the module ``name`` be imported as its source with this place changed."""
    tree = ast.parse(Path(path).read_text())
    _change([*ast.walk(tree)][place], way)
    sys.meta_path.insert(0, _Finder(name, ast.fix_missing_locations(tree), path))
    return True


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


if __name__ == "__main__":
    raise SystemExit(run(str(__doc__), GUARDED, mutants, _unchanged))
