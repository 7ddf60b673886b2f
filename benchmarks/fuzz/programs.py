"""A random program: a module as source, its inputs, and what ``quantize`` is asked for."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

Inputs = tuple[torch.Tensor, ...]

#: Rows of a calibration batch, and how many there are.
ROWS, BATCHES = 16, 3
#: What is asked for, drawn by seed: mostly the quick settings, which leave time for more programs.
_QUICK: dict[str, Any] = {"observer": "minmax", "bias_correction": False, "equalize": False}
_SETTINGS: tuple[dict[str, Any], ...] = (
    *[_QUICK] * 9,
    {},
    {"observer": "percentile", "weight_observer": "mse", "equalize": True},
    {"activation_bits": 7, "bias_correction": False, "observer": "minmax"},
)


@dataclasses.dataclass(frozen=True)
class Program:
    """A module as source: the lines of ``__init__`` and ``forward``, and the inputs' shapes.

    Attributes:
        made: the lines of ``__init__``.
        body: the lines of ``forward``.
        result: the expression that is returned.
        inputs: the shapes of the inputs; the first size is the batch.
        ids: whether there is another input behind them, of ids below 10 in two columns.
        seed: what weights and inputs are drawn by.
    """

    made: tuple[str, ...]
    body: tuple[str, ...]
    result: str
    inputs: tuple[tuple[int, ...], ...]
    seed: int
    ids: bool = False

    @property
    def source(self) -> str:
        """The class, as one would write it."""
        names = ", ".join(["self", *(f"x{i}" for i in range(len(self.inputs) + self.ids))])
        lines = [line for one in self.body for line in one.split("\n")]
        made = "\n        ".join(["super().__init__()", *self.made])
        body = "\n        ".join([*lines, f"return {self.result}"])
        return (
            f"class Net(nn.Module):\n    def __init__(self):\n        {made}\n\n"
            f"    def forward({names}):\n        {body}\n"
        )

    @property
    def settings(self) -> dict[str, Any]:
        """What ``quantize`` is asked for."""
        return _SETTINGS[random.Random(self.seed).randrange(len(_SETTINGS))]

    def build(self) -> nn.Module:
        """The module, with the weights of its seed."""
        space: dict[str, Any] = {"torch": torch, "nn": nn, "F": F}
        exec(self.source, space)
        torch.manual_seed(self.seed)
        model: nn.Module = space["Net"]().eval()
        return model

    def calibration(self) -> list[Inputs]:
        """Batches of random inputs."""
        return [self._drawn(number, ROWS) for number in range(BATCHES)]

    def data(self, number: int, batch: int) -> Inputs:
        """Inputs with ``batch`` rows, at most :data:`ROWS`, that were not among the calibration
        data, but between them: each row between the rows of that number.

        Values that are further out are cut off by any static range: that would be no mistake. Nor
        would it be where a program looks at the first row only.
        """
        generator = torch.Generator().manual_seed(self.seed * 1000 + 500 + number)
        share = torch.rand(batch, generator=generator)
        mixed = []
        for x, y in zip(self._drawn(0, ROWS), self._drawn(1, ROWS), strict=True):
            part = share.reshape(-1, *[1] * (x.dim() - 1))
            first, second = x[:batch], y[:batch]
            is_float = x.is_floating_point()
            mixed.append(second.lerp(first, part) if is_float else first.where(part > 0.5, second))
        return tuple(mixed)

    def _drawn(self, number: int, batch: int) -> Inputs:
        generator = torch.Generator().manual_seed(self.seed * 1000 + number)
        floats = [torch.randn(batch, *shape[1:], generator=generator) for shape in self.inputs]
        ids = [torch.randint(10, (batch, 2), generator=generator)] * self.ids
        return (*floats, *ids)
