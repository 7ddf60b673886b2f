"""One back end in a process of its own: how soon it answers, what memory it needs.

    parent ── python -m x86quant.bench.alone BACKEND FOLDER THREADS ──▶ loads, answers once
    parent ◀── {"seconds": 0.8, "peak_bytes": 300000000} ──
    parent ── "0.5\\n" ──▶ runs for half a second
    parent ◀── {"calls": 120, "seconds": 0.501} ──

FOLDER holds what the back end saved, and ``inputs.npz``. Several such processes, each held to its
own cores, are the instances of a server.
"""

from __future__ import annotations

import time

_STARTED = time.perf_counter()

import contextlib  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import select  # noqa: E402
import subprocess  # noqa: E402
import sys  # noqa: E402
from collections.abc import Collection, Iterator  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

from x86quant.bench.backends import backend  # noqa: E402
from x86quant.given_model import Arguments  # noqa: E402

_INPUTS = "inputs.npz"
#: Seconds after which a process that does not answer is given up.
PATIENCE = 300.0


class AloneError(Exception):
    """The process died, or does not answer."""


def save_inputs(call: Arguments, folder: Path) -> None:
    """Write the arguments for processes that may have no torch."""
    import numpy

    arrays = call.converted(numpy.asarray)
    named: dict[str, Any] = {f"p{i}": x for i, x in enumerate(arrays.args)}
    named |= {f"k{name}": x for name, x in arrays.kwargs.items()}
    numpy.savez(folder / _INPUTS, **named)


class AloneProcess:
    """The process, from outside.

    Args:
        name: of the back end.
        folder: what it saved.
        threads: how many it may use.
        cores: which to hold it to; all by default.
    """

    def __init__(
        self, name: str, folder: Path, threads: int, cores: Collection[int] | None = None
    ) -> None:
        self.name = name
        self._errors = (folder / f"errors-{os.getpid()}-{id(self)}").open("w+b")
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, name, str(folder), str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**os.environ, "OMP_NUM_THREADS": str(threads)},
            # Before any thread pool counts cores.
            preexec_fn=(lambda: os.sched_setaffinity(0, cores)) if cores else None,
        )

    def answer(self) -> dict[str, Any]:
        """Its next line.

        Raises:
            AloneError: there is none.
        """
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], PATIENCE)
        line = self._process.stdout.readline() if ready else b""
        if not line:
            raise AloneError(self._why(bool(ready)))
        answer: dict[str, Any] = json.loads(line)
        return answer

    def go(self, seconds: float) -> None:
        """Let it run for so long."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has died: ``answer`` says so
            self._process.stdin.write(f"{seconds}\n".encode())
            self._process.stdin.flush()

    def end(self) -> None:
        """Stop it."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            with contextlib.suppress(BrokenPipeError):
                assert stream is not None
                stream.close()

    def _why(self, ended: bool) -> str:
        if not ended:
            return f"did not answer for {PATIENCE:.0f} s"
        self._process.wait()
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return lines[-1][:300] if lines else f"ended with {self._process.returncode}"


@contextlib.contextmanager
def alone(
    name: str, folder: Path, threads: int, cores: Collection[int] | None = None
) -> Iterator[AloneProcess]:
    """An ``AloneProcess`` that ends with the block."""
    process = AloneProcess(name, folder, threads, cores)
    try:
        yield process
    finally:
        process.end()


def _read_inputs(folder: Path, *, tensors: bool) -> Arguments:
    import numpy

    with numpy.load(folder / _INPUTS) as file:
        found = {key: file[key] for key in file.files}
    if tensors:
        import torch

        found = {key: torch.from_numpy(x) for key, x in found.items()}
    args = tuple(x for key, x in found.items() if key.startswith("p"))
    return Arguments(args, {key[1:]: x for key, x in found.items() if key.startswith("k")})


def _peak_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def _run_for(run: Any, seconds: float) -> dict[str, float]:
    calls, start = 0, time.perf_counter()
    while not calls or time.perf_counter() - start < seconds:
        run()
        calls += 1
    return {"calls": calls, "seconds": time.perf_counter() - start}


def main(name: str, folder: Path, threads: int) -> None:
    """Load, answer, and run for as long as is asked for."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    foreign = name.startswith(("openvino", "onnxruntime"))
    with contextlib.ExitStack() as stack:
        if not foreign:
            import torch

            torch.set_num_threads(threads)
            stack.enter_context(torch.no_grad())
        if not foreign:
            from x86quant.torchvision_import import import_torchvision

            import_torchvision()  # transformers imports torchvision where there is one
        run = backend(name).load(folder, threads)(_read_inputs(folder, tensors=not foreign))
        run()
        seconds = time.perf_counter() - _STARTED
        run()
        print(json.dumps({"seconds": seconds, "peak_bytes": _peak_bytes()}), file=answers)
        answers.flush()
        for line in sys.stdin:
            print(json.dumps(_run_for(run, float(line))), file=answers)
            answers.flush()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
    os._exit(0)  # thread pools of several libraries; none is owed an orderly end
