"""Reading rows of memory at random, by the plainest loop there is: what bounds lookups.

A loop in C, compiled when it is asked for, reads a byte of each cache line of each row and fetches
rows some places ahead. What it reaches is what this machine gives to one thread, however lookups
are written; reading in order, which hardware fetches ahead by itself, is several times as fast.
"""

from __future__ import annotations

import ctypes
import functools
import shlex
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from x86quant.kernels.native.toolchain import compiler

#: How many rows ahead of the one that is read others are fetched; 0: none are.
AHEAD = (0, 8, 24, 48)

_SOURCE = """
#include <stdint.h>
int64_t read_rows(const uint8_t* rows, int64_t size, const int64_t* at, int64_t count,
                  int64_t ahead) {
  int64_t sum = 0;
  for (int64_t i = 0; i < count; ++i) {
    if (ahead && i + ahead < count) {
      const uint8_t* next = rows + at[i + ahead] * size;
      for (int64_t byte = 0; byte < size; byte += 64) __builtin_prefetch(next + byte);
      __builtin_prefetch(next + size - 1);
    }
    const uint8_t* row = rows + at[i] * size;
    for (int64_t byte = 0; byte < size; byte += 64) sum += row[byte];
    sum += row[size - 1];
  }
  return sum;
}
"""


@functools.cache
def _library() -> ctypes.CDLL:
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder) / "rows.c", Path(folder) / "rows.so"
        source.write_text(_SOURCE, encoding="utf-8")
        command = [*shlex.split(compiler()), "-x", "c", "-O2", "-shared", "-fPIC"]
        subprocess.run([*command, str(source), "-o", str(library)], check=True)
        return ctypes.CDLL(str(library))


def reading(rows: torch.Tensor, indices: torch.Tensor, ahead: int) -> Callable[[], object]:
    """A call that reads the rows [n, bytes] that int64 ``indices`` name, in their order."""
    read = _library().read_rows
    size, count, places = map(ctypes.c_int64, (rows.shape[1], len(indices), ahead))

    def run() -> object:
        first, at = (ctypes.c_void_p(x.data_ptr()) for x in (rows, indices))
        return read(first, size, at, count, places)

    return run
