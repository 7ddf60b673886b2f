"""The model itself in PyTorch: eager in fp32, which everything is compared with, and in bf16;
compiled by Inductor."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from x86quant.bench.backends import Bind, Prepared, Task
from x86quant.given_model import Arguments
from x86quant.hardware.isa import forced_level

if TYPE_CHECKING:
    from torch import nn

_WEIGHTS, _NAME = "weights.pt", "model.txt"


class EagerBackend:
    """Channels-last weights, with which convolutions in eager PyTorch copy least."""

    packages: Mapping[str, str] = {}
    int8 = False

    def __init__(self, name: str) -> None:
        self.name = name
        self.title = {"inductor": "Inductor fp32"}.get(name, f"PyTorch {name}")

    def version(self) -> str:
        """What was measured."""
        import torch

        return f"torch {torch.__version__}, {'Inductor' if self.name == 'inductor' else 'eager'}"

    def refusal(self, task: Task) -> str | None:
        """Why it is not for this model or this CPU."""
        if self.name == "bf16" and (reason := _no_bfloat16()) is not None:
            return reason
        return None if task.form == "float" else "needs the float model, and this one is int8"

    def prepare(self, task: Task) -> Prepared:
        """Copy the model; compile it where that is asked for."""
        model = self._formed(copy.deepcopy(task.model))
        if self.name != "inductor":
            save = functools.partial(_save, task) if task.build else None
            return Prepared(self._bind(model), save)
        import torch
        from torch._inductor import config

        config.freezing = True  # set for good: compiled code asks again when it runs
        compiled: Any = torch.compile(model)
        compiled(*task.example.args, **task.example.kwargs)
        return Prepared(self._bind(compiled))

    def load(self, folder: Path, threads: int) -> Bind:
        """Build the model by its name and fill in the weights."""
        import torch

        from x86quant.bench.subjects import build

        model = build((folder / _NAME).read_text())
        model.load_state_dict(torch.load(folder / _WEIGHTS, weights_only=True))
        return self._bind(self._formed(model))

    def _formed(self, model: nn.Module) -> nn.Module:
        import torch

        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return model.bfloat16() if self.name == "bf16" else model

    def _bind(self, model: Callable[..., Any]) -> Bind:
        def bind(given: Arguments) -> Callable[[], Any]:
            call = given.converted(_to_bfloat16) if self.name == "bf16" else given
            return functools.partial(model, *call.args, **call.kwargs)

        return bind


def _save(task: Task, folder: Path) -> None:
    import torch

    torch.save(task.model.state_dict(), folder / _WEIGHTS)
    (folder / _NAME).write_text(task.build or "")


def _to_bfloat16(x: Any) -> Any:
    return x.bfloat16() if x.is_floating_point() else x


def _no_bfloat16() -> str | None:
    """Why bfloat16 would be slow here."""
    import torch

    if (level := forced_level()) not in (None, "amx_int8"):
        return f"{level} has no bfloat16 instructions"
    has = torch.cpu.get_capabilities()
    return None if has.get("avx512_bf16") else "this CPU has no bfloat16 instructions"


def backend(name: str) -> EagerBackend:
    """The back end called ``name``."""
    return EagerBackend(name)
