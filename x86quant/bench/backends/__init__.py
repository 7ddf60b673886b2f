"""The runtimes that models are measured on, each behind the same few calls.

A back end lives in one module and imports what it needs where it needs it, so that one that is not
installed costs one line, and the process that only runs OpenVINO never imports torch.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from x86quant.given_model import Arguments, Form

if TYPE_CHECKING:
    import torch
    from torch import nn

#: Runs the model on one input and returns its results as they are.
Run: TypeAlias = Callable[[], Any]
#: Hands one input to the runtime, in the way cheapest for it; only what it returns is timed.
Bind: TypeAlias = Callable[[Arguments], Run]


@dataclasses.dataclass(frozen=True)
class Task:
    """What a back end is to run.

    Attributes:
        model: in evaluation mode; a back end leaves it as it is.
        form: float, converted to int8 by stock PyTorch, or compiled by x86quant.
        calibration: typical inputs.
        example: what it will be called with.
        build: makes the model again in another process, without its weights: ``None`` if it is
            not known how.
    """

    model: nn.Module
    form: Form
    calibration: Sequence[Arguments]
    example: Arguments
    threads: int
    build: str | None = None

    def has(self, *kinds: type | str) -> bool:
        """Whether the model has layers of these classes, or with these words in their names."""
        classes = tuple(kind for kind in kinds if isinstance(kind, type))
        words = [kind for kind in kinds if isinstance(kind, str)]
        return any(
            isinstance(module, classes) or any(word in type(module).__name__ for word in words)
            for module in self.model.modules()
        )

    def is_convolutional(self) -> bool:
        """Whether it is a network for pictures that static quantization is made for."""
        from torch import nn

        from x86quant.quantization.scheme import is_transformer

        floats = all(x.is_floating_point() for x in self.example.args) and not self.example.kwargs
        return floats and self.has(nn.modules.conv._ConvNd) and not is_transformer(self.model)


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A model that a back end is ready to run.

    Attributes:
        bind: how to run it.
        save: writes to a folder what the back end's ``load`` reads; None if nothing can be saved.
        method: how it was quantized, in a few words.
    """

    bind: Bind
    save: Callable[[Path], object] | None = None
    method: str = ""


class Backend(Protocol):
    """One runtime.

    Attributes:
        title: for people.
        packages: import name -> what to ``pip install``, for what x86quant does not itself need.
        int8: whether it computes in int8, as far as it can.
    """

    title: str
    packages: Mapping[str, str]
    int8: bool

    def version(self) -> str:
        """What was measured."""

    def refusal(self, task: Task) -> str | None:
        """Why it is not for this model or this CPU."""

    def prepare(self, task: Task) -> Prepared:
        """Quantize and compile the model for inputs like the example."""

    def load(self, folder: Path, threads: int) -> Bind:
        """What ``Prepared.save`` wrote, in a process that has imported nothing yet."""


# The order of the columns where nothing else orders them, and the module each is in.
_HOMES: Mapping[str, str] = {
    "x86quant": "own_backend",
    "openvino": "openvino_backend",
    "onnxruntime": "onnxruntime_backend",
    "pt2e": "pt2e_backend",
    "x86": "stock_backend",
    "fbgemm": "stock_backend",
    "onednn": "stock_backend",
    "openvino-fp32": "openvino_backend",
    "onnxruntime-fp32": "onnxruntime_backend",
    "inductor": "eager_backend",
    "bf16": "eager_backend",
    "fp32": "eager_backend",
}
BACKENDS: tuple[str, ...] = tuple(_HOMES)
#: Those measured unless others are asked for: one of each kind, none that compiles for minutes.
USUAL: tuple[str, ...] = ("x86quant", "openvino", "onnxruntime", "x86", "bf16", "fp32")
# No environment variable holds these to a lower instruction-set level. The others' oneDNN,
# OpenVINO's own included, FBGEMM and Inductor's code generator all obey one.
IGNORE_ISA = ("onnxruntime", "onnxruntime-fp32")


def backend(name: str) -> Backend:
    """The back end called ``name``; its third parties are not imported yet."""
    made: Backend = importlib.import_module(f"{__name__}.{_HOMES[name]}").backend(name)
    return made


def missing(found: Backend) -> str | None:
    """Why ``found`` cannot run here and the command that helps, or None."""
    absent = {k: v for k, v in found.packages.items() if not _installed(k)}
    if not absent:
        return None
    wanted = " ".join(f"'{requirement}'" for requirement in absent.values())
    return f"{', '.join(absent)} not installed: pip install {wanted}"


def _installed(module: str) -> bool:
    return module in sys.modules or importlib.util.find_spec(module) is not None


def first_tensor(output: Any) -> torch.Tensor:
    """The first tensor in what a model returned."""
    import torch

    if isinstance(output, torch.Tensor):
        return output
    if hasattr(output, "__array__"):
        return torch.as_tensor(output)
    values = output.values() if isinstance(output, Mapping) else output
    for value in values if isinstance(values, (list, tuple)) else tuple(values):
        if value is not None:
            return first_tensor(value)
    raise ValueError(f"{type(output).__name__} holds no tensor")
