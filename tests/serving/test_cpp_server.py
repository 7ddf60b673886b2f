"""The example server: built, asked by its client, and by clients that do not behave."""

from __future__ import annotations

import contextlib
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import x86quant

EXAMPLE = Path(__file__).parents[2] / "examples" / "cpp"


@pytest.fixture(scope="module")
def client() -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLE / "client.py"))


@pytest.fixture(scope="module")
def binary(client: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return client["build"](tmp_path_factory.mktemp("server"))


@pytest.fixture(scope="module")
def program(client: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    int8, x = client["model"]()
    path = tmp_path_factory.mktemp("program") / "model.xq"
    x86quant.export_program(int8, path, [x[:1], x])
    return path


@contextlib.contextmanager
def served(binary: Path, program: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """The server and its port; ended by force if a test has not ended it."""
    command = [str(binary), str(program), "--port", "0", "--threads", "1", "--workers", "2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            yield server, int(server.stdout.readline().rsplit(":", 1)[1])
        finally:
            server.kill()


def raw(port: int, request: bytes) -> str:
    """The status line, or what there is of it, that the server answers to some bytes."""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        connection.sendall(request)
        connection.shutdown(socket.SHUT_WR)
        return connection.makefile("rb").readline().decode().strip()


def test_the_answers_over_http_are_those_of_python(
    client: dict[str, Any], binary: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main = client["main"]
    main.__globals__["build"] = lambda folder: binary
    main()
    said = capsys.readouterr().out
    assert said.count("of C++ and Python are equal: True") == 2
    assert "health: ok" in said
    assert "exit status: 0" in said


def test_bad_requests_are_answered_and_harm_nothing(
    client: dict[str, Any], binary: Path, program: Path
) -> None:
    with served(binary, program) as (server, port):
        run = b"POST /run HTTP/1.1\r\nX-Shape: %s\r\nContent-Length: %d\r\n\r\n%s"
        for request, status in (
            (b"GET /nothing HTTP/1.1\r\n\r\n", "404"),
            (run % (b"1,3,32,32", 8, b"12345678"), "400"),
            (run % (b"2,3,32,32", 24576, bytes(24576)), "400"),
            (run % (b"1,-3", 4, b"1234"), "400"),
            (run % (b"9" * 40, 4, b"1234"), "400"),
            (run % (b",".join([b"1"] * 30), 4, b"1234"), "500"),
            (run % (b"", 0, b""), "400"),
            (b"POST /run HTTP/1.1\r\nContent-Length: 999999999999\r\n\r\n", "413"),
            (b"POST /run HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n", "411"),
            (b"GET /health HTTP/1.1\r\nX: " + b"x" * 40000, "431"),
            (b"\0\1\2\3\r\n\r\n", "404"),
            (b"GET /health HTTP/1.1\r\n", ""),
            (b"POST /run HTTP/1.1\r\nContent-Length: 100\r\n\r\nshort", ""),
        ):
            assert raw(port, request)[9:12] == status, request[:80]
        shapes = urllib.request.urlopen(f"http://127.0.0.1:{port}/shapes").read().decode()
        assert shapes == "1,3,32,32\n8,3,32,32\n"
        with pytest.raises(urllib.error.HTTPError) as caught:
            client["ask"](f"http://127.0.0.1:{port}", torch.zeros(2, 3, 32, 32))
        assert b"it has plans for float32 [1, 3, 32, 32] and" in caught.value.read()
        assert server.poll() is None


def test_a_stop_ends_open_connections(binary: Path, program: Path) -> None:
    with (
        served(binary, program) as (server, port),
        socket.create_connection(("127.0.0.1", port)) as connection,
    ):
        connection.sendall(b"GET /health HTTP/1.1\r\n\r\n")
        assert connection.recv(12) == b"HTTP/1.1 200"
        server.send_signal(signal.SIGTERM)
        assert server.wait(timeout=30) == 0


def test_a_port_in_use_is_said(binary: Path, program: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        command = [str(binary), str(program), "--port", str(port)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert f"cannot listen on port {port}: Address already in use" in done.stderr


def test_a_file_that_is_no_program_is_said(binary: Path) -> None:
    done = subprocess.run([binary, __file__], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "no program file" in done.stderr


def test_cmake_builds_the_server(tmp_path: Path) -> None:
    if shutil.which("cmake") is None:
        pytest.skip("there is no cmake")
    command = f"-DX86QUANT={sys.executable};-m;x86quant"
    for step in (["-S", str(EXAMPLE), "-B", str(tmp_path), command], ["--build", str(tmp_path)]):
        subprocess.run(["cmake", *step], check=True, stdout=subprocess.DEVNULL)
    assert (tmp_path / "server").exists()
