"""The images of a request on their way, and what answers say of them; the log's line of a request."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import math
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from lantern_hpu.core import REPORTED
from lantern_hpu.errors import needing
from lantern_hpu.methods.setting import METHODS
from lantern_hpu.results.images import encode
from lantern_hpu.serve import protocol
from lantern_hpu.serve.bodies import CLOSED
from lantern_hpu.serve.calls import ParsedRequest
from lantern_hpu.serve.decoder import DecodeThread
from lantern_hpu.serve.protocol import ApiError
from lantern_hpu.serve.queue import Done, Event, Job, Partial

with needing("fastapi", "the server is built on it", "serve"):
    from fastapi import Request, Response
    from starlette.datastructures import Headers

SILENT = 15.0  # seconds after which an answer that waits says so
KEPT_FILES, KEPT_SECONDS = 64, 3600.0  # pictures that answers have addresses of: the last ones
# Fields whose values messages may quote: words, and names of files
UNLOGGED = ("prompt", "negative_prompt", "image", "image[]")
log = logging.getLogger("lantern_hpu.serve")


class Record:
    """The line of the log for one request."""

    def __init__(self, headers: Headers) -> None:
        self.began = time.monotonic()
        self.id = headers.get("x-request-id", "")[:64] or f"img-{secrets.token_hex(8)}"
        self.status, self.about = 500, dict[str, Any]()

    def asked(self, call: ParsedRequest) -> None:
        request = call.requests[0]
        self.about["method"] = call.served.setting.method
        self.about["n"] = len(call.requests)
        self.about["seed"] = request.seed
        self.about["stream"] = call.stream
        self.about["prompt_chars"] = len(request.prompt)

    def answered(self, images: Sequence[Done]) -> None:
        self.status = 200
        steps = [done.drawn.record.steps for done in images]
        self.about["queue_s"] = round(max(done.queue for done in images), 4)
        self.about["steps"] = steps if len(steps) > 1 else steps[0]

    def failed(self, error: ApiError) -> None:
        hidden = error.param in UNLOGGED
        what = f"{error.param}: {error.code}" if hidden else error.message[:200]
        self.status, self.about["error"] = error.status_code, what

    def write(self) -> None:
        line = {"event": "request", "id": self.id, "status": self.status, **self.about}
        log.info(json.dumps(line | {"seconds": round(time.monotonic() - self.began, 4)}))


class ImageRequestHandler:
    """The images of a request on their way, and what its answer says of them."""

    def __init__(self, request: Request, decoder: DecodeThread, call: ParsedRequest) -> None:
        """Queues the images."""
        self.request, self.decoder, self.call = request, decoder, call
        self.record: Record = request.state.record
        loop, events = asyncio.get_running_loop(), asyncio.Queue[tuple[int, Event]]()

        def send(
            index: int, event: Event
        ) -> None:  # without `self`, whose pictures a cycle would keep
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(events.put_nowait, (index, event))

        self.events = events

        height, width = call.size
        self.payload: dict[str, Any] = {
            "created": int(time.time()),
            "output_format": call.output[0],
            "model": decoder.served.name,
            "size": f"{width}x{height}",
        }
        deadline = time.monotonic() + request.app.state.options.timeout
        method, shows = call.served.setting.method, call.shows
        self.jobs = [
            Job(one, method, deadline, shows, partial(send, index), (need.grid, need.prefix))
            for index, (one, need) in enumerate(zip(call.requests, call.needs, strict=True))
        ]
        decoder.submit(self.jobs)

    async def answer(self) -> protocol.ImagesResponse | Response:
        images = await self.images()
        if images is None:
            return Response(status_code=CLOSED)
        data = [await self.image_data(one) for one in images]
        return protocol.ImagesResponse(data=data, **self.payload, **self.used())

    async def images(self) -> list[Done] | None:
        """All images; None where the client goes away first, and they are given up."""
        done = asyncio.ensure_future(self.all_done())
        gone = asyncio.ensure_future(self.disconnected())
        try:
            await asyncio.wait([done, gone], return_when=asyncio.FIRST_COMPLETED)
            if not done.done():
                self.record.status = CLOSED
                return None
            images = await done
        finally:
            gone.cancel()
            done.cancel()
            self.decoder.cancel(self.jobs)
        self.record.answered(images)
        return images

    async def all_done(self) -> list[Done]:
        done: dict[int, Done] = {}
        while len(done) < len(self.jobs):
            index, event = await self.events.get()
            if isinstance(event, ApiError):
                raise event
            if isinstance(event, Done):
                done[index] = event
        return [done[index] for index in sorted(done)]

    async def disconnected(self) -> None:  # the body has been read
        while (await self.request.receive())["type"] != "http.disconnect":
            pass

    async def image_data(self, done: Done) -> protocol.ImageData:
        picture = await asyncio.to_thread(picture_file, done, *self.call.output)
        whole, kept = "b64_json" in self.call.kinds, "url" in self.call.kinds
        return protocol.ImageData(
            b64_json=base64.b64encode(picture).decode() if whole else None,
            url=keep_file(self.request, picture, self.call.output[0]) if kept else None,
            seed=done.drawn.record.seed,
            metrics=self.metrics(done),
        )

    async def stream(self) -> AsyncIterator[str]:
        """Server-sent events; where the client goes away, the generator is closed and the image given up."""
        self.record.status = CLOSED
        partials = 0
        try:
            while True:
                try:
                    _, event = await asyncio.wait_for(self.events.get(), SILENT)
                except asyncio.TimeoutError:
                    yield ": waiting\n\n"
                    continue
                if isinstance(event, ApiError):
                    error = {"type": "error", **event.body()}
                    yield f"event: error\ndata: {json.dumps(error)}\n\n"
                    self.record.failed(event)
                    return
                shown = await self.shown(event, partials)
                yield f"event: {shown.type}\ndata: {shown.model_dump_json()}\n\n"
                partials += 1
                if isinstance(event, Done):
                    self.record.answered([event])
                    return
        finally:
            self.decoder.cancel(self.jobs)

    async def shown(
        self, event: Partial | Done, index: int
    ) -> protocol.PartialImage | protocol.CompletedImage:
        """An event of a stream; `index` counts them."""
        picture = await asyncio.to_thread(picture_file, event, *self.call.output)
        common = self.payload | {"created_at": self.payload["created"]}
        common["b64_json"] = base64.b64encode(picture).decode()
        kind = "image_edit" if self.call.requests[0].sources else "image_generation"
        common["type"] = f"{kind}.{'completed' if isinstance(event, Done) else 'partial_image'}"
        if isinstance(event, Done):
            metrics = self.metrics(event)
            return protocol.CompletedImage(**common, **self.used(), metrics=metrics)
        rate = round((event.tokens - 1) / max(event.steps, 1), 4)
        common["metrics"] = protocol.PartialMetrics(steps=event.steps, tokens_per_step=rate)
        return protocol.PartialImage(**common, partial_image_index=index, rows=event.rows)

    def used(self) -> dict[str, Any]:
        """Of `protocol.Settings`, and the tokens. The log counts warnings, as they quote the prompt."""
        pipeline, setting = self.decoder.pipeline, self.call.served.setting
        requests = self.call.requests
        first, count = requests[0], len(requests)
        warnings = [*(note for _, note in pipeline.notes(requests)), *self.call.warnings]
        if warnings:
            self.record.about["warnings"] = len(warnings)
        config = self.call.needs[0].sizes(pipeline.model.target.config)
        read, drawn = config.prefix * count, config.tokens * count
        reader = pipeline.model.condition.reader
        grids = [reader.grid(source) for source in first.sources] if reader else []
        seen = count * sum(map(math.prod, grids))
        parts = protocol.InputTokensDetails(text_tokens=read - seen, image_tokens=seen)
        counts = {"input_tokens": read, "output_tokens": drawn, "total_tokens": read + drawn}
        usage = protocol.Usage(**counts, input_tokens_details=parts)
        return {
            "seed": first.seed,
            "method": setting.method,
            "tree": setting.tree.name,
            "relaxation": first.relaxation.as_json(),
            "warnings": warnings,
            "usage": usage,
            **vars(first.sampling),
        }

    def metrics(self, done: Done) -> protocol.ImageMetrics:
        record = done.drawn.record
        drafts = METHODS[self.call.served.setting.method].drafts
        fields = protocol.ImageMetrics.model_fields
        speculation = protocol.SpeculativeDecoding.of(record.steps, record.accepted_by_depth)
        return protocol.ImageMetrics(
            queue_s=round(done.queue, 4),
            text_s=round(done.text, 4),
            prefill_s=round(done.prefill, 4),
            steps_s=round(done.decode, 4),
            decode_s=round(done.pixels, 4),
            **{name: getattr(record, name) for name in REPORTED if name in fields},
            speculative_decoding=speculation if drafts else None,
        )


def picture_file(shown: Partial | Done, kind: str, quality: int) -> bytes:
    """A finished PNG has the metadata to draw it again."""
    if isinstance(shown, Done) and kind == "png":
        return shown.drawn.png()
    image = shown.drawn.image if isinstance(shown, Done) else shown.image
    assert image is not None
    return encode(image, kind, quality=quality)


def keep_file(request: Request, data: bytes, kind: str) -> str | None:
    """-> the address at which the server has a picture for a while; None where several share a port"""
    files, name = request.app.state.files, f"{secrets.token_urlsafe(16)}.{kind}"
    if files is None:
        return None
    files[name] = time.monotonic(), data
    while len(files) > KEPT_FILES:
        files.pop(next(iter(files)))
    return str(request.url_for("image_file", name=name))


def kept_file(request: Request, name: str) -> bytes:
    """A picture that an answer had the address of; raises an ApiError where it is not there, or not any more."""
    found = (request.app.state.files or {}).get(name)
    if found is None or time.monotonic() - found[0] > KEPT_SECONDS:
        raise ApiError(404, "no such picture, or not any more", None, "not_found")
    data: bytes = found[1]
    return data
