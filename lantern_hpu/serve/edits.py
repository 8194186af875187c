"""Pictures and fields of `POST /v1/images/edits`: multipart/form-data, as OpenAI's and other clients send it.

One picture is a file `image`, several are files `image[]`, numbered ones such as `image[0]`, or `images`. Nothing is
fetched from elsewhere, and no file is kept: a large one is in a temporary file until it is read.
"""

from __future__ import annotations

import math
import re
from asyncio import Lock, Semaphore
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from weakref import WeakValueDictionary

from PIL import Image, _imaging

from lantern_hpu.core import SourcePicture
from lantern_hpu.errors import LanternError, needing
from lantern_hpu.results.sources import MOST_PIXELS
from lantern_hpu.serve import calls
from lantern_hpu.serve.bodies import Body, before_stop
from lantern_hpu.serve.calls import ParsedRequest
from lantern_hpu.serve.decoder import DecodeThread
from lantern_hpu.serve.picture_process import picture_reader
from lantern_hpu.serve.protocol import MOST_FIELDS, ApiError, EditsRequest, parsed, refuse

with needing("fastapi", "the server is built on it", "serve"):
    from fastapi import Request
    from starlette.datastructures import FormData, UploadFile

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
        form = await read_form(request)
        try:
            fields, files = form_parts(form)
            asked = parsed(EditsRequest, fields, strict=False)
            if len(files) > decoder.served.sources:
                allowed = f"1 to {decoder.served.sources}"
                raise refuse("image", f"{len(files)} pictures", allowed)
            reading = read_sources(files, uploads, client)
            sources = await before_stop(reading, request.app.state, client_leaves(request))
        finally:
            await form.close()
    return calls.read_call(asked, decoder.served, sources)


async def client_leaves(request: Request) -> None:
    """Ends when the client of a request whose body is whole goes away."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def read_form(request: Request) -> FormData:
    limits = {"max_files": MOST_FILES, "max_fields": MOST_FIELDS, "max_part_size": MOST_FIELD}
    # Starlette reads what is no UTF-8 as Latin-1 and does not say so; read as Latin-1 throughout, bytes stay known
    headers = [
        (name, value + b"; charset=latin-1" * (name == b"content-type"))
        for name, value in request.scope["headers"]
    ]
    try:
        return await Request({**request.scope, "headers": headers}, request.receive).form(**limits)
    except (ApiError, OSError, MemoryError) as error:  # of the body, or of this machine
        if getattr(error, "code", None) == FULL:
            await read_rest(request)
        raise
    except Exception as error:  # a damaged form may raise anything
        await read_rest(request)
        why = getattr(error, "detail", "it is cut off or damaged")
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
        raise calls.translated(error) from error
