"""x86quant's own runtime, on what stock FX converted with x86quant's qconfig mapping."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

import torch
from torch import nn

import x86quant
from benchmarks.peers import Bind, Run
from benchmarks.peers.stock import convert


class Ours:
    """``x86quant.compile``."""

    packages: Mapping[str, str] = {}
    int8 = True

    def version(self) -> str:
        return f"x86quant {x86quant.__version__}, rules {x86quant.current_rules().name}"

    def prepare(
        self,
        model: nn.Module,
        calibration: Sequence[torch.Tensor],
        example: torch.Tensor,
        threads: int,
    ) -> Bind:
        mapping = x86quant.get_default_qconfig_mapping()
        converted = convert(copy.deepcopy(model), mapping, calibration, example, engine="x86")
        compiled = x86quant.compile(converted, (example,))

        def bind(x: torch.Tensor) -> Run:
            return lambda: compiled(x)

        return bind


def peer(name: str) -> Ours:
    """The peer; it has one name."""
    return Ours()
