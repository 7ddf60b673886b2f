"""A tuning worker whose kernels do what their names say: run as a script by tests of tuning."""

from __future__ import annotations

import functools
import os
import signal
import sys
import time
from pathlib import Path

import torch

from x86quant.tuning import measure, worker
from x86quant.tuning.candidates import Candidate, MakeOperands
from x86quant.tuning.measurements import Caller
from x86quant.tuning.operands import FULL, Operands


class Fake:
    """Right at once; what it is named comes later."""

    def __init__(self, name: str, operands: Operands) -> None:
        self.name, self.operands = name, operands

    def result(self) -> torch.Tensor:
        if self.name == "segfaults":
            os.kill(os.getpid(), signal.SIGSEGV)
        (_, expected), *_ = self.operands.expected
        return expected

    def spread(self, copies: int) -> None:
        pass

    def seconds(self, calls: int, *, rotated: bool) -> float:
        if self.name == "hangs":
            time.sleep(600)
        # Hangs on the op of 8 channels while the file is there.
        flag = os.environ.get("FAKE_HANG", "")
        if flag and Path(flag).exists() and self.operands.spec.in_channels == 8:
            time.sleep(600)
        return {"fast": 1e-5}.get(self.name, 2e-5)


def find(names: list[str], caller: Caller, operands: MakeOperands) -> list[Candidate]:
    made = operands(FULL)
    return [
        Candidate(caller, name, functools.partial(Fake, name, made), "ok", operands=made)
        for name in names
    ]


if __name__ == "__main__":
    *kernels, mark = sys.argv[1:]
    measure.measure = functools.partial(measure.measure, find=functools.partial(find, kernels))
    sys.exit(worker.main(mark))
