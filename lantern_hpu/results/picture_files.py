"""Files of pictures: of which kind they are, and the parts of them that a decoder needs.

A decoder spends time and memory on every segment, chunk and text of a file, and stumbles over those that are damaged.
So it is given pixels, palette and colours alone. Formats: JPEG, ITU-T T.81 annex B; PNG, W3C PNG third edition, 5;
WebP, RFC 9649, 2; EXIF, CIPA DC-008, 4.6.2.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

MOST_PARTS = 100_000  # segments or chunks of a file: to walk over them takes 0.1 s
MOST_SCANS = 100  # of a JPEG, each of which passes over all pixels; programs write up to 20
MOST_PROFILE = 1 << 22  # bytes of an ICC profile that a PNG holds compressed
# How files begin, by what they are; HEIC and AVIF name their kinds in a first box
KINDS = {
    "PNG": rb"\x89PNG\r\n\x1a\n",
    "JPEG": rb"\xff\xd8\xff",
    "WebP": rb"RIFF....WEBP",
    "AVIF": rb"....ftyp.{0,60}avi[fs]",
    "HEIC": rb"....ftyp.{0,60}(he[iv][cmsx]|mif1|msf1)",
    "TIFF": rb"II[*+]\0|MM\0[*+]",
    "GIF": rb"GIF8[79]a",
    "BMP": rb"BM.{12}[\x0c-\x7c]\0\0\0",
    "JPEG XL": rb"\xff\x0a|\0\0\0\x0cJXL ",
    "SVG": rb"\s*(<\?xml[^>]*>\s*)?<svg",
    "PDF": rb"%PDF",
}
EXIF = b"Exif\0\0"  # in front of what is a TIFF file from there on
MARKER = re.compile(
    rb"\xff[\x01-\xcf\xd8-\xfe]"
)  # in entropy-coded data FF is followed by 00 or D0 to D7
# Of a JPEG: frames, tables and scans; and what says how its numbers are colours
JPEG_PARTS = {*range(0xC0, 0xD0), 0xDA, 0xDB, 0xDC, 0xDD}
JPEG_COLOURS = {0xE0: b"JFIF\0", 0xE2: b"ICC_PROFILE\0", 0xEE: b"Adobe"}
FRAMES = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}
PROGRESSIVE = (0xC2, 0xC6, 0xCA, 0xCE)
PNG_PARTS = (b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND")


class PictureError(ValueError):
    """A file is no picture that is read; its text says why."""


@dataclass
class PictureFile:
    """A file as it is decoded.

    Attributes:
        data: what a decoder needs of it.
        exif: as a TIFF file; empty where there is none.
        profile: the ICC profile; None where there is none, or the decoder finds it.
        coefficients: bytes that a JPEG's decoder keeps until the last scan.
    """

    kind: str
    data: bytes
    exif: bytes = b""
    profile: bytes | None = None
    coefficients: int = 0


def file_kind(data: bytes) -> str:
    """What a file is by its first bytes; empty where that is unknown."""
    start = data[:512]
    return next((kind for kind, form in KINDS.items() if re.match(form, start, re.DOTALL)), "")


def open_parts(data: bytes) -> PictureFile:
    """A file without what its pixels do not need.

    Raises:
        PictureError: it has too many parts.
    """
    kind = file_kind(data)
    walk = {"JPEG": jpeg_file, "PNG": png_file, "WebP": webp_file}.get(kind)
    return walk(data) if walk else PictureFile(kind, data)


def jpeg_file(data: bytes) -> PictureFile:
    result, view, scans = PictureFile("JPEG", b""), memoryview(data), 0
    kept, frame = [view[:2]], b""
    end = 2  # of the last segment; what follows a scan's is its pixels
    for code, start, body in jpeg_segments(data):
        if scans:
            kept.append(view[end : start - 2])
        end = start + len(body)
        scans += code == 0xDA
        if scans > MOST_SCANS:
            raise PictureError(f"it has more than {MOST_SCANS} scans")
        if code == 0xE1 and body[2:].startswith(EXIF) and not result.exif:
            result.exif = body[2 + len(EXIF) :]
        if code in JPEG_PARTS or body[2:].startswith(JPEG_COLOURS.get(code, b"\0no such")):
            kept.append(view[start - 2 : end])
        if code in FRAMES:
            frame = body
        several = code == 0xDA and body[2:3] < frame[7:8]  # scans, one for some of the components
        if several or code in PROGRESSIVE:
            result.coefficients = coefficient_bytes(frame)
        if code == 0xD9:
            kept.append(view[start - 2 : start])
            break
    else:
        kept.append(view[end:] if scans else view[:0])  # cut off, as the decoder will find
    result.data = b"".join(kept)
    return result


def jpeg_segments(data: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Markers, each with where its body begins, and the body with its length in front."""
    at = 2
    for _ in range(MOST_PARTS):
        found = MARKER.search(data, at)
        if found is None:
            return
        code, at = data[found.end() - 1], found.end()
        size = int.from_bytes(data[at : at + 2], "big") if code not in (0x01, 0xD8, 0xD9) else 0
        yield code, found.end(), data[at : at + size]
        at += size
    raise PictureError(f"it has more than {MOST_PARTS} segments")


