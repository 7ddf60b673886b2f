"""What an install says before it fails, what the compiled parts need, and a newer torch."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from x86quant import extension

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("lie", "words"),
    [
        ("sys.modules['torch'] = None", "this build needs torch 2.13 or 2.14: pip install"),
        (
            "sys.modules['torch'] = types.SimpleNamespace(__version__='2.12.1+cpu')",
            "this build needs torch 2.13 or 2.14, and finds 2.12.1+cpu: pip install",
        ),
        (
            "import setuptools; setuptools.__version__ = '68.1.2'",
            'needs setuptools 77 or later, and finds 68.1.2: pip install "setuptools>=77"',
        ),
        ("sys.argv = ['setup.py', 'develop', '--no-deps']", "pip install --upgrade pip"),
    ],
)
def test_a_source_install_says_what_it_needs(lie: str, words: str) -> None:
    code = f"import sys, types; {lie}; exec(open('setup.py').read())"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_an_install_without_a_compiler_has_no_compiled_part_and_says_so() -> None:
    code = "import sys; sys.argv = ['setup.py', '--version']; exec(open('setup.py').read())"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        cwd=ROOT,
        env={**os.environ, "CXX": "there-is-no-such-compiler"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert "there is no C++ compiler (there-is-no-such-compiler). Installing without" in done.stderr


def needed(library: Path) -> set[str]:
    """The symbols that ``library`` wants of others."""
    if shutil.which("nm") is None:
        pytest.skip("there is no nm (binutils)")
    command = ["nm", "-D", "--undefined-only", "--format=posix", str(library)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    return {line.split()[0] for line in lines}


def native_library() -> Path:
    """The main compiled part."""
    return Path(extension.native().__file__)


#: Of torch's C++: mangled names in its namespaces, and those of its Python side.
OF_TORCH = re.compile(r"_Z\w*?(2at|3c10|5torch|6caffe2)(?=\d|$)|THP|_ZTV?N?(2at|3c10|5torch)")


def test_the_main_library_needs_three_functions_of_torch() -> None:
    """All of the C interface that torch keeps as it is; no name of its C++."""
    symbols = needed(native_library())
    assert {s for s in symbols if re.search("torch|aoti|c10|caffe", s)} == {
        "torch_get_num_threads", "aoti_record_function_start", "aoti_record_function_end",
    }  # fmt: skip
    assert not any(OF_TORCH.match(s) for s in symbols)
    assert not any("pybind" in s for s in symbols)
    part = extension.stock_library()
    if part.exists():
        assert any(OF_TORCH.match(s) for s in needed(part)), "the pattern finds torch's C++"


def test_the_main_library_belongs_to_no_python() -> None:
    """What it is compiled with offers the limited API alone; these four are a part of that."""
    python = {s for s in needed(native_library()) if re.match("_?Py", s)}
    assert "PyFloat_AsDouble" in python
    inner = {"_Py_Dealloc", "_Py_NoneStruct", "_Py_TrueStruct", "_Py_FalseStruct"}
    assert {s for s in python if s.startswith("_")} <= inner
    header = (ROOT / "kernels" / "python" / "objects.h").read_text()
    assert "#define Py_LIMITED_API 0x030A0000" in header


def test_the_library_for_programs_needs_nothing_of_torch_or_python() -> None:
    symbols = needed(native_library().with_name("libx86quant_runtime.so"))
    assert not any(re.search("torch|aoti|c10|caffe", s) or re.match("_?Py", s) for s in symbols)


def test_a_newer_torch_is_told() -> None:
    found = extension.untested_torch("2.15.0+cpu")
    assert found is not None
    for words in ("torch 2.13 and 2.14", "this is torch 2.15.0+cpu", "it should run"):
        assert words in found
    for tested in ("2.13.0", "2.13.1+cpu", "2.14.1", "2.14.0a0+git1234"):
        assert extension.untested_torch(tested) is None
    assert extension.untested_torch("2.100.0") is not None
    assert extension.untested_torch("3.0.0rc1") is not None


def test_the_build_and_the_package_name_the_same_torchs() -> None:
    (said,) = re.findall(r"^FBGEMM_OF_TORCH = (.+)$", (ROOT / "setup.py").read_text(), re.MULTILINE)
    assert tuple(ast.literal_eval(said)) == extension.TESTED


def test_an_install_has_every_package() -> None:
    """Their list is written out, and an editable install finds those that it lacks all the same."""
    text = (ROOT / "pyproject.toml").read_text()
    (listed,) = re.findall(r"^packages = \[\n(.*?)^\]", text, flags=re.MULTILINE | re.DOTALL)
    folders = [
        path.parent
        for name in ("x86quant", "kernels")
        for path in (ROOT / name).rglob("__init__.py")
    ]
    names = [".".join(folder.relative_to(ROOT).parts) for folder in folders]
    wanted = {re.sub(r"^kernels", "x86quant.kernels", name) for name in names} | {"x86quant.rules"}
    assert set(re.findall(r'"(.+?)"', listed)) == wanted
