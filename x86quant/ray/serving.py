"""An artifact served over HTTP by Ray Serve: ``deployment`` and ``serve_artifact``."""

from __future__ import annotations

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from ray import serve
from ray.serve.config import AutoscalingConfig
from ray.serve.context import _get_global_client
from starlette.requests import Request
from starlette.responses import Response

from x86quant.artifacts import describe
from x86quant.artifacts.reader import Input
from x86quant.errors import InvalidInputError, X86QuantError
from x86quant.ray.nodes import alive, check_packages
from x86quant.ray.pinned import PinnedModel, dtype_of
from x86quant.ray.requests import Sample, answer_all, read_body, read_sample, to_json
from x86quant.service.server import listening


class ArtifactServer:
    """What each replica runs: one model, one thread that calls it, requests in batches."""

    def __init__(
        self, path: str, max_batch_size: int, max_wait_s: float, threads: int, pin: bool
    ) -> None:
        # Beside the event loop, which goes on collecting requests while a batch runs.
        self._runner = ThreadPoolExecutor(1)
        data = Path(path).read_bytes()
        self._model = self._runner.submit(PinnedModel, data, threads=threads, pin=pin).result()
        self._inputs = known_inputs(path, self._model.inputs)
        self._names = [one.name for one in self._inputs]
        self._answer.set_max_batch_size(max_batch_size)
        self._answer.set_batch_wait_timeout_s(max_wait_s)
        for rows in {1, max_batch_size}:
            self._runner.submit(self._model.warm, rows).result()
        self._example = example(self._inputs)
        self._expected = _checksum(self._run([self._example])[0])

    async def __call__(self, request: Request) -> Response:
        """Answer a POST of one sample as JSON."""
        if request.method != "POST":
            return _refused(405, f"{request.method} is not taken: POST one sample as JSON")
        try:
            sample = read_body(await request.body(), self._inputs)
            return Response(to_json(await self._found(sample)), media_type="application/json")
        except InvalidInputError as error:
            return _refused(400, str(error))
        except X86QuantError as error:
            return _refused(500, str(error))

    async def predict(self, **values: Any) -> Any:
        """Answer a call by a handle: arrays, tensors or lists by name, without the batch."""
        return await self._found(read_sample(values, self._inputs))

    async def check_health(self) -> None:
        """Run a tiny inference; an error where its result is not what it was at the start."""
        loop = asyncio.get_running_loop()
        (found,) = await loop.run_in_executor(self._runner, self._run, [self._example])
        if _checksum(found) != self._expected:
            raise X86QuantError("the health check's inference has another result than at the start")

    async def _found(self, sample: Sample) -> Any:
        answer = await self._answer(sample)
        if isinstance(answer, Exception):
            raise answer
        return answer

    @serve.batch  # type: ignore[untyped-decorator]
    async def _answer(self, samples: list[Sample]) -> list[Any]:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._runner, self._run, samples)

    def _run(self, samples: list[Sample]) -> list[Any]:
        return answer_all(self._model, self._names, samples)


def deployment(
    path: str | os.PathLike[str],
    *,
    max_batch_size: int = 16,
    max_wait_ms: float = 5.0,
    replicas: int | tuple[int, int] = 1,
    threads: int = 1,
    pin: bool = True,
    name: str = "x86quant",
) -> serve.Application:
    """A Ray Serve application that answers with the artifact ``path``.

    A request waits until ``max_batch_size`` of them are there, or for ``max_wait_ms``. It is a POST
    of one sample as JSON, ``{"input": [[...]]}``, without the dimension of the batch.

    Args:
        path: what ``x86quant.save`` wrote, as one graph, at a place that every node can read.
        max_batch_size: requests in one call of the model.
        max_wait_ms: how long the first request of a batch waits for others.
        replicas: how many processes, or the least and the most, between which Serve scales them
            such that each has about ``max_batch_size`` requests under way.
        threads: threads of each, which Ray counts as so many CPUs.
        pin: hold each replica to cores that no other has, where there are enough.
        name: what Serve calls it.

    Raises:
        ArtifactError: the file cannot be loaded.
        InvalidInputError: an argument makes no sense, or the file does not say its inputs.
    """
    if min(max_batch_size, threads) < 1 or max_wait_ms < 0:
        raise InvalidInputError(
            "max_batch_size and threads are at least 1, and max_wait_ms at least 0"
        )
    where = os.path.abspath(path)
    known_inputs(where, describe(where).inputs)
    kind = serve.deployment(ArtifactServer).options(
        name=name,
        max_ongoing_requests=2 * max_batch_size,
        ray_actor_options={"num_cpus": threads},
        **scaling(replicas, max_batch_size),
    )
    return kind.bind(where, max_batch_size, max_wait_ms / 1e3, threads, pin)


