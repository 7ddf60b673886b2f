"""Train a DLRM on a synthetic click log, quantize it, and see what that costs and gains.

    python examples/dlrm.py                  # a small form, about a minute
    python examples/dlrm.py --quick          # to see it run, a few seconds
    python examples/dlrm.py --rows 1000000   # tables that overflow the caches

The log has Zipf's skew: a few items are seen all the time, most hardly ever. Each item has a hidden
appeal, and so has each pair of two features, so that there is something for tables and interaction
to learn. Prints AUC in float and in 8, 4 and 2 bits, memory of the tables, and latency. Fails if
tables in 8 or 4 bits cost 0.001 of AUC, or those in 4 bits take more than 15% of the memory of
float ones, where rows are long enough for that (--size 64).
"""

from __future__ import annotations

import argparse
import itertools
import sys
import warnings
from collections.abc import Iterator

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import x86quant
from x86quant.profiling.timing import interleaved

# torch announces the end of torch.ao.quantization at every call.
warnings.filterwarnings("ignore", message=".*(torch.ao|quantized tensor|quant_min)")

DENSE = 13
# What tables in 8 and 4 bits may cost: AUC, and memory of 4 bits as a share of float.
AUC_LOSS, MEMORY = 0.001, 0.15
# Rows with fewer values take more memory: their scale and bias are 4 bytes.
LONG_ROW = 64
Batch = tuple[torch.Tensor, torch.Tensor]


def layers(*sizes: int) -> list[nn.Module]:
    """Linears and ReLUs."""
    return [part for a, b in itertools.pairwise(sizes) for part in (nn.Linear(a, b), nn.ReLU())]


