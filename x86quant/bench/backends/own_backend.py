"""x86quant itself."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from x86quant.bench.backends import Bind, Prepared, Run, Task
from x86quant.given_model import Arguments
from x86quant.version import __version__

_FILE = "model.x86q"


class OwnBackend:
    """``quantize``, with biases corrected and nothing else tried for convolutional networks."""

    title = "x86quant int8"
    packages: Mapping[str, str] = {}
    int8 = True

    def version(self) -> str:
        """What was measured."""
        from x86quant.routing.in_force import current_rules

        return f"x86quant {__version__}, rules {current_rules().name}"

    def refusal(self, task: Task) -> str | None:
        """It is for all."""
        return None

    def prepare(self, task: Task) -> Prepared:
        """Quantize and compile."""
        model, method = int8_model(task)
        return Prepared(_bind(model), functools.partial(_save, model, task.example), method)

    def load(self, folder: Path, threads: int) -> Bind:
        """The saved model."""
        from x86quant.artifacts import load

        return _bind(load(folder / _FILE))


def int8_model(task: Task) -> tuple[Any, str]:
    """The model that is measured, and how it was made."""
    from x86quant.compiled import compile as compile_model
    from x86quant.quantization import quantize

    example = task.example
    if task.form == "compiled":
        return task.model, "as given"
    if task.form == "converted":
        return compile_model(task.model, example.args), "compiled"
    batches: list[Any] = [dict(c.kwargs) if c.kwargs else c.args for c in task.calibration]
    bits = 8 if task.has("EmbeddingBag") else None
    # Networks of convolutions are timed in int8 even where float would be quicker.
    how: dict[str, Any] = (
        {"effort": "fast", "speed_check": False} if task.is_convolutional() else {}
    )
    model = quantize(task.model, batches, embedding_bits=bits, progress=False, **how)
    return model, f"quantize, {model.quantization.mode}"


def _bind(model: Callable[..., Any]) -> Bind:
    def bind(given: Arguments) -> Run:
        return functools.partial(model, *given.args, **given.kwargs)

    return bind


def _save(model: Any, example: Arguments, folder: Path) -> None:
    from x86quant.artifacts import save

    save(model, folder / _FILE)


def backend(name: str) -> OwnBackend:
    """The back end; it has one name."""
    return OwnBackend()
