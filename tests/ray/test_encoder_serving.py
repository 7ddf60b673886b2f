"""The encoder service as a deployment of Ray Serve, on a cluster of one machine."""

from __future__ import annotations

import json
import os
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # else Ray warns
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import numpy as np
import pytest
import ray
import ray.serve

from tests.tiny_encoder import WORDS, write_tiny_encoder
from x86quant.errors import InvalidInputError
from x86quant.ray import encoder_deployment, serve_encoder
from x86quant.service import Limits, load_engine

pytest.importorskip("sentence_transformers")

pytestmark = pytest.mark.filterwarnings("ignore")  # of other packages


@pytest.fixture
def _cluster() -> Iterator[None]:
    store = 80 * 2**20
    ray.init(
        "local", num_cpus=2, include_dashboard=False, object_store_memory=store, log_to_driver=False
    )
    yield
    ray.serve.shutdown()
    ray.shutdown()


def _post(url: str, content: Any) -> tuple[int, Any]:
    request = urllib.request.Request(url, json.dumps(content).encode(), method="POST")
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


@pytest.mark.usefixtures("_cluster")
def test_a_replica_answers_as_the_service_does(tmp_path: Path) -> None:
    folder = write_tiny_encoder(tmp_path)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    limits = Limits(body_bytes=2000)
    serve_encoder(folder, port=port, route="/encoder", replicas=(1, 2), limits=limits)
    url = f"http://127.0.0.1:{port}/encoder"
    status, found = _post(f"{url}/embed", {"inputs": ["a cat", "the mat"], "normalize": False})
    assert status == 200
    engine = load_engine(folder, threads=1)
    wanted = engine.run(engine.tokenize(["a cat", "the mat"]))
    np.testing.assert_allclose(found, wanted, atol=1e-5)
    status, found = _post(f"{url}/v1/embeddings", {"input": []})
    assert (status, found["error"]["message"]) == (400, "'input' is empty")
    assert _post(f"{url}/embed", {"inputs": " ".join(WORDS * 99)})[0] == 413
    assert _post(f"{url}/nothing", {})[0] == 404
    with urllib.request.urlopen(f"{url}/health", timeout=60) as answer:
        assert answer.status == 200


def test_deployments_of_nothing_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="is no folder"):
        encoder_deployment(tmp_path / "nothing")
    with pytest.raises(InvalidInputError, match="at least 1"):
        encoder_deployment(tmp_path, threads=0)
    with pytest.raises(InvalidInputError, match="least of them comes first"):
        encoder_deployment(tmp_path, replicas=(3, 2))
