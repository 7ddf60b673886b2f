"""Loading a file starts no process, opens no connection and unpickles nothing; what is beside."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import torch

import x86quant
from benchmarks.readers import READERS
from tests.artifact_models import FORMS, mixed

_ENDS_ON = """
import sys

ENDED_BY = ("socket.connect", "socket.bind", "socket.getaddrinfo", "subprocess.Popen", "os.system",
            "os.exec", "os.posix_spawn", "os.fork", "pickle.find_class", "urllib.Request")

def watch(event, arguments):
    if event in ENDED_BY:
        raise SystemExit(f"{event}: {arguments}")
"""


def _watched(script: str, *arguments: str) -> str:
    """What a process says in which ``script`` runs behind ``watching()``."""
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _ENDS_ON + textwrap.dedent(script), *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_saved_models(tmp_path: Path) -> None:
    graph, x = mixed()
    x86quant.save(graph, tmp_path / "graph")
    inputs = {"graph": x}
    for form, make in FORMS.items():
        model, inputs[form], skeleton = make()
        if skeleton is None:
            x86quant.save(model, tmp_path / form)
    torch.save({k: x for k, x in inputs.items() if (tmp_path / k).exists()}, tmp_path / "inputs")
    said = _watched(
        """
        import torch, x86quant
        inputs = torch.load(sys.argv[1] + "/inputs", weights_only=True)
        for watched in (False, True):  # modules of torch that are imported start processes
            if watched:
                sys.addaudithook(watch)
            for form, x in inputs.items():
                x86quant.load(f"{sys.argv[1]}/{form}")(x)
        print(*inputs)
        """,
        str(tmp_path),
    )
    assert said.split() == ["graph", "exported"]


def test_what_others_write(tmp_path: Path) -> None:
    """The samples of the fuzz: ONNX models, checkpoints, GGUF files, tables, requests."""
    names = [n for n in READERS if n not in ("command-line", "packed-cache", "gguf-model")]
    said = _watched(
        """
        from pathlib import Path
        from benchmarks.readers import reader
        found = []
        for name in sys.argv[2:]:
            Path(sys.argv[1], name).mkdir()
            found.append((name, reader(name, Path(sys.argv[1], name))))
        for name, one in found:
            for sample in one.samples:
                one.read(sample)  # imports what it needs
        sys.addaudithook(watch)
        for name, one in found:
            assert all(one.read(sample).name == "READ" for sample in one.samples), name
            print(name)
        """,
        str(tmp_path),
        *names,
    )
    assert said.split() == names


def test_the_watch_sees_what_it_looks_for() -> None:
    for act in (
        "subprocess.run(['true'])",
        "socket.create_connection(('127.0.0.1', 9))",
        "pickle.loads(pickle.dumps(print))",
    ):
        ended = subprocess.run(
            [
                sys.executable,
                "-c",
                f"{_ENDS_ON}\nimport subprocess, socket, pickle\nsys.addaudithook(watch)\n{act}",
            ],
            capture_output=True,
            text=True,
            check=False,
        )
        assert ended.returncode == 1
        assert ended.stderr.startswith(("subprocess", "socket", "pickle"))


def test_every_dependency_is_told_of() -> None:
    """Those of a user: the other extras are for tests, benchmarks, documents and wheels."""
    page = Path(__file__).parents[2] / "docs/security.md"
    told = page.read_text().partition("## Dependencies")[2].partition("\n## ")[0]
    needed = set()
    for line in importlib.metadata.requires("x86quant") or ():
        extra = re.search(r"extra == ['\"](\w+)", line)
        if extra is None or extra[1] in ("onnx", "serve", "ray", "gguf", "huggingface", "pt2e"):
            needed.add(re.split(r"[^\w-]", line)[0])
    rows = "".join(row.split("|")[1] for row in told.split("\n") if row.startswith("|"))
    assert needed >= {"torch", "orjson"}
    assert needed == needed & set(re.findall(r"[\w-]+", rows))


def test_the_page_says_how_much_runs_each_time() -> None:
    root = Path(__file__).parents[2]
    page = (root / "docs" / "security.md").read_text().splitlines()
    run = (root / ".ci" / "run").read_text()
    for command, option, every in (
        ("benchmarks.fuzz_readers", "--count", (1,)),
        ("tools.sanitize_serving --kinds", "--seeds", (1, 10)),  # of each form a tenth
        ("tests.native.sanitize", "--seeds", (1,)),
    ):
        module = command.partition(" ")[0]
        (count,) = re.findall(rf"-m {re.escape(module)} .*{option} (\d+)", run)
        (line,) = (x for x in page if x.endswith(f"`python -m {command}` |"))
        told = [int(number.replace(",", "")) for number in re.findall(r"\b\d[\d,]*\b", line)]
        assert told == [int(count) // share for share in every], line