class Dlrm(nn.Module):
    """Dense features by an MLP, sparse ones by tables, all products, another MLP."""

    def __init__(self, tables: int, rows: int, size: int) -> None:
        super().__init__()
        self.bottom = nn.Sequential(*layers(DENSE, 64, size))
        bags = [nn.EmbeddingBag(rows, size, mode="sum", sparse=True) for _ in range(tables)]
        for bag in bags:
            nn.init.normal_(bag.weight, std=size**-0.5)
        self.tables = x86quant.EmbeddingBags(bags)
        self.interaction = x86quant.DotInteraction()
        wide = size + tables * (tables + 1) // 2
        self.top = nn.Sequential(*layers(wide, 128, 64), nn.Linear(64, 1))

    def forward(self, dense: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        """Logits of a click; ``indices`` is [tables, samples, items of each]."""
        vectors = self.tables(indices)
        logits: torch.Tensor = self.top(self.interaction(self.bottom(dense), vectors))
        return logits.squeeze(1)


class ClickLog:
    """Samples whose items follow Zipf's law, and clicks that depend on what is hidden in them."""

    def __init__(self, tables: int, rows: int, items: int = 2) -> None:
        self.tables, self.rows, self.items = tables, rows, items
        self.make = torch.Generator().manual_seed(0)
        self.appeal = torch.randn(tables, rows, generator=self.make)
        self.taste = torch.randn(DENSE, generator=self.make) / DENSE**0.5

    def batch(self, samples: int) -> tuple[Batch, torch.Tensor]:
        """Inputs, and whether each sample was clicked."""
        u = torch.rand(self.tables, samples, self.items, generator=self.make)
        # The inverse of the distribution function of Zipf's law with exponent 1.
        indices = (torch.exp(u * torch.log(torch.tensor(self.rows + 1.0))) - 1).long()
        indices = indices.clamp(max=self.rows - 1)
        dense = torch.randn(samples, DENSE, generator=self.make)
        appeal = torch.stack([a[i].sum(1) for a, i in zip(self.appeal, indices, strict=True)])
        score = appeal.sum(0) / self.tables**0.5 + dense @ self.taste + appeal[0] * appeal[1] / 2
        clicked = torch.rand(samples, generator=self.make) < torch.sigmoid(1.5 * score - 1)
        return (dense, indices), clicked.float()


def auc(logits: torch.Tensor, clicked: torch.Tensor) -> float:
    """The chance that a click scores higher than what was not clicked."""
    ranks = torch.empty(len(logits), dtype=torch.float64)
    ranks[logits.argsort()] = torch.arange(1, len(logits) + 1, dtype=torch.float64)
    positive = clicked.sum().item()
    above = ranks[clicked.bool()].sum().item() - positive * (positive + 1) / 2
    return float(above / (positive * (len(clicked) - positive)))


def train(model: Dlrm, log: ClickLog, steps: int, samples: int) -> None:
    """Adam for what is dense, its sparse form for the tables."""
    model.train()
    dense = torch.optim.Adam([*model.bottom.parameters(), *model.top.parameters()], lr=2e-3)
    sparse = torch.optim.SparseAdam(list(model.tables.parameters()), lr=1e-2)
    for _ in range(steps):
        inputs, clicked = log.batch(samples)
        loss = F.binary_cross_entropy_with_logits(model(*inputs), clicked)
        dense.zero_grad()
        sparse.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        dense.step()
        sparse.step()
    model.eval()


def table_bytes(model: nn.Module) -> int:
    """Bytes of all tables: the float ones, or the rows of quantized ones in a compiled graph."""
    floats = [m.weight for m in model.modules() if isinstance(m, nn.EmbeddingBag)]
    rows = [x for x in model.state_dict().values() if x.dtype == torch.uint8 and x.dim() == 2]
    return sum(x.nbytes for x in floats or rows)


def too_costly(aucs: dict[str, float], shares: dict[str, float], size: int) -> Iterator[str]:
    """What is beyond the limits, in words."""
    for name in ("8 bits", "4 bits"):
        if (loss := aucs["float"] - aucs[name]) >= AUC_LOSS:
            yield f"{name}: AUC is {loss:.4f} less than in float, {AUC_LOSS} at most was wanted"
    if size >= LONG_ROW and shares["4 bits"] > MEMORY:
        yield f"4 bits: tables take {shares['4 bits']:.1%} of float's memory, wanted {MEMORY:.0%}"


def main() -> None:
    """Train, quantize, compare; ends with an error if it costs more than it may."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tables", type=int, default=8)
    parser.add_argument("--rows", type=int, default=5_000)
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--test", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=30, help="timed calls of each model")
    parser.add_argument("--quick", action="store_true", help="so small that figures mean little")
    options = parser.parse_args()
    if options.quick:
        options.tables, options.rows, options.size = 4, 200, 16
        options.steps, options.batch, options.test, options.rounds = 60, 128, 2000, 3
    torch.manual_seed(0)
    log = ClickLog(options.tables, options.rows)
    model = Dlrm(options.tables, options.rows, options.size)
    train(model, log, options.steps, options.batch)
    inputs, clicked = log.batch(options.test)
    small = tuple(x[: options.batch] if x.dim() == 2 else x[:, : options.batch] for x in inputs)
    batches = [log.batch(options.batch)[0] for _ in range(8)]
    models: dict[str, nn.Module] = {"float": model}
    for bits in (8, 4, 2):
        models[f"{bits} bits"] = x86quant.quantize(
            model, batches, embedding_bits=bits, speed_check=False, progress=False
        )
    with torch.inference_mode():
        calls = {name: lambda m=m: m(*small) for name, m in models.items()}
        times = interleaved(calls, rounds=options.rounds)
        aucs = {name: auc(one(*inputs), clicked) for name, one in models.items()}
        shares = {name: _megabytes(one) / _megabytes(model) for name, one in models.items()}
    for name, one in models.items():
        print(
            f"{name:<8} AUC {aucs[name]:.4f}   tables {_megabytes(one):8.2f} MB "
            f"({shares[name]:4.0%})   "
            f"{times[name].median * 1e3:7.3f} ms for {options.batch} samples"
        )
    found = [] if options.quick else [*too_costly(aucs, shares, options.size)]
    if found:
        sys.exit("\n".join(found))


def _megabytes(model: nn.Module) -> float:
    return table_bytes(model) / 1e6


if __name__ == "__main__":
    main()
