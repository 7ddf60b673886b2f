"""What stands without torch.ao and without torch's quantized tensors."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.project.test_imports import modules

#: Packages and modules that are about stock quantization, and import torch.ao.
ABOUT_STOCK = ("x86quant.stock.", "x86quant.lowering.stock_layers")


@pytest.fixture(scope="module")
def output() -> str:
    command = [sys.executable, "-W", "ignore", "-m", "tests.without_torch_ao"]
    root = Path(__file__).parents[2]
    result = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


@pytest.mark.parametrize("name", ["convolutions", "transformer", "lstm"])
def test_models_are_quantized_saved_and_loaded_without_torch_ao(output: str, name: str) -> None:
    assert f"{name}: " in output


def test_only_what_is_about_stock_quantization_imports_torch_ao_at_once() -> None:
    """Others import it within the function that is about it, where it may be missing."""
    found = []
    for module, path in modules().items():
        if module.startswith(ABOUT_STOCK):
            continue
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [str(node.module)]
            found += [f"{module}: {name}" for name in names if f"{name}.".startswith("torch.ao.")]
    assert not found
