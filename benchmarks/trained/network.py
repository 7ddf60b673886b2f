"""What a trained network is to this benchmark."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import nn

#: The inputs of one call, all of a network in the same sizes.
Inputs = tuple[torch.Tensor, ...]


@dataclasses.dataclass(frozen=True)
class Trained:
    """A network with its weights, and data.

    Attributes:
        model: in evaluation mode.
        calibration: what ranges are chosen by.
        test: what no calibration has seen.
        metric: what ``score`` is.
        score: of the first results for ``test``, joined along the batch; higher is better.
    """

    model: nn.Module
    calibration: list[Inputs]
    test: list[Inputs]
    metric: str
    score: Callable[[torch.Tensor], float]


def batches(x: torch.Tensor, size: int = 16) -> list[Inputs]:
    """``x`` in whole batches."""
    return [(part,) for part in x.split(size) if len(part) == size]


def joined(of: Iterable[Inputs]) -> torch.Tensor:
    """The first inputs of all calls in one."""
    return torch.cat([inputs[0] for inputs in of])


def folder_of(package: str) -> Path:
    """Where a package is installed, which need not be importable."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"{package} is not installed", name=package)
    return Path(spec.origin).parent


def fitted(
    model: nn.Module,
    draw: Callable[[int], tuple[torch.Tensor, ...]],
    loss: Callable[..., torch.Tensor],
    steps: int,
    rate: float = 3e-3,
) -> nn.Module:
    """``model`` trained by Adam: ``draw(step)`` gives its input and what ``loss`` takes besides."""
    optimizer = torch.optim.Adam(model.parameters(), rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, steps)
    model.train()
    for step in range(steps):
        x, *wanted = draw(step)
        optimizer.zero_grad()
        loss(model(x), *wanted).backward()
        optimizer.step()
        schedule.step()
    return model.eval()


def some_of(*tensors: torch.Tensor, count: int) -> Callable[[int], tuple[torch.Tensor, ...]]:
    """What draws ``count`` rows of ``tensors`` for :func:`fitted`."""

    def draw(_: int) -> tuple[torch.Tensor, ...]:
        some = torch.randint(len(tensors[0]), (count,))
        return tuple(x[some] for x in tensors)

    return draw


def cosine(exact: torch.Tensor, found: torch.Tensor) -> float:
    """The mean cosine of rows."""
    return float(nn.functional.cosine_similarity(exact, found, dim=-1).mean())
