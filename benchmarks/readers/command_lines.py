"""The command line, up to where a command would begin to measure, quantize or serve."""

from __future__ import annotations

import contextlib
import io
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import torch
from torch import nn

import x86quant
from benchmarks.readers.changes import NUMBERS
from benchmarks.readers.reader import Depth, Reader, WrongAnswerError
from x86quant.cli import COMMANDS, main
from x86quant.errors import TRACEBACK_VARIABLE

#: What takes long, or goes on for ever.
_WORK = (
    "x86quant.quantize",
    "x86quant.quantization.quantize",
    "x86quant.cli.loading.compile_model",
    "x86quant.bench.campaign.run_campaign",
    "x86quant.service.load_engine",
    "x86quant.tuning.session.run",
    "x86quant.tuning.quick.measure_few",
    "x86quant.tuning.fit.fit",
    "x86quant.tuning.table_diff.diff_tables",
    "x86quant.ray.fleet.connect",
)
_SOURCE = """
import torch
from torch import nn

def conv():
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())

def batches():
    return [torch.randn(1, 3, 8, 8)]

def raises():
    raise KeyError("scores")
"""
_LINES = (
    "info", "info --json", "cpp --cflags",
    "quantize models.py:conv --data models.py:batches --out new.x86q --json",
    "quantize models.py:conv --mode dynamic --out new.x86q --weight-bits 4 --threads 2",
    "quantize models.py:conv --data numbers.npy --out new.onnx --float-layer 0 --max-drop 0.1",
    "explain models.py:conv --shape 1,3,8,8 --json", "explain net.x86q",
    "bench models.py:conv --shape 1,3,8,8 --rounds 2 --batch 1,2 --threads 1,2 --no-cold-start",
    "report net.x86q --out report.html",
    "report models.py:conv --data models.py:batches --out report.html --json",
    "serve folder --port 0 --threads 1 --timeout 3 --grace 1 --inputs 4 --body-bytes 100",
    "tune --quick", "tune --budget 5 --out t.csv --isa avx2",
    "rules list --json", "rules show default", "rules check rules.toml default", "rules check",
    "rules diff default rules.toml --rows 4 --batch 2 --isa avx2",
    "rules fit t.csv --isa avx2 --name mine --out mine.toml", "rules score t.csv --json",
    "export-program net.x86q --shape 1,3,8,8 --shape 2,3,8,8 -o net.xq --threads 1",
    "cpp --libs --include-dir",
)  # fmt: skip
_PIECES = (
    *NUMBERS, "--json", "--help", "--out", "--", "-", "-o", "--shape", "1,3,8,8", "0,0", "1,,2",
    "2x5:int64", "ids=2x5:int64", "=", ":", "models.py:", ":conv", "models.py:raises", "math:pi",
    "no.such:thing", "models.py:conv:conv", "..", ".", "/", "", " ", "damaged.x86q", "folder",
    "net.x86q", "rest.onnx", "rules.toml", "t.csv", "numbers.npy", "--isa", "avx2", "amx_int8",
    "--threads", "--model", "--data", "\udcff", "é", "a" * 300, "@file", "--no-speed-check",
    "compare",
)  # fmt: skip


class _ReachedWorkError(BaseException):
    """The command line was understood."""


def _change(rng: random.Random, data: bytes) -> bytes:
    words = data.decode("utf-8", "surrogateescape").split("\0")
    for _ in range(rng.choice((1, 1, 2))):
        place = rng.randrange(len(words) + 1)
        how = rng.randrange(10)
        if how == 0 and len(words) > 1:
            del words[place - 1]
        elif how == 1:
            words.insert(place, rng.choice(rng.choice(_LINES).split(" ")))
        elif how == 2:
            words.insert(place, rng.choice(_PIECES))
        else:  # what is given to an option, or stands for itself
            values = [n for n, word in enumerate(words) if n and not word.startswith("-")]
            place = rng.choice(values or [0])
            number = words[place].isdecimal()
            words[place] = rng.choice(NUMBERS if number else (*_PIECES, *COMMANDS))
    return "\0".join(words).replace("\n", " ").encode("utf-8", "surrogateescape")


def _make_files(folder: Path) -> None:
    """What the lines name."""
    import numpy as np

    (folder / "models.py").write_text(_SOURCE)
    x = torch.randn(1, 3, 8, 8)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()).eval()
    x86quant.save(x86quant.quantize(model, [x], speed_check=False, progress=False), "net.x86q")
    (folder / "damaged.x86q").write_bytes(Path("net.x86q").read_bytes()[:-9])
    (folder / "rest.onnx").write_bytes(b"\x08\x07")
    np.save("numbers.npy", x.numpy())
    (folder / "folder").mkdir()
    (folder / "rules.toml").write_text(
        'schema = 1\nname = "mine"\nextends = "default"\n\n'
        '[[rule]]\nop = "linear"\nuse = "onednn"\n'
    )
    rows = Path(x86quant.__file__).parents[1] / "rules" / "measurements" / "avx2.csv"
    (folder / "t.csv").write_text("\n".join(rows.read_text().split("\n")[:60]))


@contextlib.contextmanager
def _without_work() -> Iterator[None]:
    def reached(*_: Any, **__: Any) -> NoReturn:
        raise _ReachedWorkError

    with contextlib.ExitStack() as stack:
        for name in _WORK:
            stack.enter_context(mock.patch(name, reached))
        # Seconds for each ``rules diff``; the files are no input.
        stack.enter_context(mock.patch("x86quant.cli.rules._on_record", list))
        yield


def command_line(folder: Path) -> Reader:
    """Words with zeros between."""
    os.chdir(folder)
    _make_files(folder)
    os.environ[TRACEBACK_VARIABLE] = "1"  # what nobody foresaw is a finding
    os.environ["XDG_CACHE_HOME"] = os.environ["XDG_CONFIG_HOME"] = str(folder / "home")

    def read(data: bytes) -> Depth:
        words = data.decode("utf-8", "surrogateescape").split("\0")
        said, told = io.StringIO(), io.StringIO()
        os.chdir(folder)
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(told), _without_work():
            try:
                status = main(words)
            except _ReachedWorkError:
                return Depth.READ
            except RuntimeError as error:
                if "can't allocate memory" not in str(error):
                    raise
                return Depth.REFUSED  # an input of the size that was asked for
            except SystemExit as ended:
                return Depth.READ if ended.code in (0, None) else Depth.FIRST
        if status == 2:
            lines = [line for line in told.getvalue().splitlines() if line.startswith("x86quant ")]
            if len(lines) != 1:
                raise WrongAnswerError(f"not one line: {told.getvalue()!r}")
            return Depth.REFUSED
        return Depth.READ

    samples = ["\0".join(line.split(" ")).encode() for line in _LINES]
    return Reader(samples, _change, read, least=0.2)
