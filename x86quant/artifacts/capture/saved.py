"""Compiled models that are called like the modules they were made from."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from x86quant.artifacts.capture.signatures import Signature
from x86quant.artifacts.capture.structures import fill
from x86quant.compiled import CompiledModule
from x86quant.errors import InvalidInputError
from x86quant.forms.size_conditions import Condition, excludes_one
from x86quant.lowering import FloatNode
from x86quant.lowering.passes import Report

#: Sizes that are remembered, so that a model that is called with new ones for ever stays small.
_MOST_SIZES = 256


class SavedModule(CompiledModule):
    """One graph for a whole module: keyword arguments, nested ones and results, sizes that vary.

    Attributes:
        signature: how it is called. A call that is not like the example it was made with, or has
            sizes for which the graph does not hold, raises InvalidInputError.
    """

    def __init__(
        self,
        graph_module: GraphModule,
        reports: tuple[Report, ...],
        float_nodes: tuple[FloatNode, ...],
        signature: Signature,
    ) -> None:
        super().__init__(graph_module, reports, float_nodes)
        self.signature = signature
        #: Sizes that were found to be ones for which the graph holds.
        self._allowed: set[tuple[torch.Size, ...]] = set()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the graph on arguments like those of the example."""
        leaves = self.signature.bind(args, kwargs)
        if not torch.compiler.is_compiling():
            self._check_sizes(leaves)
        return self.answer(leaves)

    def answer(self, leaves: Sequence[Any]) -> Any:
        """The result for tensors of sizes that were checked."""
        return fill(self.signature.result, super().forward(*leaves))

    def _check_sizes(self, leaves: Sequence[Any]) -> None:
        sizes = tuple(x.shape for x in leaves if isinstance(x, torch.Tensor))
        if len(sizes) == len(leaves) and sizes in self._allowed:
            return
        self.signature.check_sizes(leaves)
        if len(self._allowed) < _MOST_SIZES:
            self._allowed.add(sizes)

    def takes(self, leaves: Sequence[torch.Tensor]) -> bool:
        """Whether the graph holds for inputs of these sizes."""
        try:
            self.signature.check_sizes(leaves)
        except InvalidInputError:
            return False
        return True

    def with_ones(self, sizes: Sequence[Condition]) -> SavedModule:
        """The same for more sizes: ``sizes`` may also be one."""
        wider = dict.fromkeys(
            (">=", c[1], 1) if excludes_one(c) and c[1] in sizes else c
            for c in self.signature.conditions
        )
        other = copy.copy(self)
        other.signature = dataclasses.replace(self.signature, conditions=tuple(wider))
        return other


class SavedBySizes(nn.Module):
    """Several graphs of one module, each for sizes for which those before it do not hold.

    Attributes:
        models: the graphs; calls look alike for all of them.
    """

    def __init__(self, models: Sequence[SavedModule]) -> None:
        super().__init__()
        self.models = nn.ModuleList(models)
        self.eval()

    @property
    def first(self) -> SavedModule:
        """The graph for sizes like the example's."""
        first = self.models[0]
        assert isinstance(first, SavedModule)
        return first

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the first graph that holds for sizes like those given."""
        leaves = self.first.signature.bind(args, kwargs)
        for model in self.models:
            assert isinstance(model, SavedModule)
            if model.takes(leaves):
                return model.answer(leaves)
        self.first.signature.check_sizes(leaves)  # says why
        raise AssertionError("the first graph takes these sizes")