def scaling(replicas: int | tuple[int, int], ongoing: int) -> dict[str, Any]:
    """Options of a deployment: so many replicas, or between two numbers.

    Each then has about ``ongoing`` requests under way.

    Raises:
        InvalidInputError: these are no such numbers.
    """
    least, most = replicas if isinstance(replicas, tuple) else (replicas, replicas)
    if most < 1 or not 0 <= least <= most:
        raise InvalidInputError(
            f"replicas are at least 1, and the least of them comes first, not {replicas}"
        )
    if not isinstance(replicas, tuple):
        return {"num_replicas": least}
    return {
        "autoscaling_config": AutoscalingConfig(
            min_replicas=least, max_replicas=most, target_ongoing_requests=ongoing
        )
    }


def serve_artifact(
    path: str | os.PathLike[str],
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    route: str = "/",
    name: str = "x86quant",
    **options: Any,
) -> Any:
    """Serve the artifact ``path`` at ``http://host:port/route``, and return a handle to it.

    Starts Ray and Serve unless they run. ``options`` are those of ``deployment``.

    Raises:
        InvalidInputError: the port is taken, or Serve runs at another one already.
        UnsupportedError: a node of the cluster lacks x86quant, or has another version.
    """
    application = deployment(path, name=name, **options)
    return run_application(application, host=host, port=port, route=route, name=name)


def run_application(
    application: serve.Application, *, host: str, port: int, route: str, name: str
) -> Any:
    """Serve ``application`` at ``http://host:port/route``, and return a handle to it.

    Raises:
        InvalidInputError: the port is taken, or Serve runs at another one already.
        UnsupportedError: a node of the cluster lacks x86quant, or has another version.
    """
    if not ray.is_initialized():
        ray.init()
    check_packages(alive())
    running = _get_global_client(raise_if_no_controller_running=False)
    if running is None:
        listening(host, port).close()
        serve.start(http_options={"host": host, "port": port})
    elif running.http_config.port != port:
        raise InvalidInputError(
            f"Serve runs in this cluster at port {running.http_config.port} already, and has one "
            f"port for all: leave out port={port}, or end it with ray.serve.shutdown()"
        )
    return serve.run(application, name=name, route_prefix=route)


def known_inputs(path: str, inputs: tuple[Input, ...]) -> tuple[Input, ...]:
    """``inputs``, where they say what a request must be.

    Raises:
        InvalidInputError: they do not.
    """
    if not inputs or any(one.dtype is None or not one.shape for one in inputs):
        raise InvalidInputError(
            f"{path} does not say what its inputs are, so requests cannot be checked: save the "
            "model as one graph, with example_inputs whose first size is the batch"
        )
    return inputs


def example(inputs: tuple[Input, ...]) -> Sample:
    """A sample for health checks: noise where inputs are floats, ones elsewhere."""
    make = torch.Generator().manual_seed(0)
    found: Sample = {}
    for one in inputs:
        dtype, shape = dtype_of(str(one.dtype)), (one.shape or ())[1:]
        values = (
            torch.randn(shape, generator=make, dtype=torch.float32)
            if dtype.is_floating_point
            else torch.ones(shape, dtype=torch.float32)
        )
        found[one.name] = values.to(dtype)
    return found


def _checksum(answer: Any) -> Any:
    """Something that is equal for answers that are the same bit for bit."""
    if isinstance(answer, Exception):
        raise answer
    if isinstance(answer, dict):
        return {name: _checksum(part) for name, part in answer.items()}
    if isinstance(answer, list):
        return [_checksum(part) for part in answer]
    return answer.tobytes() if isinstance(answer, np.ndarray | np.generic) else answer


def _refused(status: int, why: str) -> Response:
    return Response(to_json({"error": why}), status, media_type="application/json")
