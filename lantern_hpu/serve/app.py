"""The HTTP side: endpoints, answers, streams. It waits for the decode thread and never works in its stead."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from lantern_hpu import __version__
from lantern_hpu.errors import needing
from lantern_hpu.results.images import encode
from lantern_hpu.serve.calls import ApiError, Call, read_call
from lantern_hpu.serve.decoder import Decoder, Done, Job, Partial
from lantern_hpu.serve.options import MAX_BODY, ServeOptions

with needing("fastapi", "the server is made with it", "serve"):
    from fastapi import FastAPI, Request
    from fastapi.exceptions import HTTPException
    from fastapi.responses import FileResponse, JSONResponse, Response, StreamingResponse

HERE = Path(__file__).parent
STALE = 120.0  # seconds without a heartbeat after which the loop is taken for dead
log = logging.getLogger("lantern_hpu.serve")


def make_app(options: ServeOptions, opened: Callable[[], Decoder]) -> FastAPI:
    """The application; its decoder is opened when it starts and stopped when it ends."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.state.decoder = await asyncio.to_thread(opened)
        app.state.decoder.start()
        yield
        await asyncio.to_thread(app.state.decoder.stop)

    app = FastAPI(title="lantern_hpu", version=__version__, lifespan=lifespan, openapi_url=None)
    Routes(app, options)
    return app


def picture(image: Any) -> str:
    return base64.b64encode(encode(image)).decode()


def final(done: Done) -> str:
    """With the metadata that draw it again."""
    return base64.b64encode(done.drawn.png()).decode()


def rounded(**seconds: float) -> dict[str, float]:
    return {name: round(value, 4) for name, value in seconds.items()}


class Waiting:
    """The images of one call, on their way."""

    def __init__(self, decoder: Decoder, call: Call, timeout: float) -> None:
        """
        Raises:
            ApiError: there is no room.
        """
        loop = asyncio.get_running_loop()
        self.decoder, self.call = decoder, call
        self.events: asyncio.Queue[tuple[int, Partial | Done | ApiError]] = asyncio.Queue()

        def teller(index: int) -> Callable[[Partial | Done | ApiError], None]:
            def tell(event: Partial | Done | ApiError) -> None:
                with suppress(RuntimeError):  # the loop is closed, so nobody listens
                    loop.call_soon_threadsafe(self.events.put_nowait, (index, event))

            return tell

        deadline = time.monotonic() + timeout
        self.jobs = [
            Job(request, call.served.method, deadline, call.shows, teller(index))
            for index, request in enumerate(call.requests)
        ]
        decoder.submit(self.jobs)

    def cancel(self) -> None:
        self.decoder.cancel(self.jobs)

    async def all_done(self) -> list[Done]:
        """
        Raises:
            ApiError: of the first that failed; the others are given up.
        """
        done: dict[int, Done] = {}
        while len(done) < len(self.jobs):
            index, event = await self.events.get()
            if isinstance(event, ApiError):
                raise event
            if isinstance(event, Done):
                done[index] = event
        return [done[index] for index in range(len(self.jobs))]


class Answer:
    """What is said of finished images."""

    def __init__(self, decoder: Decoder, call: Call) -> None:
        height, width = decoder.menu.size
        self.call, self.decoder, self.created = call, decoder, int(time.time())
        self.shared = {
            "created": self.created,
            "model": decoder.menu.model,
            "size": f"{width}x{height}",
            "quality": "auto",
            "background": "opaque",
            "output_format": "png",
        }

    def settings(self) -> dict[str, Any]:
        """Echoed, so that an image can be asked for again."""
        request, served = self.call.requests[0], self.call.served
        sampling = request.sampling
        return {
            "seed": request.seed,
            "method": served.method,
            "tree": served.tree.name,
            "relaxation": request.relaxation.as_json(),
            "cfg_scale": sampling.cfg_scale,
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
        }

    def metrics(self, done: Done) -> dict[str, Any]:
        record = done.drawn.record
        seconds = rounded(
            queue_s=done.queue, prefill_s=done.prefill, steps_s=done.decode, decode_s=done.pixels
        )
        return {
            **seconds,
            "steps": record.steps,
            "tokens_per_step": record.tokens_per_step,
            "accepted_by_depth": record.accepted_by_depth,
            "relaxed_accepts": record.relaxed_accepts,
        }

    def usage(self, images: int) -> dict[str, Any]:
        config = self.decoder.pipeline.model.target.config
        read, drawn = config.prefix * images, config.tokens * images
        details = {"text_tokens": read, "image_tokens": 0}
        return {
            "input_tokens": read,
            "input_tokens_details": details,
            "output_tokens": drawn,
            "total_tokens": read + drawn,
        }

    async def whole(self, found: list[Done]) -> dict[str, Any]:
        coded = [await asyncio.to_thread(final, done) for done in found]
        data = [
            {
                "b64_json": b64,
                "url": None,
                "revised_prompt": None,
                "seed": done.drawn.record.seed,
                "metrics": self.metrics(done),
            }
            for b64, done in zip(coded, found, strict=True)
        ]
        return {**self.shared, "data": data, "usage": self.usage(len(found)), **self.settings()}

    async def partial(self, shown: Partial, index: int) -> dict[str, Any]:
        gained = (shown.tokens - 1) / max(shown.steps, 1)
        return {
            **self.shared,
            "type": "image_generation.partial_image",
            "created_at": self.created,
            "b64_json": await asyncio.to_thread(picture, shown.image),
            "partial_image_index": index,
            "rows": shown.rows,
            "metrics": {"steps": shown.steps, "tokens_per_step": round(gained, 4)},
        }

    async def completed(self, done: Done) -> dict[str, Any]:
        return {
            **self.shared,
            "type": "image_generation.completed",
            "created_at": self.created,
            "b64_json": await asyncio.to_thread(final, done),
            "usage": self.usage(1),
            "metrics": self.metrics(done),
            **self.settings(),
        }


