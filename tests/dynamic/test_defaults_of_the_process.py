"""Int8 modules do the same whatever torch's default type or device is when they are made or run."""

from __future__ import annotations

import ast
import contextlib
import pathlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import x86quant

CASES: dict[str, tuple[nn.Module, tuple[Any, ...]]] = {
    "linear": (nn.Linear(16, 8), (torch.randn(3, 16),)),
    "lstm": (nn.LSTM(16, 256, 2, bidirectional=True), (torch.randn(5, 3, 16),)),
    "gru": (nn.GRU(16, 256), (torch.randn(5, 3, 16),)),
    "lstm cell": (nn.LSTMCell(16, 256), (torch.randn(3, 16),)),
    "gru cell": (nn.GRUCell(16, 256), (torch.randn(3, 16),)),
    "attention": (nn.MultiheadAttention(16, 2), (torch.randn(3, 5, 16),) * 3),
    "embedding": (nn.Embedding(50, 16), (torch.randint(0, 50, (3, 4)),)),
    "bag": (nn.EmbeddingBag(50, 16, mode="sum"), (torch.randint(0, 50, (3, 4)),)),
}


@contextlib.contextmanager
def default_type(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def run(module: nn.Module, arguments: tuple[Any, ...]) -> list[torch.Tensor]:
    with torch.no_grad():
        return [x for x in tree_leaves(module(*arguments)) if isinstance(x, torch.Tensor)]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_under_another_default_type(name: str, dtype: torch.dtype) -> None:
    module, arguments = CASES[name]
    made = x86quant.to_dynamic(module.eval(), embeddings=True)
    expected = run(made, arguments)
    with default_type(dtype):
        for ours in (made, x86quant.to_dynamic(module, embeddings=True)):
            found = run(ours, arguments)
            assert [x.dtype for x in found] == [x.dtype for x in expected]
            assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("name", ["lstm", "gru", "lstm cell", "gru cell"])
def test_under_another_default_device(name: str) -> None:
    module, arguments = CASES[name]
    made = x86quant.to_dynamic(module.eval())
    expected = run(made, arguments)
    with torch.device("meta"):
        found = run(made, arguments)
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_quantize_under_another_default_type(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)
    ).eval()
    x = torch.randn(4, 3, 9, 9)
    expected = run(x86quant.quantize(net, [(x,)], speed_check=False, progress=False), (x,))
    with default_type(dtype):
        found = run(x86quant.quantize(net, [(x,)], speed_check=False, progress=False), (x,))
    assert all(map(torch.equal, found, expected))


#: Functions whose result has the default type unless one is named.
FACTORIES = frozenset(
    ("zeros", "ones", "empty", "full", "tensor", "rand", "randn", "linspace", "eye")
)


def test_every_tensor_that_the_package_makes_says_its_type() -> None:
    root = pathlib.Path(x86quant.__file__).parent
    found = [
        f"{path.relative_to(root)}:{call.lineno}: {ast.unparse(call)}"
        for path in sorted(root.rglob("*.py"))
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and isinstance(call.func.value, ast.Name)
        and call.func.value.id == "torch"
        and call.func.attr in FACTORIES
        and not {"dtype", None} & {keyword.arg for keyword in call.keywords}
    ]
    assert not found, "\n".join(found)
