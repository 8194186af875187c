"""Pictures and fields of `POST /v1/images/edits`: multipart/form-data, as OpenAI's and other clients send it.

One picture is a file `image`, several are files `image[]`. Nothing is fetched from elsewhere, and no file is kept: a
large one is in a temporary file until it is read.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from lantern_hpu.core import SourcePicture
from lantern_hpu.errors import LanternError, needing
from lantern_hpu.results.sources import MOST_PIXELS, read_picture
from lantern_hpu.serve import calls
from lantern_hpu.serve.calls import ParsedRequest
from lantern_hpu.serve.decoder import DecodeThread
from lantern_hpu.serve.protocol import MOST_FIELDS, ApiError, EditsRequest, parsed, refuse

with needing("fastapi", "the server is built on it", "serve"):
    from fastapi import Request
    from starlette.datastructures import FormData, UploadFile

PICTURES = ("image", "image[]")
WITHOUT = ("mask", "markup")  # what OpenAI's models read besides
MOST_FILES = 16  # of a request, as OpenAI has it
MOST_FIELD = 1 << 16  # bytes of a field that is no file
HELD_PIXELS = 4 * MOST_PIXELS  # of pictures of requests under way, at 4 bytes each in Pillow


async def read_edit(request: Request, decoder: DecodeThread) -> ParsedRequest:
    """What is to be drawn; raises an ApiError for what cannot be, once the body is read."""
    state = request.app.state
    most = decoder.options.upload_mib << 20
    size = min(int(request.headers.get("content-length", most)), most)
    if state.uploads + size > decoder.options.slots * most:
        await read_rest(request)
        raise full("too many uploads in progress")
    state.uploads += size
    try:
        form = await read_form(request)
        try:
            fields, files = form_parts(form)
            asked = parsed(EditsRequest, fields, strict=False)
            if len(files) > decoder.served.sources:
                allowed = f"1 to {decoder.served.sources}"
                raise refuse("image", f"{len(files)} pictures", allowed)
            async with state.reading:  # one request at a time: pictures are large
                sources = await read_sources(files, decoder)
        finally:
            await form.close()
    finally:
        state.uploads -= size
    return calls.read_call(asked, decoder.served, sources)


async def read_form(request: Request) -> FormData:
    limits = {"max_files": MOST_FILES, "max_fields": MOST_FIELDS, "max_part_size": MOST_FIELD}
    try:
        return await request.form(**limits)
    except (ApiError, OSError, MemoryError):  # of the body, or of this machine
        raise
    except Exception as error:  # a damaged form may raise anything
        await read_rest(request)
        why = getattr(error, "detail", "it is cut off or damaged")
        raise ApiError(400, f"the form cannot be read: {why}", None, "invalid_form") from error


def full(why: str) -> ApiError:
    return ApiError(429, f"{why}; try again", None, "queue_full", {"Retry-After": "5"})


async def read_rest(request: Request) -> None:
    """Read what a client still sends, since it reads no answer before."""
    with suppress(Exception):
        async for _ in request.stream():
            pass


def form_parts(form: FormData) -> tuple[dict[str, str], list[UploadFile]]:
    """Fields and pictures of a form; an empty field counts as not given."""
    fields, files = dict[str, str](), dict[str, list[UploadFile]]()
    for name, value in form.multi_items():
        if value == "":
            continue
        if name in WITHOUT:
            raise ApiError(400, f"{name} is not supported; leave it out", name, "invalid_value")
        if name in fields:
            raise ApiError(400, f"{name[:60]} is given twice", name[:60], "invalid_value")
        if isinstance(value, UploadFile) and name in PICTURES:
            files.setdefault(name, []).append(value)
        elif isinstance(value, UploadFile) or name in PICTURES:
            what = f"{name[:60]} is text" if name in PICTURES else f"{name[:60]} is a file"
            raise ApiError(400, f"{what}; image is the field of files", name[:60], "invalid_value")
        else:
            fields[name] = value
    if len(files) != 1:
        what = "image and image[] exclude each other" if files else "image is missing; send a file"
        raise ApiError(400, what, "image", "invalid_value")
    return fields, [file for several in files.values() for file in several]


async def read_sources(
    files: Sequence[UploadFile], decoder: DecodeThread
) -> tuple[SourcePicture, ...]:
    """Pictures in their order; those of all requests under way are of a bounded size together."""
    sources, held = list[SourcePicture](), held_pixels(decoder)
    for file in files:
        data, name = await file.read(), (file.filename or "")[:60]
        try:
            source = await asyncio.to_thread(read_picture, data, name)
        except LanternError as error:
            raise calls.translated(error) from error
        sources.append(source)
        size = pixels(sources)
        if size > MOST_PIXELS:
            raise refuse("image", f"{len(files)} pictures", f"{MOST_PIXELS} pixels together")
        if held + size > HELD_PIXELS:
            raise full("too many pictures in memory")
    return tuple(sources)


def pixels(sources: Sequence[SourcePicture]) -> int:
    return sum(math.prod(source.size) for source in sources)


def held_pixels(decoder: DecodeThread) -> int:
    """Of the pictures that images under way are drawn from; those of one request share them."""
    with decoder.queue.changed:
        requests = [job.request for job in decoder.queue.open_jobs]
    shared: dict[int, Any] = {id(one): one for request in requests for one in request.sources}
    return pixels(list(shared.values()))
