"""What an entry of the zoo is: a float model, and inputs for it at several sizes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

#: The arguments of one call: positional ones, or a mapping of keyword arguments.
Inputs = tuple[Any, ...] | dict[str, Any]
#: ``make(batch, size)``: inputs of so many samples, where 0, 1 and 2 are three sizes, 1 the usual.
MakeInputs = Callable[[int, int], Inputs]


@dataclasses.dataclass(frozen=True)
class Animal:
    """An architecture.

    Attributes:
        name: unique in the zoo.
        build: makes the float model; called with torch's generator at a fixed seed.
        inputs: makes inputs.
        bound: the least SQNR in dB of the int8 model against the float one, each input alone.
        options: what ``quantize`` is told.
        refused: a pattern of the sentence with which ``quantize`` refuses the model.
        sizes: which of the sizes the float model takes.
        save: whether the int8 model can be saved; else a pattern of the reason.
        needs: a package without which the entry is left out.
        slow: too large for the test suite; ``benchmarks.zoo`` has it.
    """

    name: str
    build: Callable[[], nn.Module]
    inputs: MakeInputs
    bound: float = 20.0
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    refused: str | None = None
    sizes: tuple[int, ...] = (0, 1, 2)
    save: str | None = None
    needs: str | None = None
    slow: bool = False

    def model(self) -> nn.Module:
        """The float model: evaluation mode, batch norms settled on inputs of all sizes."""
        torch.manual_seed(0)
        model = self.build()
        settle(model, [self.sample(6, size, seed) for seed in (1, 2) for size in self.sizes])
        return model

    def sample(self, batch: int, size: int, seed: int) -> Inputs:
        """Inputs that depend on the seed alone."""
        torch.manual_seed(1000 * seed + 10 * batch + size)
        return self.inputs(batch, size)

    def calibration(self) -> list[Inputs]:
        """Batches for ``quantize``, of every size, the usual one first."""
        return [
            self.sample(8, size, seed)
            for seed in (1, 2, 3)
            for size in (1, 0, 2)
            if size in self.sizes
        ]


def call(model: nn.Module, inputs: Inputs) -> Any:
    """``model`` of ``inputs``, without gradients."""
    with torch.no_grad():
        return model(**inputs) if isinstance(inputs, dict) else model(*inputs)


def settle(model: nn.Module, batches: Iterable[Inputs]) -> None:
    """Give batch norms the statistics of ``batches``; dropout and the rest stay as in use."""
    model.eval()
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    norms = [norm for norm in norms if norm.track_running_stats]
    if not norms:
        return
    for norm in norms:
        norm.train()
        norm.momentum = None  # a plain average over the batches
    for batch in batches:
        call(model, batch)
    model.eval()


def floats(value: Any) -> list[torch.Tensor]:
    """The float tensors in a result of any structure, in order."""
    if isinstance(value, torch.Tensor):
        return [value] if value.is_floating_point() else []
    if isinstance(value, dict):
        return [x for key in value for x in floats(value[key])]
    if isinstance(value, tuple | list):
        return [x for item in value for x in floats(item)]
    if dataclasses.is_dataclass(value):
        return [x for f in dataclasses.fields(value) for x in floats(getattr(value, f.name))]
    if hasattr(value, "data") and isinstance(value.data, torch.Tensor):  # a packed sequence
        return [value.data]
    return []


def sqnr(expected: Any, actual: Any) -> float:
    """Signal to noise of all float results together, in dB; minus infinity if shapes differ."""
    wanted, found = floats(expected), floats(actual)
    if [x.shape for x in wanted] != [x.shape for x in found] or not wanted:
        return -torch.inf
    signal = sum(float(x.double().square().sum()) for x in wanted)
    noise = sum(
        float((x.double() - y.double()).square().sum()) for x, y in zip(wanted, found, strict=True)
    )
    if noise == 0:
        return torch.inf
    return float(10 * torch.log10(torch.tensor(signal / noise, dtype=torch.float64)))
