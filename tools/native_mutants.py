"""Breaks what guards program files one place at a time, and looks whether a test fails.

    python -m tools.native_mutants kernels/runtime/reach.cpp
    python -m tools.native_mutants --all --most 30

As ``tools.mutants`` does with modules: a comparison is turned, a sum becomes a difference, a number
is off by one, an ``and`` an ``or``, or what is required is not. Each mutant is compiled, linked
with the objects of the build to the library that serves program files, and stands in a copy of the
package before which the tests run. What does not compile is no mutant. Lines with the words "same
either way" are left out. Needs a checkout that has been built.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from x86quant.cpp_library import LIBRARY
from x86quant.kernels.native import toolchain

_ROOT = Path(__file__).resolve().parents[1]
_SECONDS = 600
_HOSTILE = "tests/serving/test_hostile_programs.py"
_DAMAGED, _PACKED = (
    "tests/serving/test_damaged_programs.py",
    "tests/serving/test_packed_programs.py",
)
_JSON, _HEADERS = "tests/serving/test_program_json.py", "tests/serving/test_program_headers.py"
_ROWS, _SERVING = "tests/serving/test_program_row_packs.py", "tests/serving/test_serving.py"

#: The files that guard, and the tests that are to notice.
GUARDS: dict[str, tuple[str, ...]] = {
    "kernels/runtime/reach.cpp": (_HOSTILE,),
    "kernels/runtime/step.cpp": (_HOSTILE, _DAMAGED, _SERVING),
    "kernels/serving/program_file.cpp": (_HEADERS, _DAMAGED),
    "kernels/serving/loader.cpp": (_ROWS, _HEADERS, _PACKED, _HOSTILE, _DAMAGED, _SERVING),
    "kernels/serving/json.cpp": (_JSON, _HEADERS, _DAMAGED),
    "kernels/runtime/packed_cache.cpp": (_PACKED,),
}

#: What is looked for, and what it becomes. Blanks keep the brackets of templates out.
_CHANGES: tuple[tuple[str, str, str], ...] = (
    (r" < ", " <= ", "comparison turned"),
    (r" <= ", " < ", "comparison turned"),
    (r" > ", " >= ", "comparison turned"),
    (r" >= ", " > ", "comparison turned"),
    (r" == ", " != ", "comparison turned"),
    (r" != ", " == ", "comparison turned"),
    (r" && ", " || ", "or for and"),
    (r" \|\| ", " && ", "and for or"),
    (r" \+ ", " - ", "a difference for a sum"),
    (r" - ", " + ", "a sum for a difference"),
    (r" \+= ", " -= ", "a difference for a sum"),
    (r"\bstd::min\(", "std::max(", "the most for the least"),
    (r"\bstd::max\(", "std::min(", "the least for the most"),
    (r"\bcontinue;", ";", "not left out"),
    (r"\breturn false;", "return true;", "the other truth"),
    (r"\breturn true;", "return false;", "the other truth"),
    (r"\bif \((?!const |auto )", "if (!", "condition negated"),
    (r"^ +require\(", "if (false) require(", "nothing required"),
)
_NUMBER = re.compile(r"(?<![\w.\"'])(\d+)(?![\w.\"'])")


@dataclass(frozen=True, slots=True)
class Mutant:
    """A line of a source that says something else."""

    number: int
    said: str
    line: str


def mutants(source: str) -> Iterator[Mutant]:
    """Each change of one place that ``source`` has."""
    for number, line in enumerate(source.split("\n")):
        code = line.partition("//")[0]
        if code.lstrip().startswith(("#", "template")) or "same either way" in line:
            continue
        strings = [found.span() for found in re.finditer(r'"(\\.|[^"\\])*"', code)]
        for pattern, other, said in _CHANGES:
            for found in re.finditer(pattern, code):
                if not any(first <= found.start() < last for first, last in strings):
                    changed = code[: found.start()] + other + code[found.end() :]
                    if said == "condition negated":  # the whole of it
                        changed = _negated(code, found.start())
                    yield Mutant(number, said, changed)
        for found in _NUMBER.finditer(code):
            if not any(first <= found.start() < last for first, last in strings):
                more = str(int(found[1]) + 1)
                yield Mutant(number, "one more", code[: found.start()] + more + code[found.end() :])


def _negated(code: str, start: int) -> str:
    """``if (a && b)`` as ``if (!(a && b))``; what goes on in the next line does not compile."""
    first, depth = code.index("(", start), 0
    for end in range(first, len(code)):
        depth += {"(": 1, ")": -1}.get(code[end], 0)
        if depth == 0:
            return f"{code[: first + 1]}!{code[first : end + 1]}){code[end + 1 :]}"
    return f"{code[:start]}#"


class Library:
    """A copy of the package whose library holds one changed file.

    Args:
        folder: of the copy.
        file: the source that is changed, below the checkout.
    """

    def __init__(self, folder: Path, file: Path) -> None:
        self._folder, self._file = folder, file
        built = max((_ROOT / "build").glob("objects-*"), key=lambda path: path.stat().st_mtime)
        kernels, rooms = _ROOT / "kernels", ("native", "steps", "serving")
        sources = [path for room in rooms for path in kernels.glob(f"{room}/*.cpp")]
        sources += [kernels / "runtime" / f"{name}.cpp" for name in toolchain.WITHOUT_TORCH]
        self._objects = [
            str(built / path.relative_to(_ROOT).with_suffix(".o"))
            for path in sources
            if path != file
        ]
        for name in ("x86quant", "kernels", "tests", "examples", "rules"):
            shutil.copytree(_ROOT / name, folder / name, symlinks=True, dirs_exist_ok=True)
        shutil.copy(_ROOT / "pyproject.toml", folder)

    def holds(self, text: str) -> bool:
        """Whether the file compiles with this text; if so the library has it."""
        compiler, flags = shlex.split(toolchain.compiler()), [*toolchain.flags(), "-O1", "-w"]
        with tempfile.TemporaryDirectory() as scratch:
            source, made = Path(scratch, self._file.name), Path(scratch, "changed.o")
            source.write_text(text)
            near = ["-I", str(self._file.parent), "-I", str(_ROOT / "kernels/serving/include")]
            command = [*compiler, *flags, *near, "-c", str(source), "-o", str(made)]
            if subprocess.run(command, check=False, capture_output=True).returncode != 0:
                return False
            exported = f"-Wl,--version-script={_ROOT / 'kernels/serving/exported.map'}"
            target = Path(scratch, LIBRARY)
            link = ["-shared", "-pthread", exported, *self._objects, str(made), "-o", str(target)]
            subprocess.run([*compiler, *flags, *link], check=True)
            shutil.move(target, self._folder / "x86quant" / LIBRARY)
        return True

    def passes(self, tests: Sequence[str]) -> bool:
        """Whether the tests pass in the copy."""
        words = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *tests]
        environment = {**os.environ, "PYTHONPATH": str(self._folder), "OMP_NUM_THREADS": "1"}
        try:
            ended = subprocess.run(
                [sys.executable, "-m", "pytest", *words], cwd=self._folder, env=environment,
                capture_output=True, timeout=_SECONDS, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return False
        return ended.returncode == 0


def tried(name: str, most: int) -> tuple[int, int]:
    """How many mutants of the file ``name`` were tried and how many survived, which are printed."""
    file = _ROOT / name
    source = file.read_text()
    lines, found = source.split("\n"), [*mutants(source)]
    random.Random(0).shuffle(found)
    began, count, left = time.monotonic(), 0, 0
    with tempfile.TemporaryDirectory() as folder:
        library = Library(Path(folder), file)
        if not (library.holds(source) and library.passes(GUARDS[name])):
            raise SystemExit(f"{name}: the tests fail as it is")
        for one in found:
            if count == most:
                break
            changed = [*lines[: one.number], one.line, *lines[one.number + 1 :]]
            if not library.holds("\n".join(changed)):
                continue
            count += 1
            if library.passes(GUARDS[name]):
                left += 1
                print(f"{name}:{one.number + 1}: {one.said}: {one.line.strip()}", flush=True)
    seconds = time.monotonic() - began
    print(f"{name}: {count} of about {len(found)}, {left} survived, {seconds:.0f} s", flush=True)
    return count, left


def main() -> int:
    """Try the files that were named; 1 if any mutant survived."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="*", metavar="FILE", choices=[[], *GUARDS])
    parser.add_argument("--all", action="store_true", help=", ".join(GUARDS))
    parser.add_argument("--most", type=int, default=10**6, help="mutants of each file")
    options = parser.parse_args()
    if not (options.all or options.files):
        parser.error("name files, or --all")
    results = [tried(name, options.most) for name in (GUARDS if options.all else options.files)]
    print(f"{sum(n for n, _ in results)} mutants, {sum(left for _, left in results)} survived")
    return int(any(left for _, left in results))


if __name__ == "__main__":
    raise SystemExit(main())