class Routes:
    """The endpoints of an application."""

    def __init__(self, app: FastAPI, options: ServeOptions) -> None:
        self.app, self.options = app, options
        app.add_exception_handler(ApiError, self.refused)
        app.add_exception_handler(HTTPException, self.unknown)
        app.add_exception_handler(404, self.unknown)
        app.add_exception_handler(405, self.unknown)
        get: dict[str, Callable[..., Any]] = {
            "/livez": self.livez,
            "/readyz": self.readyz,
            "/health": self.readyz,
            "/version": self.version,
            "/metrics": self.metrics,
            "/v1/models": self.models,
            "/": self.page,
            "/page.js": self.script,
        }
        for path, handler in get.items():
            app.add_api_route(path, handler, methods=["GET"], response_model=None)
        images = "/v1/images/generations"
        app.add_api_route(images, self.images, methods=["POST"], response_model=None)

    @property
    def decoder(self) -> Decoder:
        found: Decoder = self.app.state.decoder
        return found

    # -- answers that are no pictures

    async def refused(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return JSONResponse(error.body(), error.status, headers=error.headers)

    async def unknown(self, request: Request, error: Exception) -> Response:
        status = getattr(error, "status_code", 404)
        what = f"{request.method} {request.url.path[:100]} is not served here"
        return JSONResponse(ApiError(status, what).body(), status)

    def check_key(self, request: Request) -> None:
        """Raise an ApiError unless the caller has the key, where there is one."""
        given = request.headers.get("authorization", "").removeprefix("Bearer ").encode()
        wanted = self.options.api_key
        if wanted and not secrets.compare_digest(given, wanted.encode()):
            headers = {"WWW-Authenticate": "Bearer"}
            raise ApiError(401, "wrong or missing API key", None, "invalid_api_key", headers)

    # -- how it is

    async def livez(self) -> Response:
        """Whether the decode loop turns."""
        decoder, silent = self.decoder, time.monotonic() - self.decoder.beat
        dead = decoder.failure is not None or (decoder.ready and silent > STALE)
        told = {"status": "dead" if dead else "alive", "heartbeat_s": round(silent, 3)}
        return JSONResponse(told, 503 if dead else 200)

    async def readyz(self) -> Response:
        """Whether images are taken: engines captured and checked, and no stop under way."""
        decoder = self.decoder
        ready = decoder.ready and not decoder.draining
        status = "ready" if ready else "draining" if decoder.draining else "warming up"
        return JSONResponse({"status": status}, 200 if ready else 503)

    async def version(self) -> dict[str, str]:
        return {"version": __version__}

    async def metrics(self) -> Response:
        kind = "text/plain; version=0.0.4; charset=utf-8"
        return Response(self.decoder.metrics.text(), media_type=kind)

    async def models(self, request: Request) -> dict[str, Any]:
        self.check_key(request)
        menu, created = self.decoder.menu, 0
        methods = {
            name: {"tree": served.tree.name, "relaxation": served.relaxation.as_json()}
            for name, served in menu.methods.items()
        }
        height, width = menu.size
        about = {"methods": methods, "size": f"{width}x{height}", "rows": menu.rows}
        entry = {"id": menu.model, "object": "model", "created": created, "owned_by": "lantern_hpu"}
        return {"object": "list", "data": [{**entry, **about}]}

    async def page(self) -> Response:
        return FileResponse(HERE / "page.html", headers={"Cache-Control": "no-cache"})

    async def script(self) -> Response:
        return FileResponse(HERE / "page.js", media_type="text/javascript")

    # -- pictures

    async def images(self, request: Request) -> Response:
        """`POST /v1/images/generations`."""
        record = Record(request)
        try:
            self.check_key(request)
            call = read_call(await read_body(request), self.decoder.menu)
            record.of(call)
            waiting = Waiting(self.decoder, call, self.options.timeout)
            answer = Answer(self.decoder, call)
            if call.stream:
                kind = "text/event-stream"
                headers = {"X-Request-Id": record.id, "Cache-Control": "no-store"}
                events = self.stream(waiting, answer, record)
                return StreamingResponse(events, media_type=kind, headers=headers)
            found = await self.unless_gone(request, waiting)
            if found is None:
                record.say(499)
                return Response(status_code=499)
            told = await answer.whole(found)
            record.say(200, found)
            return JSONResponse(told, headers={"X-Request-Id": record.id})
        except ApiError as error:
            self.count_failure(error.status)
            record.say(error.status, why=error.message)
            error.headers["X-Request-Id"] = record.id
            raise

    def count_failure(self, status: int) -> None:
        metrics = self.decoder.metrics
        metrics.failed.labels(metrics.model, str(status)).inc()

    async def unless_gone(self, request: Request, waiting: Waiting) -> list[Done] | None:
        """The images; None if the client went away first, in which case nobody draws them any more."""
        done = asyncio.ensure_future(waiting.all_done())
        gone = asyncio.ensure_future(disconnected(request))
        try:
            await asyncio.wait([done, gone], return_when=asyncio.FIRST_COMPLETED)
            return await done if done.done() else None
        finally:
            gone.cancel()
            done.cancel()
            waiting.cancel()

    async def stream(self, waiting: Waiting, answer: Answer, record: Record) -> AsyncIterator[str]:
        """Server-sent events; where the client goes away, the generator is closed and the image given up."""
        status, index = 499, 0
        try:
            while True:
                _, event = await waiting.events.get()
                if isinstance(event, Partial):
                    yield sent(await answer.partial(event, index))
                    index += 1
                elif isinstance(event, Done):
                    yield sent(await answer.completed(event))
                    status = 200
                    record.say(200, [event])
                    return
                else:
                    status = event.status
                    self.count_failure(status)
                    yield sent({"type": "error", **event.body()})
                    record.say(status, why=event.message)
                    return
        finally:
            waiting.cancel()
            if status == 499:
                record.say(499)


def sent(event: dict[str, Any]) -> str:
    return f"event: {event['type']}\ndata: {json.dumps(event)}\n\n"


async def read_body(request: Request) -> bytes:
    """
    Raises:
        ApiError: it is larger than any request has to be.
    """
    parts, size = [], 0
    async for part in request.stream():
        parts.append(part)
        size += len(part)
        if size > MAX_BODY:
            raise ApiError(413, f"the body is larger than {MAX_BODY} bytes", None, "too_large")
    return b"".join(parts)


async def disconnected(request: Request) -> None:
    """Returns when the client is gone; the body must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


class Record:
    """One line of the log for one request."""

    def __init__(self, request: Request) -> None:
        self.began = time.monotonic()
        self.id = request.headers.get("x-request-id", "")[:64] or f"img-{secrets.token_hex(8)}"
        self.about: dict[str, Any] = {}

    def of(self, call: Call) -> None:
        request = call.requests[0]
        self.about = {
            "method": call.served.method,
            "n": len(call.requests),
            "seed": request.seed,
            "stream": call.stream,
            "prompt_chars": len(request.prompt),
        }

    def say(self, status: int, found: list[Done] = [], why: str = "") -> None:  # noqa: B006
        line = {"event": "request", "id": self.id, "status": status, **self.about}
        line["seconds"] = round(time.monotonic() - self.began, 4)
        if found:
            line["queue_s"] = round(max(done.queue for done in found), 4)
            steps = [done.drawn.record.steps for done in found]
            line["steps"] = steps if len(steps) > 1 else steps[0]
        if why:
            line["error"] = why[:200]
        log.info(json.dumps(line, ensure_ascii=False))
