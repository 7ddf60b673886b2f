"""The process that runs kernels, held to one ISA level, and the side that talks to it.

Kernels may crash. So they run in a process of their own that is told what to measure by lines of
JSON, and writes which kernel it is about to run into a file that outlives it: what ended the
process is recorded as failed, another process takes over, and the run goes on.

    parent ── {"cases": [...], "limit": 0.5, "excluded": [...]} ──▶ python -m x86quant.tuning.worker
    parent ◀── {"measurements": [...]} ──
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from x86quant.errors import TuningError
from x86quant.hardware.isa import VARIABLE as ISA_VARIABLE
from x86quant.routing.in_force import VARIABLE as RULES_VARIABLE
from x86quant.tuning.measurement_files import (
    Row,
    case_from_cells,
    case_to_cells,
    from_cells,
    to_cells,
)
from x86quant.tuning.measurements import Case, Measurement

_COMMAND = (sys.executable, "-m", "x86quant.tuning.worker")
#: Seconds after which a kernel counts as hanging.
PATIENCE = 120.0
_LOOK_EVERY = 5.0
_MARK_BYTES = 256
# Seconds to wait for the end of a process that is done, or writes a core file.
_GRACE = 10.0
# Seconds for a process to start: it imports torch.
_START = 120.0
_READY = b"ready\n"
_PR_SET_PDEATHSIG = 1  # of linux/prctl.h


class Worker:
    """A process that measures at one ISA level; started when needed, and again after a crash."""

    def __init__(
        self, isa: str, command: Sequence[str] = _COMMAND, patience: float = PATIENCE
    ) -> None:
        self._isa = isa
        self._command = command
        self._patience = patience
        self._process: subprocess.Popen[bytes] | None = None
        # Files rather than pipes: nobody needs to read along, and they outlive a crash.
        self._mark: IO[bytes] = tempfile.NamedTemporaryFile(prefix="x86quant-tune-")  # noqa: SIM115
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process, whatever it does."""
        if self._process is not None:
            self._process.kill()
            self._stop()
        self._mark.close()
        self._errors.close()

    def measure(self, cases: Sequence[Case], limit: float) -> list[Measurement]:
        """Measure cases of one op; kernels that end the process are among the results.

        Raises:
            TuningError: the process ends, and no kernel is to blame.
        """
        excluded: dict[tuple[str, str], str] = {}
        while True:
            request = {
                "cases": [case_to_cells(case) for case in cases],
                "limit": limit,
                "excluded": [[*key, why] for key, why in excluded.items()],
            }
            answer = self._ask(request)
            if not isinstance(answer, str):
                rows = (Row("worker", 1, cells) for cells in answer["measurements"])
                return [from_cells(row) for row in rows]
            why, culprit = answer, self._marked()
            if culprit is None or culprit in excluded:
                raise self._failure(why, f"at {cases[0]}")
            excluded[culprit] = why

    def _ask(self, request: dict[str, Any]) -> dict[str, Any] | str:
        """The answer, or how the process ended."""
        process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()
        except BrokenPipeError:
            return self._stop()
        if not self._answers(process):
            process.kill()
            self._stop()
            return f"it did not finish within {self._patience:.0f} s"
        line = process.stdout.readline()
        if not line.endswith(b"\n"):
            return self._stop()
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _answers(self, process: subprocess.Popen[bytes]) -> bool:
        """Wait for an answer, or an end; False when one kernel runs longer than our patience."""
        running, since = self._marked(), time.monotonic()
        while not _readable(process, min(self._patience, _LOOK_EVERY)):
            now = time.monotonic()
            if self._marked() != running:
                running, since = self._marked(), now
            elif now - since >= self._patience:
                return False
        return True

    def _start(self) -> subprocess.Popen[bytes]:
        environment = {**os.environ, ISA_VARIABLE: self._isa}
        # Which table is in force is no matter here, and a broken one must not stop us.
        environment.pop(RULES_VARIABLE, None)
        self._mark.seek(0)  # what the process before ran is no fault of this one
        self._mark.write(bytes(_MARK_BYTES))
        self._mark.flush()
        self._process = subprocess.Popen(
            [*self._command, self._mark.name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=environment,
            # Ctrl-C is for the parent, which ends this process when it is done.
            start_new_session=True,
        )
        assert self._process.stdout is not None
        if not _readable(self._process, _START) or self._process.stdout.readline() != _READY:
            raise self._failure(self._stop(), "before it measured anything")
        return self._process

    def _failure(self, why: str, when: str) -> TuningError:
        return TuningError(
            f"the measuring process for {self._isa} failed: {why}, {when}. Its last words:\n"
            f"{self._last_words()}"
        )

    def _stop(self) -> str:
        """Let go of the process; how it ended, in words."""
        process, self._process = self._process, None
        if process is None:
            return "it did not start"
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        try:
            code = process.wait(_GRACE)  # it ends when nobody asks any more
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
        if code < 0:
            return f"the process died of {signal.Signals(-code).name}"
        return f"the process ended with exit status {code}"

    def _marked(self) -> tuple[str, str] | None:
        """The caller and kernel that ran last."""
        text = Path(self._mark.name).read_bytes().rstrip(b"\0 ").decode()
        caller, _, kernel = text.partition(" ")
        return (caller, kernel) if kernel else None

    def _last_words(self) -> str:
        self._errors.seek(0)
        return "\n".join(self._errors.read().decode(errors="replace").splitlines()[-8:])


def _readable(process: subprocess.Popen[bytes], timeout: float) -> bool:
    assert process.stdout is not None
    return bool(select.select([process.stdout], [], [], timeout)[0])


# ---------------------------------------------------------------------------- the other side


def main(mark: str) -> int:
    """Answer requests until there are none."""
    from x86quant import extension
    from x86quant.tuning.measure import measure

    warnings.simplefilter("ignore")
    # A kernel that hangs does not see that nobody asks any more.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    extension.load()
    # Whatever a library prints must not be taken for an answer.
    with os.fdopen(os.dup(1), "wb") as answers, _open_mark(mark) as marked:
        os.dup2(2, 1)

        def announce(caller: str, kernel: str) -> None:
            marked[:] = f"{caller} {kernel}".encode().ljust(_MARK_BYTES)

        answers.write(_READY)
        answers.flush()
        for line in sys.stdin:
            request = json.loads(line)
            measurements = measure(
                [case_from_cells(Row("request", 1, cells)) for cells in request["cases"]],
                limit=request["limit"],
                excluded={(caller, kernel): why for caller, kernel, why in request["excluded"]},
                announce=announce,
            )
            answer = {"measurements": [to_cells(m) for m in measurements]}
            answers.write(json.dumps(answer).encode() + b"\n")
            answers.flush()
    return 0


@contextlib.contextmanager
def _open_mark(path: str) -> Iterator[mmap.mmap]:
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), _MARK_BYTES) as marked:
        yield marked


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
