"""What nodes of a traced graph are on an example: ranks and types, which the graph does not say."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node


def seen_values(
    gm: GraphModule, wanted: Collection[Any], inputs: Sequence[torch.Tensor]
) -> dict[Node, torch.Tensor]:
    """The tensors, without data, that the nodes ``wanted`` are where ``gm`` runs on ``inputs``."""
    found: dict[Node, torch.Tensor] = {}

    class Watch(Interpreter):
        def run_node(self, n: Node) -> Any:
            value = super().run_node(n)
            if n in wanted and isinstance(value, torch.Tensor):
                found[n] = torch.empty_like(value, device="meta")
            return value

    if wanted:
        with torch.no_grad():
            Watch(gm).run(*inputs)
    return found
