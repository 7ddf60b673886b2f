"""An ``EncoderService`` as an ASGI application, for any server of such."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from x86quant.service.encoder_service import EncoderService, Reply
from x86quant.service.request_forms import RefusedError

_Message = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[_Message]]
_Send = Callable[[_Message], Awaitable[None]]
Application = Callable[[_Message, _Receive, _Send], Awaitable[None]]


class _HungUpError(Exception):
    """The client has gone."""


def application(service: EncoderService) -> Application:
    """The ASGI application of ``service``."""

    async def run(scope: _Message, receive: _Receive, send: _Send) -> None:
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
        elif scope["type"] == "http":
            with contextlib.suppress(_HungUpError):
                await _http(service, scope, receive, send)
        else:
            raise ValueError(f"this application does not speak {scope['type']}")

    return run


async def _lifespan(receive: _Receive, send: _Send) -> None:
    while True:
        kind = (await receive())["type"].removeprefix("lifespan.")
        await send({"type": f"lifespan.{kind}.complete"})
        if kind == "shutdown":
            return


async def _http(service: EncoderService, scope: _Message, receive: _Receive, send: _Send) -> None:
    path = scope["path"]
    try:
        body = await asyncio.wait_for(
            _body(scope, receive, service.limits.body_bytes), service.limits.timeout_s
        )
    except (RefusedError, asyncio.TimeoutError) as error:
        slow = RefusedError(408, f"the request was not here in {service.limits.timeout_s:g} s")
        reply = service.refusal(path, error if isinstance(error, RefusedError) else slow)
        service.count(path, reply, 0.0)
        # What was not read of the request is not the beginning of another.
        await _send(reply, send, {"connection": "close"})
        return
    await _send(await _unless_hung_up(service.answer(scope["method"], path, body), receive), send)


async def _body(scope: _Message, receive: _Receive, most: int) -> bytes:
    """The whole body.

    Raises:
        RefusedError: it has more than ``most`` bytes.
        _HungUpError: the client went before it had sent all.
    """
    too_long = RefusedError(413, f"the request has more than {most} bytes")
    length = dict(scope["headers"]).get(b"content-length", b"0")
    if not length.isdigit() or int(length[:20]) > most:
        raise too_long
    parts: list[bytes] = []
    size, more = 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise _HungUpError
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > most:
            raise too_long
        more = message.get("more_body", False)
    return b"".join(parts)


async def _unless_hung_up(answer: Any, receive: _Receive) -> Reply:
    """What ``answer`` comes to; it is cancelled once the client has gone."""
    working = asyncio.ensure_future(answer)
    gone = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise _HungUpError
        reply: Reply = working.result()
        return reply
    finally:
        for task in (working, gone):
            task.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


async def _disconnect(receive: _Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send(reply: Reply, send: _Send, more: dict[str, str] | None = None) -> None:
    headers = {
        "content-type": reply.content_type,
        "content-length": str(len(reply.body)),
        **reply.headers,
        **(more or {}),
    }
    encoded = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": reply.status, "headers": encoded})
    await send({"type": "http.response.body", "body": reply.body})
