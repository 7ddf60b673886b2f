"""Subclasses of ``nn.Linear`` that spell out its product: ``x @ self.weight.T + self.bias``."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

aten = torch.ops.aten
#: Of nothing but these, a result is a sum of products of what they are given.
_AFFINE = frozenset(
    [
        aten.t.default, aten.transpose.int, aten.permute.default, aten.numpy_T.default,
        aten.detach.default, aten.view.default, aten._unsafe_view.default, aten.reshape.default,
        aten.linear.default, aten.matmul.default, aten.mm.default, aten.addmm.default,
        aten.add.Tensor,
    ]
)  # fmt: skip


def computes_linear(module: nn.Linear) -> bool:
    """Whether a call of ``module``, of a class with a ``forward`` of its own, is ``F.linear``.

    Its ops must be affine in what it is given, and its answer that of ``F.linear`` for numbers
    drawn at random, weights and all: other such ops would answer otherwise.
    """
    taken = inspect.signature(module.forward).parameters
    if len(taken) != 1 or module._modules or not isinstance(module.weight, torch.Tensor):
        return False
    draw = torch.Generator().manual_seed(0)
    drawn: dict[str, Any] = {
        name: torch.randn(x.shape, generator=draw, dtype=torch.float32)
        for name, x in module.named_parameters()
    }

    def answer(x: torch.Tensor) -> Any:
        return torch.func.functional_call(module, drawn, (x,))

    for shape in ((3,), (2, 3)):
        x = torch.randn(*shape, module.in_features, generator=draw, dtype=torch.float32)
        try:
            with torch.no_grad():
                graph = make_fx(answer)(x).graph
                found = answer(x)
        except Exception:  # whatever its own code raises
            return False
        calls = [node.target for node in graph.nodes if node.op == "call_function"]
        expected = F.linear(x, drawn["weight"], drawn.get("bias"))
        if not _AFFINE.issuperset(calls) or not isinstance(found, torch.Tensor):
            return False
        if found.shape != expected.shape or not torch.allclose(
            found, expected, rtol=1e-4, atol=1e-5 * module.in_features**0.5
        ):
            return False
    return True
