"""What nodes of a traced graph are on an example: ranks and types, which the graph does not say."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node


def seen_values(
    gm: GraphModule, inputs: Sequence[torch.Tensor], wanted: Collection[Any] | None = None
) -> dict[Node, torch.Tensor]:
    """The tensors, without data, that nodes are where ``gm`` runs on ``inputs``.

    Those of ``wanted``, or all.
    """
    found: dict[Node, torch.Tensor] = {}

    class Watch(Interpreter):
        def run_node(self, n: Node) -> Any:
            value = super().run_node(n)
            if isinstance(value, torch.Tensor) and (wanted is None or n in wanted):
                found[n] = torch.empty_like(value, device="meta")
            return value

    with torch.no_grad():
        Watch(gm).run(*[x.clone() for x in inputs])
    return found
