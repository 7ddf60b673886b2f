"""PyTorch's own engines, as the stock FX workflow leaves them: nothing is rerouted."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.ao.quantization import QConfigMapping, get_default_qconfig_mapping
from torch.ao.quantization.backend_config import BackendConfig, get_onednn_backend_config
from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx

import x86quant
from benchmarks.peers import Bind, Run


class Stock:
    """One engine, with the qconfig mapping stock torch recommends for it.

    oneDNN also gets its own backend config: only with that does it fuse residual additions.
    """

    packages: Mapping[str, str] = {}
    int8 = True

    def __init__(self, engine: str) -> None:
        self.engine = engine

    def version(self) -> str:
        return f"torch {torch.__version__}, engine {self.engine}"

    def prepare(
        self,
        model: nn.Module,
        calibration: Sequence[torch.Tensor],
        example: torch.Tensor,
        threads: int,
    ) -> Bind:
        if x86quant.is_enabled():
            raise RuntimeError("x86quant.enable() is on: this would measure the routed engine")
        converted = convert(
            copy.deepcopy(model),
            get_default_qconfig_mapping(self.engine),
            calibration,
            example,
            engine=self.engine,
            backend_config=get_onednn_backend_config() if self.engine == "onednn" else None,
        )

        def bind(x: torch.Tensor) -> Run:
            def run() -> torch.Tensor:
                # Some ops ask for the engine when they run; setting it costs under 1 µs.
                torch.backends.quantized.engine = self.engine
                return converted(x)  # type: ignore[no-any-return]

            return run

        return bind


def convert(
    model: nn.Module,
    mapping: QConfigMapping,
    calibration: Sequence[torch.Tensor],
    example: torch.Tensor,
    *,
    engine: str,
    backend_config: BackendConfig | None = None,
) -> Any:
    """The stock FX workflow from end to end under ``engine``."""
    torch.backends.quantized.engine = engine
    prepared = prepare_fx(model, mapping, (example,), backend_config=backend_config)
    for batch in calibration:
        prepared(batch)
    return convert_fx(prepared, backend_config=backend_config)


def peer(name: str) -> Stock:
    """The engine called ``name``."""
    return Stock(name)
