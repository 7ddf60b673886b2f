"""Texts of all requests in batches: how large, in which order, and who leaves the queue."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tests.service.asgi_calls import call
from tests.service.word_engine import WordEngine
from x86quant.service import EncoderService, Limits, application


def _run(
    body: Callable[[Any, WordEngine, EncoderService], Awaitable[None]],
    engine: WordEngine | None = None,
    **limits: Any,
) -> None:
    engine = engine or WordEngine()
    service = EncoderService(engine, Limits(**limits))

    async def run() -> None:
        await asyncio.wait_for(body(application(service), engine, service), 30)

    try:
        asyncio.run(run())
    finally:
        engine.free.set()


def _ask(app: Any, text: Any, **options: Any) -> asyncio.Task[Any]:
    asked = {"inputs": text, "normalize": False}
    return asyncio.ensure_future(call(app, "/embed", asked, **options))


async def _until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


async def _busy(app: Any, engine: WordEngine) -> asyncio.Task[Any]:
    """A request that the engine has begun with, and will not end."""
    engine.free.clear()
    first = _ask(app, "a")
    await _until(engine.began.is_set)
    return first


@pytest.mark.parametrize("pads", [False, True])
def test_a_batch_holds_so_many_tokens(pads: bool) -> None:
    async def body(app: Any, engine: WordEngine, service: EncoderService) -> None:
        first = await _busy(app, engine)
        lengths = (4, 2, 2, 2, 1, 11, 1)
        rest = []
        for length in lengths:
            rest.append(_ask(app, "a " * length))
            await _until(lambda: service._batcher.waiting == len(rest))
        engine.free.set()
        answers = await asyncio.gather(first, *rest)
        assert [answer.json()[0][0] for answer in answers] == [1, *lengths]
        # A text that alone is too long for a batch is one by itself.
        wanted = [[4, 2], [2, 2, 1], [11], [1]] if pads else [[4, 2, 2], [2, 1], [11], [1]]
        assert engine.batches == [[1], *wanted]

    _run(body, WordEngine(pads=pads), batch_tokens=8)


def test_nothing_is_taken_beyond_what_may_wait() -> None:
    async def body(app: Any, engine: WordEngine, service: EncoderService) -> None:
        first = await _busy(app, engine)
        second = _ask(app, ["b", "c"])
        await _until(lambda: service._batcher.waiting == 2)
        refused = await _ask(app, ["d", "e"])
        assert (refused.status, refused.headers["retry-after"]) == (429, "1")
        assert "2 texts wait already" in refused.json()["error"]
        assert refused.json()["error_type"] == "Overloaded"
        third = _ask(app, "d")
        engine.free.set()
        for answer in await asyncio.gather(first, second, third):
            assert answer.status == 200
        assert (await _ask(app, ["a"] * 5)).status == 200  # alone it may be larger

    _run(body, waiting=3)


def test_who_hangs_up_leaves_the_queue() -> None:
    async def body(app: Any, engine: WordEngine, service: EncoderService) -> None:
        first = await _busy(app, engine)
        gone = asyncio.Event()
        second = _ask(app, ["b", "boom"], hang_up=gone)
        third = _ask(app, "a a a")
        await _until(lambda: service._batcher.waiting == 3)
        gone.set()
        assert (await second).status == 0  # nothing was sent
        assert service._batcher.waiting == 1
        engine.free.set()
        assert [a.status for a in await asyncio.gather(first, third)] == [200, 200]
        assert engine.batches == [[1], [3]]

    _run(body)


def test_who_hangs_up_in_a_batch_disturbs_nobody() -> None:
    async def body(app: Any, engine: WordEngine, service: EncoderService) -> None:
        engine.free.clear()
        gone = asyncio.Event()
        first = _ask(app, "a", hang_up=gone)
        await _until(engine.began.is_set)
        gone.set()
        assert (await first).status == 0
        engine.free.set()
        assert (await _ask(app, "b")).status == 200

    _run(body)


def test_who_hangs_up_while_sending_is_forgotten() -> None:
    async def body(app: Any, engine: WordEngine, service: EncoderService) -> None:
        async def receive() -> Any:
            return {"type": "http.disconnect"}

        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": "/embed", "headers": []}
        await app(scope, receive, send)
        assert not sent
        assert not engine.batches

    _run(body)


def test_who_waits_too_long_is_told() -> None:
    async def body(app: Any, engine: WordEngine, service: EncoderService) -> None:
        first = await _busy(app, engine)
        second = _ask(app, "b")
        await asyncio.sleep(0.06)
        engine.free.set()
        answers = await asyncio.gather(first, second)
        assert [answer.status for answer in answers] == [200, 503]
        assert "no turn came within 0.05 s" in answers[1].json()["error"]
        assert answers[1].headers["retry-after"]

    _run(body, timeout_s=0.05)


def test_a_request_that_never_ends_is_refused() -> None:
    async def body(app: Any, engine: WordEngine, service: EncoderService) -> None:
        answered: list[Any] = []

        async def receive() -> Any:
            await asyncio.sleep(0.01)
            return {"type": "http.request", "body": b" ", "more_body": True}

        async def send(message: Any) -> None:
            answered.append(message)

        scope = {"type": "http", "method": "POST", "path": "/embed", "headers": []}
        await app(scope, receive, send)
        assert answered[0]["status"] == 408

    _run(body, timeout_s=0.05)


def test_one_bad_text_spoils_no_other_request() -> None:
    async def body(app: Any, engine: WordEngine, service: EncoderService) -> None:
        first = await _busy(app, engine)
        rest = [_ask(app, text) for text in ("b", "boom", "nan", "c")]
        await _until(lambda: service._batcher.waiting == 4)
        engine.free.set()
        answers = await asyncio.gather(first, *rest)
        assert [answer.status for answer in answers] == [200, 200, 500, 500, 200]

    _run(body)


def test_the_rest_of_a_request_that_failed_is_left_out() -> None:
    async def body(app: Any, engine: WordEngine, service: EncoderService) -> None:
        assert (await _ask(app, ["boom", "a " * 8, "bb " * 8, "ccc " * 8])).status == 500
        await _ask(app, "dddd")
        assert engine.batches == [[1], [8], [1]]  # the second was under way

    _run(body, batch_tokens=8)


def test_at_the_end_what_was_asked_is_answered_and_nothing_new_taken() -> None:
    async def body(app: Any, engine: WordEngine, service: EncoderService) -> None:
        first = await _busy(app, engine)
        second = _ask(app, "b")
        await _until(lambda: service._batcher.waiting == 1)
        service.draining = True
        refused = await _ask(app, "c")
        assert (refused.status, refused.headers["retry-after"]) == (503, "2")
        assert (await call(app, "/health")).status == 503
        assert (await call(app, "/metrics")).status == 200
        engine.free.set()
        assert [a.status for a in await asyncio.gather(first, second)] == [200, 200]

    _run(body)


def test_a_server_may_start_and_end_it() -> None:
    async def run() -> None:
        kinds = iter(("startup", "shutdown"))
        answered: list[Any] = []

        async def receive() -> Any:
            return {"type": f"lifespan.{next(kinds)}"}

        async def send(message: Any) -> None:
            answered.append(message["type"])

        await application(EncoderService(WordEngine()))({"type": "lifespan"}, receive, send)
        assert answered == ["lifespan.startup.complete", "lifespan.shutdown.complete"]

    asyncio.run(run())
