"""The runtimes x86quant is measured against, each behind the same few calls.

A peer lives in one module and imports what it needs where it needs it, so that one that is not
installed costs nothing but its column. ``PEERS`` names them all; ``load`` fetches one.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, TypeAlias

if TYPE_CHECKING:
    import torch
    from torch import nn

OURS = "ours"
# The order of the tables' columns, and the module each is in.
PEERS: Mapping[str, str] = {
    OURS: "ours",
    "openvino": "openvino_peer",
    "onnxruntime": "onnxruntime_peer",
    "pt2e": "pt2e",
    "x86": "stock",
    "fbgemm": "stock",
    "onednn": "stock",
    "fp32": "fp32",
}
STOCK_ENGINES = ("x86", "fbgemm", "onednn")
# No environment variable holds these to a lower instruction-set level. The others' oneDNN,
# OpenVINO's own included, FBGEMM and Inductor's code generator all obey one.
IGNORE_ISA = ("onnxruntime",)

Run: TypeAlias = "Callable[[], torch.Tensor]"
Bind: TypeAlias = "Callable[[torch.Tensor], Run]"


class Peer(Protocol):
    """One runtime.

    Attributes:
        packages: import name -> what to ``pip install``, for what x86quant does not itself need.
        int8: whether it computes in int8, and so has an SQNR worth showing.
    """

    packages: Mapping[str, str]
    int8: bool

    def version(self) -> str:
        """What was measured."""

    def prepare(
        self,
        model: nn.Module,
        calibration: Sequence[torch.Tensor],
        example: torch.Tensor,
        threads: int,
    ) -> Bind:
        """Quantize and compile ``model``, which stays as it is, for inputs like ``example``.

        Returns:
            A function that hands one input to the runtime, in the way cheapest for it, and
            returns what runs the network on that input; only the latter is timed.
        """


def load(name: str) -> Peer:
    """The peer called ``name``; its third parties are not imported yet."""
    module = importlib.import_module(f"{__name__}.{PEERS[name]}")
    peer: Peer = module.peer(name)
    return peer


def missing(peer: Peer) -> str | None:
    """Why ``peer`` cannot run here and the command that helps, or None."""
    absent = {k: v for k, v in peer.packages.items() if importlib.util.find_spec(k) is None}
    if not absent:
        return None
    wanted = " ".join(f"'{requirement}'" for requirement in absent.values())
    return f"{', '.join(absent)} not installed: pip install {wanted}"
