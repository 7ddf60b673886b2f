"""The zoo of architectures in float and in int8: what is quantized, how well, how fast.

    python -m benchmarks.zoo --only lstm_tagger hf_bert

For each architecture: the mode, the least SQNR against float over three input sizes and two batch
sizes, the time of float over the time of int8 (interleaved, lower quartiles), whether it saves and
loads, and whether what was loaded gives the same bytes. The networks are tiny, so that the ratios
say whether int8 loses, not what it gains on networks of real size. Ends with status 1 if any
architecture is wrong, slower than float, or not savable.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import x86quant
from benchmarks.environment import print_environment
from tests.zoo import ZOO, Animal, call, floats, sqnr
from x86quant.calling.running import no_fast_path
from x86quant.errors import InvalidInputError, X86QuantError
from x86quant.terminal.text_table import text_table

#: Times vary: int8 counts as slower when it takes more than this, over float's time.
TOLERANCE = 1.05


@dataclasses.dataclass
class Row:
    """What was found about one architecture; empty where it did not come so far."""

    name: str
    mode: str = ""
    least_db: float | None = None
    ratio: float | None = None
    saves: bool | None = None
    equal: bool | None = None
    problem: str = ""

    def cells(self) -> list[str]:
        """As a row of the table."""
        return [
            self.name,
            self.mode,
            "" if self.least_db is None else f"{self.least_db:.1f}",
            "" if self.ratio is None else f"{self.ratio:.2f}",
            {None: "", True: "yes", False: "no"}[self.saves],
            {None: "", True: "yes", False: "no"}[self.equal],
            self.problem[:100],
        ]


def examine(animal: Animal, rounds: int) -> Row:
    """Quantize one architecture and look at it from every side."""
    row = Row(animal.name)
    model = animal.model()
    try:
        int8 = x86quant.quantize(model, animal.calibration(), progress=False, **animal.options)
    except X86QuantError as error:
        row.mode = "refused"
        row.problem = "" if animal.refused else str(error)
        return row
    row.mode = int8.quantization.line()[:40]
    inputs = [animal.sample(batch, size, 9) for batch in (1, 5) for size in animal.sizes]
    row.least_db = min(
        _pooled(model, int8, [animal.sample(batch, size, seed) for seed in range(9, 15)])
        for batch in (1, 5)
        for size in animal.sizes
    )
    row.ratio = time_ratio(model, int8, animal.sample(5, 1, 9), rounds)
    if row.least_db < animal.bound:
        row.problem = f"below {animal.bound:.0f} dB"
    elif row.ratio * TOLERANCE < 1:
        row.problem = "slower than float"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.x86q"
        try:
            x86quant.save(int8, path)
            loaded = x86quant.load(path, model=animal.model())
        except X86QuantError as error:
            row.saves = False
            row.problem = row.problem or str(error)
            return row
    row.saves = True
    with no_fast_path():  # float encoders take it, what was loaded does not: docs/artifacts.md
        row.equal = all(_same(int8, loaded, x) for x in inputs)
    return row


def _pooled(model: nn.Module, int8: nn.Module, inputs: list[Any]) -> float:
    """Signal to noise over several calls: one result may happen to be close to zero."""
    return sqnr([call(model, x) for x in inputs], [call(int8, x) for x in inputs])


def _same(int8: nn.Module, loaded: nn.Module, inputs: Any) -> bool:
    """Whether a loaded model gives the same bytes, or says that it does not hold for the call."""
    try:
        found = floats(call(loaded, inputs))
    except InvalidInputError:
        return True
    return all(map(torch.equal, floats(call(int8, inputs)), found))


def time_ratio(model: nn.Module, int8: nn.Module, inputs: Any, rounds: int) -> float:
    """Time of ``model`` over that of ``int8``, in turns; other work spares lower quartiles."""
    times: dict[nn.Module, list[float]] = {model: [], int8: []}
    for _ in range(3):
        call(model, inputs), call(int8, inputs)
    for number in range(rounds):
        for module, found in [*times.items()][:: 1 if number % 2 else -1]:
            start = time.perf_counter()
            call(module, inputs)
            found.append(time.perf_counter() - start)
    exact, ours = (sorted(found)[len(found) // 4] for found in times.values())
    return exact / ours


def guarded(look: Callable[[], Row], name: str) -> Row:
    """A traceback is a finding too, and the other architectures still have their turn."""
    try:
        return look()
    except Exception as error:
        return Row(name, problem=f"{type(error).__name__}: {error}".splitlines()[0])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these architectures")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(options.threads)
    wanted = [
        animal
        for animal in ZOO
        if (not options.only or animal.name in options.only)
        and (animal.needs is None or importlib.util.find_spec(animal.needs))
    ]
    found = []
    for animal in wanted:
        row = guarded(lambda animal=animal: examine(animal, options.rounds), animal.name)
        found.append(row)
        print(" | ".join(row.cells()), flush=True)
    print()
    print_environment()
    header = ["model", "mode", "least dB", "float / int8", "saves", "equal", "problem"]
    print(text_table(header, [row.cells() for row in found], right=header[2:4]))
    bad = [row.name for row in found if row.problem or row.equal is False]
    print(f"{len(found) - len(bad)} of {len(found)} without a problem")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
