"""PyTorch's own int8 engines, as the stock workflows leave them: nothing is rerouted."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from x86quant.bench.backends import Bind, Prepared, Task
from x86quant.given_model import Arguments

if TYPE_CHECKING:
    from torch import nn

_FILE = "model.pt"


class StockBackend:
    """One engine, with the qconfig mapping stock torch recommends for it.

    Static FX quantization for convolutional networks, dynamic linears and LSTMs for others. oneDNN
    also gets its own backend config: only with that does it fuse residual additions.
    """

    packages: Mapping[str, str] = {}
    int8 = True

    def __init__(self, engine: str) -> None:
        self.engine = engine
        self.title = f"PyTorch int8, {engine}"

    def version(self) -> str:
        """What was measured."""
        import torch

        return f"torch {torch.__version__}, engine {self.engine}"

    def refusal(self, task: Task) -> str | None:
        """Why it is not for this model."""
        if task.form == "float" or (task.form == "converted" and self.engine == "x86"):
            return None
        return "needs the float model, and this one is int8"

    def prepare(self, task: Task) -> Prepared:
        """Quantize by the stock workflow."""
        import torch

        from x86quant.stock.hook import is_enabled

        if is_enabled():
            raise RuntimeError("x86quant.enable() is on: this would measure the routed engine")
        if task.form == "converted":
            converted, method = task.model, "as given"
        elif task.is_convolutional():
            converted, method = self._static(task), "static, FX"
        else:
            torch.backends.quantized.engine = self.engine
            kinds = {torch.nn.Linear, torch.nn.LSTM, torch.nn.GRU}
            stock: Any = torch.ao.quantization
            converted = stock.quantize_dynamic(task.model, kinds)
            method = "dynamic linears"
        save = functools.partial(_save, converted, task.example)
        return Prepared(self._bind(converted), save, method)

    def load(self, folder: Path, threads: int) -> Bind:
        """The traced module: stock quantized ones do not survive pickling."""
        import torch

        torch.backends.quantized.engine = self.engine
        jit: Any = torch.jit
        return self._bind(jit.load(str(folder / _FILE)))

    def _static(self, task: Task) -> nn.Module:
        from torch.ao.quantization import get_default_qconfig_mapping
        from torch.ao.quantization.backend_config import get_onednn_backend_config

        mapping = get_default_qconfig_mapping(self.engine)
        config = get_onednn_backend_config() if self.engine == "onednn" else None
        calibration, example = [c.args for c in task.calibration], task.example.args
        return convert_static(
            task.model, mapping, calibration, example, engine=self.engine, backend_config=config
        )

    def _bind(self, model: Callable[..., Any]) -> Bind:
        import torch

        def bind(given: Arguments) -> Callable[[], Any]:
            def run() -> Any:
                # Some ops ask for the engine when they run; setting it costs under 1 µs.
                torch.backends.quantized.engine = self.engine
                return model(*given.args, **given.kwargs)

            return run

        return bind


def _save(model: nn.Module, example: Arguments, folder: Path) -> None:
    import torch

    inputs: dict[str, Any] = {"example_kwarg_inputs": example.kwargs} if example.kwargs else {}
    jit: Any = torch.jit
    traced = jit.trace(model, example.args or None, strict=False, check_trace=False, **inputs)
    jit.save(traced, str(folder / _FILE))


def convert_static(
    model: nn.Module,
    mapping: Any,
    calibration: Sequence[tuple[Any, ...]],
    example: tuple[Any, ...],
    *,
    engine: str,
    backend_config: Any = None,
) -> nn.Module:
    """A copy of ``model`` through the stock FX workflow from end to end under ``engine``."""
    import torch
    from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx

    torch.backends.quantized.engine = engine
    prepared = prepare_fx(copy.deepcopy(model), mapping, example, backend_config=backend_config)
    for batch in calibration:
        prepared(*batch)
    converted: nn.Module = convert_fx(prepared, backend_config=backend_config)
    return converted


def backend(name: str) -> StockBackend:
    """The back end called ``name``."""
    return StockBackend(name)
