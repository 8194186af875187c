"""Bodies of requests on their way in, and the pictures and fields of `POST /v1/images/edits`.

An edit is multipart/form-data, as OpenAI's and other clients send it. One picture is a file `image`, several are files
`image[]`, numbered ones such as `image[0]`, or `images`. Or it is JSON, whose pictures are data URLs. Nothing is
fetched from elsewhere, and no file is kept: a large one of a form is in a temporary file until it is read."""

from __future__ import annotations

import asyncio
import base64
import json
import math
import re
import time
from asyncio import Lock, Semaphore
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from io import BytesIO
from typing import Any, NamedTuple, TypeVar
from weakref import WeakValueDictionary

from PIL import Image, _imaging

from lantern_hpu.core import SourcePicture
from lantern_hpu.errors import LanternError, needing
from lantern_hpu.results.sources import MOST_PIXELS
from lantern_hpu.serve.decoder import DecodeThread, not_taking
from lantern_hpu.serve.options import MAX_BODY
from lantern_hpu.serve.picture_process import picture_reader
from lantern_hpu.serve.protocol import (
    MOST_FIELDS,
    ApiError,
    EditsRequest,
    JSONEditsRequest,
    ParsedRequest,
    parsed,
    read_call,
    refuse,
    translated,
)

with needing("fastapi", "the server is built on it", "serve"):
    from fastapi import Request
    from starlette.datastructures import FormData, Headers, State, UploadFile
    from starlette.formparsers import MultiPartParser
    from starlette.types import Message, Receive

T = TypeVar("T")
FORM = "multipart/form-data"
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
    """What may be sent to a place that draws: of these media types, at most so many bytes, within so many seconds."""

    kinds: tuple[str, ...]
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
        self.allowed = AllowedBody((), MAX_BODY, BODY_SECONDS)

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


PICTURES = re.compile(r"(images?)(\[(\d{0,4})\])?")  # names of the fields of pictures
WITHOUT = ("mask", "markup")  # what OpenAI's models read besides
MOST_FILES = 16  # of a request, as OpenAI has it
MOST_FIELD = 1 << 16  # bytes of a field that is no file
HELD_PIXELS = 4 * MOST_PIXELS  # of pictures of requests under way, at 4 bytes each in Pillow
LARGE = 8_000_000  # pixels; smaller pictures do not wait for larger ones
SMALL_AT_ONCE = 2  # requests whose pictures are small are read
READERS, READERS_OF_CLIENT = 32, 8  # processes that read pictures, or wait for their turn to
FULL = "queue_full"
# Bytes that Pillow allocates at a time: from 32 MiB on the C library gives all back to the system that is freed
PICTURE_BLOCK = 1 << 26


class Uploads:
    """Bytes of forms and pixels of pictures of all requests under way.

    Attributes:
        arrived: bytes of each client's forms that are not read yet.
        pictures: those that are being read, and those of requests until these are answered.
    """

    def __init__(self, most: int) -> None:
        """`most` bytes of forms together; a client has at most half of them."""
        self.most, self.arrived = most, Counter[str]()
        self.pictures = WeakValueDictionary[tuple[str, int], Image.Image]()
        _imaging.set_block_size(PICTURE_BLOCK)
        self.small, self.large = Semaphore(SMALL_AT_ONCE), WeakValueDictionary[str, Lock]()
        self.readers, self.of_client = Semaphore(READERS), WeakValueDictionary[str, Semaphore]()

    @contextmanager
    def counting(self, body: Body, client: str) -> Iterator[None]:
        """Count what arrives of a body, until its form is read; an ApiError once it is too much, from the body."""
        counted = 0

        def count(size: int) -> None:
            nonlocal counted
            mine = self.arrived[client] + size > self.most // 2
            if mine or self.arrived.total() + size > self.most:
                body.count = lambda _: None  # the rest is forgotten,
                self.arrived[client] -= counted  # and what came as well
                counted = 0
                raise full(f"too many uploads{' of this client' * mine} in progress")
            self.arrived[client] += size
            counted += size

        body.count = count
        try:
            yield
        finally:
            self.arrived[client] -= counted
            self.arrived += Counter()  # without those that have nothing

    def allocate(self, sizes: Sequence[tuple[int, int]], client: str) -> list[Image.Image]:
        """Empty pictures of widths and heights; raises an ApiError where there are too many already."""
        pixels, held = sum(map(math.prod, sizes)), Counter[str]()
        for (owner, _), picture in list(self.pictures.items()):
            held[owner] += math.prod(picture.size)
        mine = held[client] + pixels > HELD_PIXELS // 2
        if mine or held.total() + pixels > HELD_PIXELS:
            raise full(f"too many pictures{' of this client' * mine} in memory")
        made = [Image.new("RGB", size, None) for size in sizes]
        self.pictures.update(((client, id(picture)), picture) for picture in made)
        return made

    def turn(self, pixels: int, client: str) -> Lock | Semaphore:
        """What holds a request back while others are read: of large pictures, those of the same client."""
        if pixels <= LARGE:
            return self.small
        return self.large.setdefault(client, Lock())


