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

import functools
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tools.mutation import Mutant, run

_ROOT = Path(__file__).resolve().parents[1]
_HOSTILE = "tests/serving/test_hostile_programs.py"
_DAMAGED, _PACKED = (
    "tests/serving/test_damaged_programs.py",
    "tests/serving/test_packed_programs.py",
)
_JSON, _HEADERS = "tests/serving/test_program_json.py", "tests/serving/test_program_headers.py"
_ROWS, _SERVING = "tests/serving/test_program_row_packs.py", "tests/serving/test_serving.py"
_REACH, _ARENAS = "tests/runtime/test_reach.py", "tests/runtime/test_arenas.py"
_CALLS = "tests/serving/test_c_interface.py"

#: The files that guard, and the tests that are to notice.
GUARDS: dict[str, tuple[str, ...]] = {
    "kernels/runtime/reach.cpp": (_REACH, _HOSTILE),
    "kernels/runtime/step.cpp": (_DAMAGED, _SERVING, _HOSTILE),
    "kernels/serving/program_file.cpp": (_HEADERS, _DAMAGED),
    "kernels/serving/loader.cpp": (_ROWS, _HEADERS, _PACKED, _DAMAGED, _SERVING, _HOSTILE),
    "kernels/serving/json.cpp": (_JSON, _HEADERS, _DAMAGED),
    "kernels/serving/runtime.cpp": (_CALLS, _SERVING, _HEADERS, _DAMAGED),
    "kernels/runtime/packed_cache.cpp": ("tests/runtime/test_packed_cache.py", _PACKED),
    "kernels/runtime/build_id.cpp": ("tests/runtime/test_build_id.py", _PACKED),
    "kernels/runtime/arenas.cpp": (_ARENAS, _SERVING, _HOSTILE),
    "kernels/runtime/program.cpp": (_SERVING, _HEADERS, _DAMAGED, _HOSTILE),
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


def mutants(folder: Path, name: str) -> list[Mutant]:
    """Each change that the file ``name`` has; what uses it writes to ``folder``."""
    lines = (_ROOT / name).read_text().split("\n")
    found = []
    for number, line in enumerate(lines):
        code = line.partition("//")[0]
        if code.lstrip().startswith(("#", "template")) or "same either way" in line:
            continue
        for said, changed in _changes(code):
            text = "\n".join([*lines[:number], changed, *lines[number + 1 :]])
            use = functools.partial(_use, folder, name, text)
            told = f"{line.strip()}\n    now {changed.strip()}"
            found.append(Mutant(number + 1, said, told, use))
    return found


def _changes(code: str) -> Iterator[tuple[str, str]]:
    """(what is changed, the changed line) of each place of a line outside of its strings."""
    strings = [found.span() for found in re.finditer(r'"(\\.|[^"\\])*"', code)]

    def places(pattern: str | re.Pattern[str]) -> Iterator[re.Match[str]]:
        for found in re.finditer(pattern, code):
            if not any(first <= found.start() < last for first, last in strings):
                yield found

    for pattern, other, said in _CHANGES:
        for found in places(pattern):
            if said == "condition negated":  # the whole of it
                yield said, _negated(code, found.start())
            else:
                yield said, code[: found.start()] + other + code[found.end() :]
    for found in places(_NUMBER):
        yield "one more", code[: found.start()] + str(int(found[1]) + 1) + code[found.end() :]


def _negated(code: str, start: int) -> str:
    """``if (a && b)`` as ``if (!(a && b))``; what goes on in the next line does not compile."""
    first, depth = code.index("(", start), 0
    for end in range(first, len(code)):
        depth += {"(": 1, ")": -1}.get(code[end], 0)
        if depth == 0:
            return f"{code[: first + 1]}!{code[first : end + 1]}){code[end + 1 :]}"
    return f"{code[:start]}#"


def _copy(folder: Path) -> None:
    for name in ("x86quant", "kernels", "tests", "examples", "rules"):
        shutil.copytree(_ROOT / name, folder / name, symlinks=True)
    shutil.copy(_ROOT / "pyproject.toml", folder)


def _unchanged(folder: Path, name: str) -> bool:
    """Whether ``folder`` has a library that holds ``name`` as it is, made as for a mutant."""
    return _use(folder, name, (_ROOT / name).read_text())


def _use(folder: Path, name: str, text: str) -> bool:
    """Whether ``name`` compiles with this text; then this process has the package in ``folder``.

    Its library is linked with the objects of the build, but for this file.
    """
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    os.environ["PYTHONPATH"] = str(folder)
    for other in GUARDS:  # the one before is as it was
        shutil.copy(_ROOT / other, folder / other)
    from x86quant.cpp_library import LIBRARY
    from x86quant.kernels.native import toolchain

    built = max((_ROOT / "build").glob("objects-*"), key=lambda path: path.stat().st_mtime)
    kernels, rooms = _ROOT / "kernels", ("native", "steps", "serving")
    sources = [path for room in rooms for path in kernels.glob(f"{room}/*.cpp")]
    sources += [kernels / "runtime" / f"{one}.cpp" for one in toolchain.WITHOUT_TORCH]
    others = [path.relative_to(_ROOT).with_suffix(".o") for path in sources if path != _ROOT / name]
    source, made = folder / name, folder / "changed.o"  # tests compile it, too
    source.write_text(text)
    compiler = [*shlex.split(toolchain.compiler()), *toolchain.flags()]
    near = ["-I", str((_ROOT / name).parent), "-I", str(kernels / "serving/include")]
    compiled = subprocess.run(
        [*compiler, "-O1", "-w", *near, "-c", str(source), "-o", str(made)], check=False
    )
    if compiled.returncode != 0:
        return False
    exported = f"-Wl,--version-script={kernels / 'serving/exported.map'}"
    link = ["-shared", "-pthread", exported, *(str(built / one) for one in others), str(made)]
    subprocess.run([*compiler, *link, "-o", str(folder / "x86quant" / LIBRARY)], check=True)
    return True


def main() -> int:
    """Try the files that were named; 1 if any mutant survived."""
    with tempfile.TemporaryDirectory() as folder:
        _copy(Path(folder))
        found = functools.partial(mutants, Path(folder))
        return run(str(__doc__), GUARDS, found, functools.partial(_unchanged, Path(folder)))


if __name__ == "__main__":
    raise SystemExit(main())
