"""What an install says: before it fails, and where torch is another than it was built for."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

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


def test_the_extension_knows_the_torch_it_was_built_for() -> None:
    extension.load()
    built = torch.ops.x86quant.built_for()
    assert built.split("+")[0] == torch.__version__.split("+")[0]
    assert extension.other_torch(built, torch.__version__) is None


def test_another_torch_is_told() -> None:
    found = extension.other_torch("2.13.0", "2.15.0+cpu")
    assert found is not None
    for words in ("built for torch 2.13.0", "torch 2.13 and 2.14", "this is torch 2.15.0+cpu"):
        assert words in found
    assert extension.other_torch("2.13.0", "2.13.1") is None


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
