"""Bodies of requests on their way in: their size, the time they may take, and what ends the wait for them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple, TypeVar

from lantern_hpu.errors import needing
from lantern_hpu.serve.decoder import not_taking
from lantern_hpu.serve.options import MAX_BODY
from lantern_hpu.serve.protocol import ApiError

with needing("fastapi", "the server is built on it", "serve"):
    from starlette.datastructures import State
    from starlette.types import Message, Receive

T = TypeVar("T")
DISCARDED = 64 * 2**20  # bytes of a body that is too large, read and forgotten
BODY_SECONDS = 10.0  # in which a body has to arrive
GZIP = b"\x1f\x8b"  # how such a body begins
CLOSED = 499  # status in log and metrics where the client left, as nginx has it
LISTEN = 0.5  # seconds after which what waits looks whether the server is about to stop


async def before_stop(
    work: Coroutine[Any, Any, T], state: State, gone: Coroutine[Any, Any, Any] | None = None
) -> T:
    """What is awaited, or an ApiError where nothing would come of it: the server is about to stop, or the client left.

    Args:
        state: of the application. gone: ends when the client leaves.
    """
    task = asyncio.ensure_future(work)
    left = asyncio.ensure_future(gone) if gone else task
    try:
        while not task.done():
            await asyncio.wait({task, left}, timeout=LISTEN, return_when=asyncio.FIRST_COMPLETED)
            if left.done() and not task.done():
                raise ApiError(CLOSED, "the client left")
            if state.decoder.draining and not task.done():
                raise not_taking(state.decoder)
        return task.result()
    finally:
        task.cancel()
        left.cancel()
        del task, left  # or an error of them would keep this frame, and the frame the error


class AllowedBody(NamedTuple):
    """What may be sent to a place that draws: a type, of at most so many bytes, within so many seconds."""

    kind: str
    size: int
    seconds: float


class Body:
    """The body of a request on its way in, of at most so many bytes within so many seconds.

    Attributes:
        count: called with the size of each part that arrives; may refuse it.
    """

    def __init__(self, receive: Receive, state: State) -> None:
        self.inner, self.state = receive, state
        self.size, self.whole, self.cut = 0, False, False
        self.count: Callable[[int], None] = lambda size: None
        self.until = 0.0  # counted from when it is asked for
        self.allowed = AllowedBody("", MAX_BODY, BODY_SECONDS)

    async def receive(self) -> Message:
        if self.whole:
            return await self.inner()
        message = await self.part()
        # What a client still sends when the connection is closed takes the answer from it
        most = self.allowed.size
        while most < self.size <= most + DISCARDED and not self.whole:
            await self.part()
        if self.size > most:
            what = f"the body is larger than {most} bytes"
            raise ApiError(413, what, None, "too_large", {"Connection": "close"})
        return message

    async def part(self) -> Message:
        self.until = self.until or time.monotonic() + self.allowed.seconds
        try:
            arriving = asyncio.wait_for(self.inner(), self.until - time.monotonic())
            message = await before_stop(arriving, self.state)
        except asyncio.TimeoutError as error:
            what = f"the body did not arrive within {self.allowed.seconds:g} s"
            closing = {"Connection": "close"}
            raise ApiError(408, what, None, "request_timeout", closing) from error
        self.cut = message["type"] == "http.disconnect"
        self.whole = self.cut or not message.get("more_body", False)
        content = message.get("body", b"")
        if not self.size and content.startswith(GZIP):
            what = "the body is gzip; send it as it is"
            raise ApiError(415, what, None, "unsupported_media_type")
        self.size += len(content)
        if self.size <= self.allowed.size:
            self.count(len(content))
        return message
