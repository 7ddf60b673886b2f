"""The float network in eager PyTorch, the base line and what every SQNR is taken against."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from benchmarks.peers import Bind, Run


class Fp32:
    """Eager PyTorch with channels-last weights, with which its convolutions copy least."""

    packages: Mapping[str, str] = {}
    int8 = False

    def version(self) -> str:
        return f"torch {torch.__version__}, eager"

    def prepare(
        self,
        model: nn.Module,
        calibration: Sequence[torch.Tensor],
        example: torch.Tensor,
        threads: int,
    ) -> Bind:
        channels_last = copy.deepcopy(model).to(memory_format=torch.channels_last)

        def bind(x: torch.Tensor) -> Run:
            return lambda: channels_last(x)

        return bind


def peer(name: str) -> Fp32:
    """The peer; it has one name."""
    return Fp32()
