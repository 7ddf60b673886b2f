"""``x86quant serve`` as a process: it listens, answers, and ends when it is told to."""

from __future__ import annotations

import http.client
import json
import re
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_encoder import write_tiny_encoder
from x86quant.cli import main

pytest.importorskip("sentence_transformers")
pytest.importorskip("uvicorn")

pytestmark = pytest.mark.filterwarnings("ignore")  # of other packages


def _post(port: int, path: str, content: Any) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("POST", path, json.dumps(content))
    answer = connection.getresponse()
    found = answer.status, json.loads(answer.read())
    connection.close()
    return found


def test_a_process_serves_until_sigterm(tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    folder.mkdir()
    write_tiny_encoder(folder)
    command = [sys.executable, "-W", "ignore", "-m", "x86quant.cli", "serve", str(folder)]
    process = subprocess.Popen(
        [*command, "--port", "0", "--threads", "1"], stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stderr is not None
        said = ""
        while not (found := re.search(r"listening at http://127.0.0.1:(\d+)\n", said)):
            line = process.stderr.readline()
            assert line, said
            said += line
        port = int(found[1])
        assert re.search(r"tiny: embed, int8, up to 64 tokens", said)
        while True:
            try:
                status, one = _post(port, "/v1/embeddings", {"input": "a cat"})
                break
            except ConnectionRefusedError:
                assert process.poll() is None
        assert status == 200
        assert len(one["data"][0]["embedding"]) == 32
        assert _post(port, "/embed", {"inputs": 1})[0] == 422

        answers: list[int] = []
        long = {"inputs": ["a cat sat on the mat " * 9] * 128}
        asking = threading.Thread(target=lambda: answers.append(_post(port, "/embed", long)[0]))
        asking.start()
        while b'route="/embed",status="200"' not in (text := _metrics(port)):
            if b"x86quant_queue_texts 0\n" not in text:
                break  # it waits
        process.send_signal(signal.SIGTERM)
        asking.join()
        assert answers == [200]
        assert process.wait(60) == 0
        assert process.stderr.read().endswith("ended\n")
    finally:
        process.kill()
        process.wait()


def _metrics(port: int) -> bytes:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", "/metrics")
    found = connection.getresponse().read()
    connection.close()
    return found


def test_a_port_that_is_taken_is_told_before_loading(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["serve", "nowhere", "--port", str(port)]) == 2
    said = capsys.readouterr().err
    assert "another program is listening there" in said
    assert "loading" not in said
    assert main(["serve", "nowhere", "--port", "70000"]) == 2
    assert "give another port" in capsys.readouterr().err
    assert main(["serve", "nowhere", "--port", "0"]) == 2
    assert "nowhere is no folder" in capsys.readouterr().err
    assert main(["serve", "nowhere", "--port", "0", "--timeout", "-1"]) == 2
    assert "timeout_s must be more than 0" in capsys.readouterr().err
