"""Random products by weights with scales for groups, at every level: the bytes of the plain loops?

    python -m benchmarks.group_products --specs 20000

Codes of 4 and 8 bits to the ends of their range, groups of 8 to 128 features, scales of 16 and 32
bits with and without offsets, 1 to 40 rows (of one product in twenty to 150, and features to 2400),
and rows of codes that drive sums to their ends. Spec number n is the same on every CPU:
``--first n --specs 1`` repeats it. Codes of 4 bits are multiplied by blocks that become bytes, and
without. The plain loops themselves are held against plain torch by
``tests/kernels/test_group_kernels.py``. The exit code is 1 where a byte differed.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Any

import numpy as np

from tests.native import capi
from x86quant import extension
from x86quant.hardware.cpu import cpu
from x86quant.hardware.isa import LEVELS

_GROUPS = (8, 16, 24, 32, 64, 128)
#: Features and rows at most: the plain loops take their time.
_USUAL, _LARGE = (512, 40), (2400, 150)
_ENDS = {4: (0, 255), 8: (-128, 127)}


@dataclasses.dataclass(frozen=True)
class Spec:
    """One product: what packing takes, and codes, scales and zero points of rows."""

    number: int
    weight: Any
    scale: Any
    bias: Any
    rows: tuple[Any, Any, Any]

    def __str__(self) -> str:
        kinds = f"{self.weight.dtype} {self.weight.shape}, {self.scale.dtype} {self.scale.shape}"
        return f"spec {self.number}: {self.rows[0].shape[0]} rows by {kinds}"


def drawn(number: int) -> Spec:
    """Spec ``number``."""
    draw = np.random.default_rng(number)
    bits = int(draw.choice((4, 8)))
    group = int(draw.choice(_GROUPS))
    most_features, most_rows = _LARGE if draw.random() < 0.05 else _USUAL
    groups = int(draw.integers(1, most_features // group, endpoint=True))
    outputs, rows = (int(draw.integers(1, most, endpoint=True)) for most in (70, most_rows))
    low, high = _ENDS[bits]
    narrow = bits == 8 and draw.random() < 0.3  # pairs of products fit 16 bits
    low, high = (-64, 64) if narrow else (low, high)
    shape = (outputs, group * groups * bits // 8)
    stored = np.uint8 if bits == 4 else np.int8
    weight = draw.integers(low, high, shape, endpoint=True).astype(stored)
    if draw.random() < 0.3:
        weight[:] = draw.choice((low, high), (outputs, 1))
    sizes = (outputs, groups, 2) if draw.random() < 0.4 else (outputs, groups)
    scale = draw.standard_normal(sizes) * 0.01
    codes = draw.integers(0, 255, (rows, group * groups), np.uint8, endpoint=True)
    if draw.random() < 0.3:
        codes[:] = draw.choice((0, 255), (rows, 1))
    return Spec(
        number,
        weight,
        scale.astype(draw.choice((np.float16, np.float32))),
        draw.standard_normal(outputs).astype(np.float32),
        (
            codes,
            draw.random(rows).astype(np.float32),
            draw.integers(0, 255, rows, np.int32, endpoint=True),
        ),
    )


#: From how many rows on blocks become bytes: as a rule, always, never.
UNPACKED = ((0, 0), (1, 0), ((1 << 31) - 1, 0))


def product(
    library: capi.Library, spec: Spec, level: str, unpack: tuple[int, int] = UNPACKED[0]
) -> Any:
    """What ``level`` computes, [rows, outputs]."""
    packed = library.pack_groups(spec.weight, spec.scale, spec.bias, level, unpack=unpack)
    rows, outputs = spec.rows[0].shape[0], spec.weight.shape[0]
    op = capi.Rows(capi.ISAS[level], rows, outputs, threads=1, eps=1e-5)
    op.packed = packed.ctypes.data
    op.in_ = capi.Codes(*(part.ctypes.data for part in spec.rows))
    found = np.full((rows, outputs), np.nan, np.float32)
    op.total = found.ctypes.data
    library.rows(op)
    return found


def levels() -> list[str]:
    """The levels of this CPU, up to the cap on it."""
    return [name for name, level in LEVELS.items() if level.features <= cpu().features]


def main() -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--specs", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="number of the first spec")
    options = parser.parse_args()
    extension.load()
    library = capi.Library(Path(extension.__file__).with_name("_C.so"))
    ran = levels()
    if "amx_int8" in ran:
        library.enable_amx()
    wrong = dict.fromkeys(ran, 0)
    for number in range(options.first, options.first + options.specs):
        spec = drawn(number)
        want = product(library, spec, "reference")
        for level in ran:
            ways = UNPACKED[1:] if spec.weight.dtype == np.uint8 else UNPACKED[:1]
            if any(product(library, spec, level, x).tobytes() != want.tobytes() for x in ways):
                wrong[level] += 1
                print(f"{level}: {spec}")
    for level, count in wrong.items():
        print(f"{level}: {count} of {options.specs} products differ from the plain loops")
    return int(any(wrong.values()))


if __name__ == "__main__":
    sys.exit(main())