async def read_edit(request: Request, decoder: DecodeThread) -> ParsedRequest:
    """What is to be drawn; raises an ApiError for what cannot be, once the body is read."""
    uploads: Uploads = request.app.state.uploads
    client = request.client.host if request.client else ""
    with uploads.counting(request.state.body, client):
        asked, files = await read_fields(request)
        try:
            if len(files) > decoder.served.sources:
                allowed = f"1 to {decoder.served.sources}"
                raise refuse("image", f"{len(files)} pictures", allowed)
            reading = read_sources(files, uploads, client)
            sources = await before_stop(reading, request.app.state, client_leaves(request))
        finally:
            for file in files:
                await file.close()
    return read_call(asked, decoder.served, sources)


async def client_leaves(request: Request) -> None:
    """Ends when the client of a request whose body is whole goes away."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def media_type(headers: Headers) -> str:
    """What a body is said to be, without its parameters."""
    return headers.get("content-type", "").partition(";")[0].strip().lower()


async def read_fields(request: Request) -> tuple[EditsRequest, list[UploadFile]]:
    """Fields and pictures of a body, be it a form or JSON; the caller closes the files."""
    if media_type(request.headers) == FORM:
        form = await read_form(request)
        try:
            fields, files = form_parts(form)
            return parsed(EditsRequest, fields, strict=False), files
        except ApiError:
            await form.close()
            raise
    body = await request.body()
    return await asyncio.to_thread(json_parts, body)


def json_parts(body: bytes) -> tuple[EditsRequest, list[UploadFile]]:
    """Fields and pictures of a JSON body."""
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError) as error:
        what = f"the body is not valid JSON in UTF-8: {error}"
        raise ApiError(400, what, None, "invalid_json") from error
    asked = parsed(JSONEditsRequest, fields)
    files = [UploadFile(BytesIO(data_of(url))) for url in asked.pictures()]
    return asked.model_copy(update={"images": None, "image": None}), files


def data_of(url: str) -> bytes:
    """The bytes of a data URL (RFC 2397); raises an ApiError where it is no base64."""
    head, _, data = url.partition(",")
    try:
        if not head.endswith(";base64"):
            raise ValueError("it is not base64")
        return base64.b64decode(data, validate=True)
    except ValueError as error:
        what = f"a picture's data URL cannot be read: {error}; send data:image/png;base64,..."
        raise ApiError(400, what, "images", "invalid_value") from error


class FormParser(MultiPartParser):
    """Takes files whose name is in `filename*` alone, which RFC 7578 forbids and some clients send."""

    def on_headers_finished(self) -> None:
        part = self._current_part
        if part.content_disposition and b"filename=" not in part.content_disposition:
            plain = part.content_disposition.replace(b"filename*=", b"filename=")
            part.content_disposition = plain
        super().on_headers_finished()


async def read_form(request: Request) -> FormData:
    limits = {"max_files": MOST_FILES, "max_fields": MOST_FIELDS, "max_part_size": MOST_FIELD}
    # Starlette reads what is no UTF-8 as Latin-1 and does not say so; read as Latin-1 throughout, bytes stay known
    kind = {"content-type": request.headers["content-type"] + "; charset=latin-1"}
    try:
        return await FormParser(Headers(kind), request.stream(), **limits).parse()
    except (ApiError, OSError, MemoryError) as error:  # of the body, or of this machine
        if getattr(error, "code", None) == FULL:
            await read_rest(request)
        raise
    except Exception as error:  # a damaged form may raise anything
        await read_rest(request)
        why = getattr(error, "message", "it is cut off or damaged")
        raise ApiError(400, f"the form cannot be read: {why}", None, "invalid_form") from error


def full(why: str) -> ApiError:
    return ApiError(429, f"{why}; try again", None, FULL, {"Retry-After": "5"})


async def read_rest(request: Request) -> None:
    """Read what a client still sends, since it reads no answer before."""
    with suppress(Exception):
        while not request.state.body.whole:
            await request.receive()


def form_parts(form: FormData) -> tuple[dict[str, str], list[UploadFile]]:
    """Fields and pictures of a form; an empty field counts as not given."""
    fields, files = dict[str, str](), dict[str, list[tuple[int, UploadFile]]]()
    for raw_name, value in form.multi_items():
        name = in_utf8(raw_name, "the name of a field")
        # Browsers send a file without a name for an input that was left empty
        if value == "" or (not getattr(value, "size", 1) and not getattr(value, "filename", 1)):
            continue
        picture = PICTURES.fullmatch(name)
        if name in WITHOUT:
            raise ApiError(400, f"{name} is not supported; leave it out", name, "invalid_value")
        if name in fields:
            raise ApiError(400, f"{name[:60]} is given twice", name[:60], "invalid_value")
        if isinstance(value, UploadFile) and picture:
            kind = picture[1] + "[]" * (picture[2] is not None)
            files.setdefault(kind, []).append((int(picture[3] or 0), value))
        elif isinstance(value, UploadFile) or picture:
            what = f"{name[:60]} is text" if picture else f"{name[:60]} is a file"
            raise ApiError(400, f"{what}; image is the field of files", name[:60], "invalid_value")
        else:
            fields[name] = in_utf8(value, name)
    if len(files) != 1:
        what = (
            f"{' and '.join(files)} exclude each other"
            if files
            else "image is missing; send a file"
        )
        raise ApiError(400, what, "image", "invalid_value")
    numbered = next(iter(files.values()))
    return fields, [file for _, file in sorted(numbered, key=lambda pair: pair[0])]


def in_utf8(text: str, name: str) -> str:
    """What a form's bytes, which were read as Latin-1, are as UTF-8; raises an ApiError where they are none."""
    try:
        return text.encode("latin-1").decode()
    except UnicodeError as error:
        what = f"{name[:60]} is not valid UTF-8; send the form in UTF-8"
        raise ApiError(400, what, name[:60], "invalid_value") from error


async def read_sources(
    files: Sequence[UploadFile], uploads: Uploads, client: str
) -> tuple[SourcePicture, ...]:
    """Pictures in their order, from a process of their own."""
    raw = [(file.filename or "").encode("latin-1", "replace") for file in files]
    names = [name.decode(errors="replace")[:60] for name in raw]
    try:
        own = uploads.of_client.setdefault(client, Semaphore(READERS_OF_CLIENT))
        async with own, uploads.readers, picture_reader(names) as reader:
            async with uploads.small:
                sizes = await reader.sizes([file.file for file in files])
            pixels = sum(map(math.prod, sizes))
            if pixels > MOST_PIXELS:
                have = f"{len(sizes)} pictures of {pixels} pixels"
                raise refuse("image", have, f"{MOST_PIXELS} pixels together")
            async with uploads.turn(pixels, client):
                return await reader.fill(uploads.allocate(sizes, client))
    except LanternError as error:
        raise translated(error) from error
