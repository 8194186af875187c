"""A process that reads the pictures of one upload, with limits of time and memory, and that can be ended.

Both ends of its pipes are here. Lines are JSON: the server sends the sizes of the files, and the files; the process
answers with the pictures' widths and heights. Told to go on, it sends an empty object, the RGB bytes row by row and
the digest of each picture. In place of any line there may be an error, which is the last one.
"""

from __future__ import annotations

import asyncio
import json
import math
import mmap
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from importlib import import_module
from typing import Any, BinaryIO, NoReturn

from PIL import Image

from lantern_hpu.core import SourcePicture
from lantern_hpu.errors import OptionError
from lantern_hpu.results.sources import OpenPicture, open_picture, refused

CPU_SECONDS = 3  # of the processor, for all pictures of an upload; 0.3 are the start's
MEMORY = 250 * 10**6  # bytes, besides the pixels of the largest picture and the interpreter's own
PIXEL_BYTES = 4  # of a decoded picture
# What decoders take besides, in bytes a pixel: measured, of large pictures with and without losses
DECODERS = {"WebP": 16, "AVIF": 10}
AVIF_THREADS = 2
BLOCK = 1 << 18  # bytes that are sent at a time
START = "import json, sys; sys.path = json.loads(sys.argv[1]); from {} import main; main()"
TOO_MUCH = f"to decode it takes more than {MEMORY // 10**6} MB besides its pixels"
AGAIN = "a smaller one, or the same saved again as a plain PNG or JPEG"

# -------------------------------------------------------------------------------------- the server's end


class PictureReader:
    """The server's end: what the process says of pictures, in their order."""

    def __init__(self, process: Process, names: Sequence[str]) -> None:
        assert process.stdin is not None and process.stdout is not None
        self.process, self.names = process, names
        self.send, self.receive = process.stdin, process.stdout

    async def sizes(self, files: Sequence[BinaryIO]) -> list[tuple[int, int]]:
        """Widths and heights, as they will be shown; raises an OptionError for a picture that is not read."""
        with suppress(ConnectionError):  # it has ended, and says why
            lengths = [file.seek(0, 2) for file in files]
            self.send.write(json.dumps(lengths).encode() + b"\n")
            for file in files:
                file.seek(0)
                while block := file.read(BLOCK):
                    self.send.write(block)
                    await self.send.drain()
        return [(width, height) for width, height in await self.line()]

    async def fill(self, pictures: Sequence[Image.Image]) -> tuple[SourcePicture, ...]:
        """Decode into RGB pictures of the sizes; raises an OptionError for one that is damaged."""
        self.send.write(b"\n")
        return tuple([await self.source(picture) for picture in pictures])

    async def source(self, picture: Image.Image) -> SourcePicture:
        await self.line()
        width, height = picture.size
        rows = max(1, BLOCK // (3 * width))
        for top in range(0, height, rows):
            count = min(rows, height - top)
            try:
                data = await self.receive.readexactly(3 * width * count)
            except asyncio.IncompleteReadError:
                await self.ended()
            picture.paste(Image.frombytes("RGB", (width, count), data), (0, top))
        return SourcePicture(picture, await self.line())

    async def line(self) -> Any:
        line = await self.receive.readline()
        if not line.endswith(b"\n"):
            await self.ended()
        found = json.loads(line)
        if isinstance(found, dict) and found:
            raise refused(self.names[found["picture"]], found["why"], found["hint"])
        return found

    async def ended(self) -> NoReturn:
        """Raise for a process that has ended without a word; one that a signal ended was ended by a picture."""
        code = await self.process.wait()
        if code >= 0:
            raise RuntimeError(f"the process that reads pictures ended with code {code}")
        why = f"its decoder ended with code {code}"
        if code == -getattr(signal, "SIGXCPU", 0):
            why = f"it takes more than {CPU_SECONDS} s of a processor"
        raise refused(self.names[0] if len(self.names) == 1 else "one of them", why, AGAIN)


@asynccontextmanager
async def picture_reader(names: Sequence[str]) -> AsyncIterator[PictureReader]:
    """A process for the pictures of these names, which ends with the context, done or not."""
    start = ["-I", "-c", START.format(__name__), json.dumps(sys.path)]
    how: dict[str, Any] = {
        "stdin": PIPE,
        "stdout": PIPE,
        "start_new_session": True,
    }  # apart from Ctrl-C
    process = await asyncio.create_subprocess_exec(sys.executable, *start, **how)
    try:
        yield PictureReader(process, names)
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        assert process.stdout is not None
        while await process.stdout.read(
            BLOCK
        ):  # or its end is not seen behind pixels that nobody reads
            pass
        await process.wait()


# ------------------------------------------------------------------------------------- the process's end


def main() -> None:
    """Read pictures from standard input, and write what is asked for."""
    limit("RLIMIT_CPU", CPU_SECONDS)
    limit("RLIMIT_CORE", 0)
    with suppress(ImportError):  # a thread for each core takes address space of its own
        plugin: Any = import_module("PIL.AvifImagePlugin")
        plugin.DEFAULT_MAX_THREADS = AVIF_THREADS
    number, pictures = 0, list[OpenPicture]()
    try:
        lengths = json.loads(sys.stdin.buffer.readline())
        for length in lengths:
            number = len(pictures)
            pictures.append(open_picture(sys.stdin.buffer.read(length)))
            check_decoder(pictures[-1])
        write_line([picture.size for picture in pictures])
        sys.stdin.buffer.readline()
        limit_memory(max(math.prod(picture.size) for picture in pictures))
        while pictures:
            number = len(lengths) - len(pictures)
            write_picture(pictures.pop(0))
    except OptionError as error:
        write_line({"picture": number, "why": str(error.why), "hint": str(error.hint)})
    except MemoryError:
        write_line({"picture": number, "why": TOO_MUCH, "hint": AGAIN})


def check_decoder(picture: OpenPicture) -> None:
    """Refuse a picture whose decoder takes too much."""
    assert picture.parts is not None
    decoder = DECODERS.get(picture.parts.kind, 0) * math.prod(picture.size)
    if decoder + picture.parts.coefficients + len(picture.parts.data) > MEMORY:
        raise refused("", TOO_MUCH, AGAIN)


def limit_memory(pixels: int) -> None:
    """Hold the process to it, where the system tells what it has already."""
    with suppress(OSError), open("/proc/self/statm") as file:
        pages = int(file.read().split()[0])
        limit("RLIMIT_AS", pages * mmap.PAGESIZE + PIXEL_BYTES * pixels + MEMORY)


def limit(name: str, value: int) -> None:
    """Of the system, where it has such limits."""
    with suppress(ImportError, OSError, ValueError):
        import resource

        most = resource.getrlimit(getattr(resource, name))[1]
        resource.setrlimit(getattr(resource, name), (value, most))


def write_picture(picture: OpenPicture) -> None:
    """Once it is decoded, as what fails then is told in place of its pixels."""
    for top, strip in picture.strips():
        if not top:
            write_line({})
        sys.stdout.buffer.write(strip.tobytes())
    write_line(picture.digest)


def write_line(found: Any) -> None:
    sys.stdout.buffer.write(json.dumps(found).encode() + b"\n")
    sys.stdout.buffer.flush()