def coefficient_bytes(frame: bytes) -> int:
    """Of all samples of a frame header: 16 bits each."""
    height, width, count = struct.unpack_from(">HHB", frame.ljust(8, b"\0"), 3)
    factors = [divmod(pair, 16) for pair in frame[9 : 8 + 3 * count : 3]]
    most = max((across * down for across, down in factors), default=1) or 1
    return 2 * width * height * sum(across * down for across, down in factors) // most


def png_file(data: bytes) -> PictureFile:
    result, view, at = PictureFile("PNG", b""), memoryview(data), 8
    kept = [view[:8]]
    for _ in range(MOST_PARTS):
        size, kind = int.from_bytes(data[at : at + 4], "big"), data[at + 4 : at + 8]
        end = at + size + 12
        if kind in PNG_PARTS:
            kept.append(view[at:end])
        elif kind == b"eXIf":
            result.exif = data[at + 8 : end - 4].removeprefix(EXIF)
        elif kind == b"iCCP" and result.profile is None:
            result.profile = inflated(data[at + 8 : end - 4].partition(b"\0")[2][1:])
        at = end
        if kind == b"IEND" or at >= len(data):
            result.data = b"".join(kept)
            return result
    raise PictureError(f"it has more than {MOST_PARTS} chunks")


def inflated(data: bytes) -> bytes:
    """A compressed profile; empty where it is damaged or too large to be one."""
    stream = zlib.decompressobj()
    with suppress(zlib.error):
        found = stream.decompress(data, MOST_PROFILE)
        return found if stream.eof else b""
    return b""


def webp_file(data: bytes) -> PictureFile:
    result, at = PictureFile("WebP", data), 12
    end = min(len(data), 8 + int.from_bytes(data[4:8], "little"))
    for _ in range(MOST_PARTS):
        size, kind = int.from_bytes(data[at + 4 : at + 8], "little"), data[at : at + 4]
        if kind == b"EXIF":
            result.exif = data[at + 8 : at + 8 + size].removeprefix(EXIF)
        at += 8 + size + size % 2
        if at >= end:
            return result
    raise PictureError(f"it has more than {MOST_PARTS} chunks")


def orientation_of(tiff: bytes) -> int:
    """How a picture is turned, 1 to 8, by the first directory of its EXIF; 1 where that says nothing that is valid.

    Nothing else is read: entries may lead to the same bytes any number of times.
    """
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(tiff[:4])
    if order is None:
        return 1
    with suppress(struct.error):
        (start,) = struct.unpack_from(order + "I", tiff, 4)
        (count,) = struct.unpack_from(order + "H", tiff, start)
        for at in range(start + 2, start + 2 + 12 * count, 12):
            tag, kind = struct.unpack_from(order + "HH", tiff, at)
            if tag == 0x0112:
                (value,) = struct.unpack_from(order + ("I" if kind == 4 else "H"), tiff, at + 8)
                return value if 1 <= value <= 8 else 1
    return 1
