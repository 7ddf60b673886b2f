"""What the linears of a decoder take in int8 and in 4 bits: the products alone, one thread.

    python -m benchmarks.group_speed
    python -m benchmarks.group_speed --before ../before/x86quant/_C.so  # of another checkout, too
    python -m benchmarks.group_speed --blocks  # codes of 4 bits by tiles and by blocks, for a rule

The linears are those of ``benchmarks.decoding --kind llama``: 768 wide, 12 layers, 4 key heads of
12, 2048 features between, a head of 32,000 words; random codes. A turn multiplies so many rows by
all of them, one after another, so that weights come from memory as they do in a decoder. Forms
take turns. ``of memory`` is how many bytes of packed weights come a second, as a share of what
reading a buffer with the same thread gives between the turns: of its median by the median, of its
best by the least.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.decoding import stream_once
from benchmarks.environment import print_environment
from tests.native import capi
from x86quant import extension
from x86quant.hardware.cpu import cpu

_WIDE, _OF_KEYS, _BETWEEN, _LAYERS, _WORDS, _GROUP = 768, 256, 2048, 12, 32000, 32
#: Outputs and features of the linears of a layer; queries, keys and values are one.
_LAYER = (
    (_WIDE + 2 * _OF_KEYS, _WIDE),
    (_WIDE, _WIDE),
    (2 * _BETWEEN, _WIDE),
    (_WIDE, _BETWEEN),
)
_READ_BYTES = 256 << 20


class Decoder:
    """All linears, packed by one library."""

    def __init__(
        self,
        name: str,
        library: capi.Library,
        bits: int,
        level: str,
        unpack: tuple[int, int] = (0, 0),
    ) -> None:
        self.name, self._library, self._level = name, library, level
        self.times: dict[int, list[float]] = {}
        draw = np.random.default_rng(bits)
        self._packed: list[tuple[Any, int, int]] = []
        for outputs, features in (*_LAYER * _LAYERS, (_WORDS, _WIDE)):
            if bits == 4:
                codes = draw.integers(0, 256, (outputs, features // 2), np.uint8)
                scale = draw.random((outputs, features // _GROUP)).astype(np.float16)
                packed = library.pack_groups(codes, scale, None, level, unpack=unpack)
            else:
                # As many codes are large as in weights drawn from a normal distribution.
                normal = draw.standard_normal((outputs, features)) * (127 / 4)
                codes = normal.round().clip(-127, 127).astype(np.int8)
                scale = draw.random(outputs).astype(np.float32)
                bias = np.zeros(outputs, np.float32)
                packed = library.pack_linear(codes, scale, bias, level)
            self._packed.append((packed, outputs, features))

    @property
    def nbytes(self) -> int:
        """Of all packed weights."""
        return sum(packed.nbytes for packed, _, _ in self._packed)

    def turn(self, rows: int) -> None:
        """Multiply so many rows by every linear; of the last one the head has one row alone."""
        codes = np.full((rows, _BETWEEN), 77, np.uint8)
        scale, zero = np.ones(rows, np.float32), np.full(rows, 100, np.int32)
        out = np.empty((rows, max(n for _, n, _ in self._packed)), np.float32)
        calls = []
        for packed, outputs, _ in self._packed:
            count = 1 if outputs == _WORDS else rows
            op = capi.Rows(capi.ISAS[self._level], count, outputs, threads=1, eps=1e-5)
            op.packed, op.total = packed.ctypes.data, out.ctypes.data
            op.in_ = capi.Codes(codes.ctypes.data, scale.ctypes.data, zero.ctypes.data)
            calls.append(op)
        start = time.perf_counter()
        for op in calls:
            self._library.rows(op)
        self.times.setdefault(rows, []).append(time.perf_counter() - start)


def main() -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--before", type=Path, help="the _C.so of another checkout")
    parser.add_argument("--blocks", action="store_true", help="both ways to read codes of 4 bits")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 16, 128, 512])
    parser.add_argument("--seconds", type=float, default=4, help="for each number of rows")
    options = parser.parse_args()
    torch.set_num_threads(1)
    extension.load()
    print_environment()
    ours = capi.Library(Path(extension.__file__).with_name("_C.so"))
    forms = [Decoder("int8", ours, 8, cpu().isa), Decoder("4 bits", ours, 4, cpu().isa)]
    if options.blocks:
        forms += [
            Decoder("4 bits tiles", ours, 4, cpu().isa, ((1 << 31) - 1, 0)),
            Decoder("4 bits blocks", ours, 4, cpu().isa, (1, 0)),
        ]
    if options.before:
        forms.append(Decoder("4 bits before", capi.Library(options.before), 4, cpu().isa))
    buffer = torch.ones(_READ_BYTES // 4)
    columns = f"{'MB':>6}{'median ms':>11}{'least':>9}{'of memory':>11}{'':>7}{'over int8':>11}"
    print(f"{'rows':>5} {'':14}{columns}")
    for rows in options.rows:
        read: list[float] = []
        end = time.perf_counter() + options.seconds
        while time.perf_counter() < end or len(read) < 3:
            read.append(stream_once(buffer))
            for form in forms:
                form.turn(rows)
        for form in forms:
            times, base = form.times[rows], forms[0].times[rows]
            median, least = statistics.median(times), min(times)
            shares = form.nbytes / median / statistics.median(read), form.nbytes / least / max(read)
            print(
                f"{rows:5} {form.name:14}{form.nbytes / 1e6:6.0f}{median * 1e3:11.2f}"
                f"{least * 1e3:9.2f}{shares[0]:11.0%}{shares[1]:7.0%}"
                f"{median / statistics.median(base):9.2f}{least / min(base):6.2f}"
            )
        print(
            f"      read at {statistics.median(read) / 1e9:.1f} GB/s, at best {max(read) / 1e9:.1f}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
