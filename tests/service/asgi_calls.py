"""Calls of an ASGI application, without a server."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Sequence
from typing import Any


@dataclasses.dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


async def call(
    app: Any,
    path: str,
    content: Any = None,
    *,
    method: str | None = None,
    parts: Sequence[bytes] | None = None,
    headers: dict[str, str] | None = None,
    hang_up: asyncio.Event | None = None,
) -> Answer:
    """A request of ``content`` as JSON, or as the bytes that it is; a GET without any."""
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    sent = list(parts if parts is not None else [b"" if content is None else body])
    if headers is None:
        headers = {"content-length": str(sum(map(len, sent)))}
    waiting = [
        {"type": "http.request", "body": part, "more_body": place < len(sent) - 1}
        for place, part in enumerate(sent)
    ]
    answered: list[dict[str, Any]] = []

    async def receive() -> Any:
        if waiting:
            return waiting.pop(0)
        await (hang_up or asyncio.Event()).wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        answered.append(message)

    scope = {
        "type": "http",
        "method": method or ("GET" if content is None and parts is None else "POST"),
        "path": path,
        "headers": [(k.encode(), v.encode()) for k, v in headers.items()],
    }
    await app(scope, receive, send)
    if not answered:
        return Answer(0, {}, b"")
    start, rest = answered[0], answered[1:]
    found = {k.decode(): v.decode() for k, v in start["headers"]}
    body = b"".join(message["body"] for message in rest)
    assert int(found["content-length"]) == len(body)
    return Answer(start["status"], found, body)
