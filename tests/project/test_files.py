"""Writing files: atomic, and never in place of what is no file."""

from __future__ import annotations

import errno
import os
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import x86quant
from x86quant.errors import InvalidInputError
from x86quant.files import check_target, write_aside


def test_replaces_a_file_and_keeps_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text("old")
    path.chmod(0o600)
    write_aside(path, "new")
    assert path.read_text() == "new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


@pytest.mark.skipif(not hasattr(os, "O_TMPFILE"), reason="the system has no unnamed files")
def test_who_is_killed_meanwhile_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text("old")
    killed = (
        "import os, signal, sys; from pathlib import Path; from x86quant.files import write_aside; "
        "os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL); "
        "write_aside(Path(sys.argv[1]), 'new')"
    )
    assert subprocess.run([sys.executable, "-c", killed, str(path)]).returncode == -signal.SIGKILL
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("lacking", ["unnamed files", "links to them"])
def test_file_systems_without_unnamed_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lacking: str
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "not supported")

    if lacking == "links to them":
        monkeypatch.setattr(os, "link", refused)
    else:
        monkeypatch.delattr(os, "O_TMPFILE", raising=False)
    write_aside(tmp_path / "a", "new")
    assert (tmp_path / "a").read_text() == "new"
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_links_stay_links(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    target = tmp_path / "there" / "file"
    target.write_text("old")
    for name, to in (("link", target), ("chain", tmp_path / "link"), ("new", tmp_path / "made")):
        (tmp_path / name).symlink_to(to)
        write_aside(tmp_path / name, name)
        assert (tmp_path / name).is_symlink()
        assert to.read_text() == name
    assert not target.is_symlink()
    assert target.read_text() == "chain"


def test_a_pipe_is_written_through(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()))
    reader.start()
    write_aside(pipe, b"through")
    reader.join()
    assert read == [b"through"]
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_devices_stay_devices(tmp_path: Path) -> None:
    before = os.stat("/dev/null").st_mode
    write_aside(Path("/dev/null"), "nothing")
    (tmp_path / "link").symlink_to("/dev/null")
    write_aside(tmp_path / "link", "nothing")
    assert os.stat("/dev/null").st_mode == before
    if Path("/dev/full").exists():
        with pytest.raises(OSError, match="No space"):
            write_aside(Path("/dev/full"), "too much")
        assert stat.S_ISCHR(os.stat("/dev/full").st_mode)


def full_disk(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_loses_nothing_and_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "old").write_text("old")
    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match=r"disk is full, what was there before is untouched.*old"):
        write_aside(tmp_path / "old", "new")
    with pytest.raises(OSError, match=r"disk is full, nothing was written.*new"):
        write_aside(tmp_path / "new", "new")
    assert (tmp_path / "old").read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["old"]


def test_a_model_is_not_lost_to_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.ones(2, 16)
    model = x86quant.to_dynamic(torch.nn.Sequential(torch.nn.Linear(16, 4)).eval())
    path = tmp_path / "net.x86q"
    x86quant.save(model, path, example_inputs=(x,))
    before = path.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full_disk)
        with pytest.raises(OSError, match=r"the disk is full.*net\.x86q"):
            x86quant.save(model, path, example_inputs=(x,), metadata={"new": True})
    assert path.read_bytes() == before
    assert torch.equal(x86quant.load(path)(x), model(x))


def test_what_cannot_be_written_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    for target, message in (
        (".", "is a folder"),
        ("..", "is a folder"),
        ("/", "is a folder"),
        (str(tmp_path), "is a folder"),
        ("nowhere/file", "there is no folder"),
        ("circle", "circle cannot be written"),
        ("x" * 5000, "cannot be written"),
    ):
        with pytest.raises(InvalidInputError, match=message):
            write_aside(Path(target), "x")
        with pytest.raises(InvalidInputError, match=f"--out: .*{message}"):
            check_target(Path(target), "--out")
    assert [p.name for p in tmp_path.iterdir()] == ["circle"]
