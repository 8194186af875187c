"""Around the endpoints: which requests reach them, how long a body may take, and the log."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import logging
import secrets
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

from lantern_hpu.errors import needing
from lantern_hpu.serve.calls import Call
from lantern_hpu.serve.decoder import Done
from lantern_hpu.serve.options import MAX_BODY
from lantern_hpu.serve.protocol import ApiError

with needing("fastapi", "the server is built on it", "serve"):
    from fastapi.responses import JSONResponse
    from starlette.datastructures import Headers, MutableHeaders
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

IMAGES = "/v1/images/generations"
DISCARDED = 64 * 2**20  # bytes of a body that is too large, read and forgotten
BODY_SECONDS = 10.0  # in which a body has to arrive
CLOSED = 499  # status in log and metrics where the client left, as nginx has it
log = logging.getLogger("lantern_hpu.serve")


class Record:
    """The line of the log for one request."""

    def __init__(self, headers: Headers) -> None:
        self.began = time.monotonic()
        self.id = headers.get("x-request-id", "")[:64] or f"img-{secrets.token_hex(8)}"
        self.status, self.about = 500, dict[str, Any]()

    def asked(self, call: Call) -> None:
        request = call.requests[0]
        self.about |= {
            "method": call.served.setting.method,
            "n": len(call.requests),
            "seed": request.seed,
            "stream": call.stream,
            "prompt_chars": len(request.prompt),
        }

    def answered(self, images: Sequence[Done]) -> None:
        self.status = 200
        steps = [done.drawn.record.steps for done in images]
        self.about["queue_s"] = round(max(done.queue for done in images), 4)
        self.about["steps"] = steps if len(steps) > 1 else steps[0]

    def failed(self, error: ApiError) -> None:
        self.status, self.about["error"] = error.status_code, error.message[:200]

    def write(self) -> None:
        line = {"event": "request", "id": self.id, "status": self.status, **self.about}
        log.info(json.dumps(line | {"seconds": round(time.monotonic() - self.began, 4)}))


class Guard:
    """ASGI middleware. Endpoints find the request's `Record` as `request.state.record`."""

    def __init__(
        self, app: ASGIApp, hosts: Collection[str], count_failure: Callable[[int], None]
    ) -> None:
        """
        Args:
            hosts: names that the Host header may have beside `localhost` and addresses; `*` is any.
            count_failure: called with the status of each image request that failed.
        """
        self.app, self.hosts, self.count_failure = app, hosts, count_failure

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        record = scope.setdefault("state", {})["record"] = Record(headers)
        body = Body(receive)

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["X-Request-Id"] = record.id
                if record.status != CLOSED:
                    record.status = message["status"]
            await send(message)

        try:
            self.check(scope, headers)
            await self.app(scope, body.receive, answer)
        except ApiError as error:
            record.failed(error)
            response = JSONResponse(error.body(), error.status_code, headers=error.headers)
            await response(scope, receive, answer)
        finally:
            if body.cut:
                record.status = CLOSED
            if scope["path"] == IMAGES and scope["method"] == "POST":
                if record.status not in (200, CLOSED):
                    self.count_failure(record.status)
                record.write()

    def check(self, scope: Scope, headers: Headers) -> None:
        """Raise an ApiError where a web page of somebody else may have sent the request through a browser.

        A name that is not ours may have been pointed here (DNS rebinding), and what is not JSON a browser sends to any
        host without asking it first.
        """
        host = headers.get("host", "")
        if not known_host(host, self.hosts):
            what = f"this server does not answer to the host {host[:100]!r}"
            raise ApiError(403, f"{what}; allow it with --allow-host", None, "unknown_host")
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if scope["method"] == "POST" and kind != "application/json":
            what = f"Content-Type is {kind[:60]!r}; send application/json"
            raise ApiError(415, what, None, "unsupported_media_type")


def known_host(header: str, hosts: Collection[str]) -> bool:
    """Whether a Host header is an address, `localhost` or one of the names; its port is not looked at."""
    name = header.rpartition(":")[0] if header.rpartition(":")[2].isdigit() else header
    name = name.strip("[]").lower()
    if "*" in hosts or name in ("localhost", *hosts):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


class Body:
    """The body of a request on its way in, of at most `MAX_BODY` bytes within `BODY_SECONDS`."""

    def __init__(self, receive: Receive) -> None:
        self.inner, self.size, self.whole, self.cut = receive, 0, False, False
        self.until = 0.0  # counted from when it is asked for

    async def receive(self) -> Message:
        """
        Raises:
            ApiError: the body is too large or too slow.
        """
        if self.whole:
            return await self.inner()
        message = await self.part()
        while MAX_BODY < self.size <= DISCARDED and not self.whole:
            await (
                self.part()
            )  # what a client still sends when the connection is closed takes the answer from it
        if self.size > MAX_BODY:
            what = f"the body is larger than {MAX_BODY} bytes"
            raise ApiError(413, what, None, "too_large", {"Connection": "close"})
        return message

    async def part(self) -> Message:
        """What comes next of the body."""
        self.until = self.until or time.monotonic() + BODY_SECONDS
        try:
            message = await asyncio.wait_for(self.inner(), self.until - time.monotonic())
        except asyncio.TimeoutError as error:
            what = f"the body did not arrive within {BODY_SECONDS:g} s"
            closing = {"Connection": "close"}
            raise ApiError(408, what, None, "request_timeout", closing) from error
        self.cut = message["type"] == "http.disconnect"
        self.whole = self.cut or not message.get("more_body", False)
        self.size += len(message.get("body", b""))
        return message
