"""The import graph: packages depend on each other one way only."""

from __future__ import annotations

import ast
import itertools
import re
import symtable
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import x86quant

ROOT = Path(__file__).parents[2]
OURS = ("tests", "benchmarks")
FOLDERS = {"x86quant": ROOT / "x86quant", "x86quant.kernels": ROOT / "kernels"}


def modules() -> dict[str, Path]:
    found = {}
    for package, folder in FOLDERS.items():
        for path in folder.rglob("*.py"):
            parts = path.relative_to(folder).with_suffix("").parts
            parts = parts[:-1] if parts[-1] == "__init__" else parts
            found[".".join([package, *parts])] = path
    return found


def imported(module: str, path: Path, known: set[str], *, typing: bool = True) -> Iterator[str]:
    """What ``module`` imports of this project, at its top or in a function or for types only."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for block in tree.body if not typing else ():
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING":
            block.body = [ast.Pass()]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            origin = str(node.module)
            if node.level:
                package = module if path.name == "__init__.py" else module.rpartition(".")[0]
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                origin = ".".join([*above, *filter(None, [node.module])])
            for alias in node.names:
                inner = f"{origin}.{alias.name}"
                yield inner if inner in known else origin


def room(module: str) -> str:
    """The package that a module belongs to: ``x86quant.runtime.plan`` to ``runtime``."""
    return module.split(".")[1] if "." in module else module


def package_graph() -> dict[str, dict[str, str]]:
    """For each package those it imports from, each with one import as an example."""
    known = modules()
    graph: dict[str, dict[str, str]] = defaultdict(dict)
    for module, path in known.items():
        # The root offers the public names of all packages and is used by none of them.
        if module == "x86quant":
            continue
        for target in imported(module, path, set(known)):
            if target.split(".")[0] == "x86quant" and room(target) != room(module):
                graph[room(module)].setdefault(room(target), f"{module} imports {target}")
    return graph


def circles(graph: dict[str, dict[str, str]]) -> list[list[str]]:
    """Every path that comes back to its start, as the imports along it."""
    found: list[list[str]] = []
    done: set[str] = set()

    def visit(package: str, path: list[str]) -> None:
        if package in path:
            ring = [*path[path.index(package) :], package]
            found.append([graph[a][b] for a, b in itertools.pairwise(ring)])
        elif package not in done:
            for target in graph.get(package, {}):
                visit(target, [*path, package])
            done.add(package)

    for package in list(graph):
        visit(package, [])
    return found


def test_no_package_imports_one_that_imports_it() -> None:
    assert not circles(package_graph())


def packages_in_order() -> list[str]:
    """The packages as docs/architecture.md lists them, from those that everything may use."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    return [name for row in rows for name in re.findall(r"`(\w+)/`", row)]


def test_a_package_imports_only_from_packages_further_up() -> None:
    order = {name: place for place, name in enumerate(packages_in_order())}
    graph = package_graph()
    folders = {path.parent.name for path in (ROOT / "x86quant").glob("*/__init__.py")}
    assert {*order} == folders | {"kernels"}
    wrong = [
        example
        for package, targets in graph.items()
        for target, example in targets.items()
        if {package, target} <= order.keys() and order[target] > order[package]
    ]
    assert not wrong


def test_no_two_modules_import_each_other() -> None:
    """At their top or in a function; what is for types only does not count."""
    known = modules()
    graph = {
        module: {t for t in imported(module, path, set(known), typing=False) if t in known}
        for module, path in known.items()
    }
    pairs = {frozenset((a, b)) for a, found in graph.items() for b in found - {a} if a in graph[b]}
    # A package and its own modules are one thing.
    assert not [p for p in map(sorted, pairs) if not p[1].startswith(f"{p[0]}.")]


def test_only_the_command_line_imports_the_root_package() -> None:
    users = [f"{a}: {example}" for a, targets in package_graph().items()
             for b, example in targets.items() if b == "x86quant" and a != "cli"]  # fmt: skip
    assert not users


def test_circles_are_seen() -> None:
    ring = {"a": {"b": "a imports b"}, "b": {"c": "b imports c"}, "c": {"a": "c imports a"}}
    assert circles(ring) == [["a imports b", "b imports c", "c imports a"]]


def test_no_two_classes_have_one_name() -> None:
    homes: dict[str, list[str]] = defaultdict(list)
    for module, path in modules().items():
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                homes[node.name].append(module)
    assert not {name: where for name, where in homes.items() if len(where) > 1}


def test_no_two_modules_have_one_name() -> None:
    homes: dict[str, list[str]] = defaultdict(list)
    for module, path in modules().items():
        if path.name not in ("__init__.py", "__main__.py", "sanitize.py"):
            homes[path.name].append(module)
    commands = "x86quant.cli."  # named as what the user types
    found = {
        name: where
        for name, where in homes.items()
        if sum(not module.startswith(commands) for module in where) > 1
    }
    assert not found


def test_the_lists_of_public_names_agree() -> None:
    """What ``import x86quant`` offers: typed for checkers, found on first use, and listed."""
    assert sorted(x86quant.__all__) == list(x86quant.__all__)
    assert set(x86quant.__all__) == set(x86quant._MODULE_OF)
    tree = ast.parse((ROOT / "x86quant" / "__init__.py").read_text(encoding="utf-8"))
    (typed,) = (
        node
        for node in tree.body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    )
    homes = {
        alias.name: str(node.module)
        for node in typed.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    # Extras need packages that may not be there, and are not in ``__all__``.
    offered = {**x86quant._MODULE_OF, **x86quant._EXTRAS}
    assert homes == {name: f"x86quant.{module}" for name, module in offered.items()}
    assert not set(x86quant._MODULE_OF) & set(x86quant._EXTRAS)
    for name in x86quant.__all__:
        assert getattr(x86quant, name) is not None


def names_missing(importing: Path, root: Path) -> list[str]:
    """What a file imports of ``tests`` and ``benchmarks`` that is not said there.

    mypy does not look: tests call layers by names that torch types as "Tensor or Module", so
    attributes go unchecked there. Without this such a name is found as the whole suite runs.
    """
    missing = []
    for node in ast.walk(ast.parse(importing.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith(OURS):
            place = root.joinpath(*str(node.module).split("."))
            source = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
            table = symtable.symtable(source.read_text(encoding="utf-8"), str(source), "exec")
            said = {symbol.get_name() for symbol in table.get_symbols() if symbol.is_assigned()}
            said |= {symbol.get_name() for symbol in table.get_symbols() if symbol.is_imported()}
            said |= {path.stem for path in place.glob("*")}
            missing += [f"{importing.name}: {node.module}.{a.name}"
                        for a in node.names if a.name not in said]  # fmt: skip
    return missing


def test_what_tests_and_benchmarks_import_of_each_other_is_there() -> None:
    files = [path for folder in OURS for path in (ROOT / folder).rglob("*.py")]
    assert not [name for path in files for name in names_missing(path, ROOT)]


def test_names_that_moved_are_seen(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "__init__.py").touch()
    (tmp_path / "tests" / "test_a.py").write_text("import os\ndef here(): ...\nclass Too: ...\n")
    importing = tmp_path / "tests" / "test_b.py"
    importing.write_text("from tests.test_a import here, Too, os, gone\nfrom tests import test_a\n")
    assert names_missing(importing, tmp_path) == ["test_b.py: tests.test_a.gone"]
