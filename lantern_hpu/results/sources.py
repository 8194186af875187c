"""Pictures that a request is drawn from, read from files and bytes of any origin.

A decoder spends time and memory on every segment, chunk and text of a file, and stumbles over those that are damaged.
So it is given pixels, palette and colours alone. Formats: JPEG, ITU-T T.81 annex B; PNG, W3C PNG third edition, 5;
WebP, RFC 9649, 2; EXIF, CIPA DC-008, 4.6.2.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import struct
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageCms, UnidentifiedImageError, features

from lantern_hpu.core import MOST_ASPECT, SourcePicture
from lantern_hpu.errors import Arg, LanternError, OptionError, words
from lantern_hpu.files import check_regular
from lantern_hpu.methods.request import check_count

READ = ("PNG", "JPEG", "WebP", *(["AVIF"] if features.check("avif") else []))
MOST_PIXELS = 64_000_000  # of a source, known from its header before it is decoded
TOO_LARGE = "it has too many pixels", f"at most {MOST_PIXELS // 10**6} million"
LEAST_SIDE = 16  # in pixels
WHITE = (255, 255, 255, 255)
STRIP = 1 << 18  # pixels that are converted at a time
PNG_DEPTH = 24  # where a PNG says how many bits a number has
# Turns of EXIF: of Pillow's, and whether rows of the result are rows of the picture, counted from the far end
Method = Image.Transpose
TURNS: dict[int, tuple[Method | None, bool, bool]] = {
    1: (None, True, False),
    2: (Method.FLIP_LEFT_RIGHT, True, False),
    3: (Method.ROTATE_180, True, True),
    4: (Method.FLIP_TOP_BOTTOM, True, True),
    5: (Method.TRANSPOSE, False, False),
    6: (Method.ROTATE_270, False, False),
    7: (Method.TRANSVERSE, False, True),
    8: (Method.ROTATE_90, False, True),
}
# Modes whose colours a profile of this space may describe
PROFILED = {
    "RGB": {"RGB", "RGBA", "P", "PA", "L", "LA", "1"},
    "GRAY": {"L", "LA", "1", "I;16", "I;16L", "I;16B"},
    "CMYK": {"CMYK"},
}
# Modes of numbers whose range is not known: 0 to 1, to 255 or to 65535
UNRANGED = ("I", "F")

# Files: of which kind they are, and the parts of them that a decoder needs
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
# In entropy-coded data FF is followed by 00 or D0 to D7
MARKER = re.compile(rb"\xff[\x01-\xcf\xd8-\xfe]")
# Of a JPEG: frames, tables and scans; and what says how its numbers are colours
JPEG_PARTS = {*range(0xC0, 0xD0), 0xDA, 0xDB, 0xDC, 0xDD}
JPEG_COLOURS = {0xE0: b"JFIF\0", 0xE2: b"ICC_PROFILE\0", 0xEE: b"Adobe"}
FRAMES = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}
PROGRESSIVE = (0xC2, 0xC6, 0xCA, 0xCE)
PNG_PARTS = (b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND")


def read_picture(given: Any, name: str = "") -> SourcePicture:
    """A source from a picture of PIL, a path, or the bytes of a file: the first frame of a PNG, JPEG, WebP or AVIF.

    It is turned as its EXIF says, converted to sRGB where it has a colour profile, laid on white where it is
    transparent, and RGB from then on.

    Args:
        name: what errors call it; its path, if it has one.

    Raises:
        OptionError: it is no such picture, cut off, of too many pixels, too small, or too long for its height.
    """
    picture = open_picture(given, name)
    result = Image.new("RGB", picture.size, None)
    for top, strip in picture.strips():
        result.paste(strip, (0, top))
    return SourcePicture(result, picture.digest)


def open_picture(given: Any, name: str = "") -> OpenPicture:
    """A picture whose size is known and fits; it is not decoded yet.

    Raises:
        OptionError: as from `read_picture`, as far as it is known before.
    """
    if isinstance(given, Image.Image):
        return OpenPicture(given, name, partial(given_orientation, given))
    if isinstance(given, str | os.PathLike):
        name = name or str(given)
        given = bytes_of(Path(given), name)
    if not isinstance(given, bytes):
        why = f"it is of type {type(given).__name__}"
        raise refused(name, why, "a picture of PIL, or the path of a file")
    try:
        parts = open_parts(given)
    except PictureError as error:
        raise refused(name, str(error), "the same, saved again as a plain PNG or JPEG") from error
    formats = " or ".join([", ".join(READ[:-1]), READ[-1]])
    if parts.kind not in READ:
        why = f"it is {parts.kind}, not" if parts.kind else "it is not"
        raise refused(name, f"{why} {formats}", "save it as PNG")
    try:
        image = Image.open(io.BytesIO(parts.data), formats=[parts.kind.upper()])
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise refused(name, *TOO_LARGE) from error
    except MemoryError:
        raise
    except Exception as error:  # a damaged header may raise anything
        raise damaged(name, error) from error
    if parts.profile is not None:
        image.info["icc_profile"] = parts.profile
    if parts.kind == "PNG" and "transparency" in image.info:
        image.info["transparency"] = as_stored(image, parts.data[PNG_DEPTH])
    exif = parts.exif or image.info.get("exif", b"").removeprefix(b"Exif\0\0")
    return OpenPicture(image, name, partial(orientation_of, exif), parts)


def as_stored(image: Image.Image, depth: int) -> Any:
    """The transparent colour of a PNG in 8 bits, to which Pillow brings numbers of other depths, but not this one."""
    clear = image.info["transparency"]
    if image.mode == "RGB" and depth == 16:
        return tuple(value >> 8 for value in clear)
    if image.mode == "L" and depth < 8:
        return clear * (255 // (2**depth - 1))
    return clear


def given_orientation(image: Image.Image) -> int:
    """Of a picture of PIL, which may have been set by a program."""
    value = image.getexif().get(0x0112, 1)
    return value if value in TURNS else 1


def bytes_of(path: Path, name: str) -> bytes:
    try:
        check_regular(path)
        return path.read_bytes()
    except LanternError as error:
        raise refused(name, str(error.why)) from error
    except (OSError, ValueError) as error:  # a name may hold a zero
        raise refused(name, getattr(error, "strerror", None) or str(error)) from error


@dataclass
class OpenPicture:
    """A picture that may be decoded.

    Attributes:
        orientation: finds how it is turned, 1 to 8.
        parts: of its file, if it has one.
        digest: sha256 of its size and pixels, once all strips are made.
    """

    image: Image.Image
    name: str
    orientation: Callable[[], int]
    parts: PictureFile | None = None
    digest: str = ""

    def __post_init__(self) -> None:
        check_size(self.image, self.name)
        if self.image.mode in UNRANGED:
            why = f"its numbers are of mode {self.image.mode}, whose range is not known"
            hint = "whole numbers of 0 to 255: Image.fromarray(array.astype(numpy.uint8))"
            raise refused(self.name, why, hint)
        try:
            self.turn = TURNS[self.orientation()]
        except Exception:  # of a damaged EXIF, whose picture is whole
            self.turn = TURNS[1]

    @property
    def size(self) -> tuple[int, int]:
        """Width and height as it is shown."""
        width, height = self.image.size
        return (width, height) if self.turn[1] else (height, width)

    def strips(self) -> Iterator[tuple[int, Image.Image]]:
        """Its rows as it is shown, RGB, some at a time, each with the number of the first: no second copy is needed.

        Raises:
            OptionError: it is damaged or cut off.
        """
        width, height = self.size
        digest = hashlib.sha256(f"{width}x{height}:".encode())
        rows = max(1, STRIP // width)
        try:
            self.image.load()
            to_rgb = RGBConversion(self.image)
            for top in range(0, height, rows):
                strip = to_rgb(self.upright(top, min(top + rows, height)))
                digest.update(strip.tobytes())
                yield top, strip
        except (MemoryError, GeneratorExit):
            raise
        except Exception as error:  # decoders raise anything for a damaged file
            raise damaged(self.name, error) from error
        self.digest = digest.hexdigest()

    def upright(self, top: int, bottom: int) -> Image.Image:
        """Rows of the picture as it is shown."""
        method, by_rows, from_end = self.turn
        width, height = self.image.size
        if from_end:
            end = height if by_rows else width
            top, bottom = end - bottom, end - top
        box = (0, top, width, bottom) if by_rows else (top, 0, bottom, height)
        strip = self.image.crop(box)
        return strip if method is None else strip.transpose(method)


class RGBConversion:
    """Makes any strip of a picture RGB: in sRGB, on white."""

    def __init__(self, image: Image.Image) -> None:
        self.transparent = image.has_transparency_data
        self.mode = "RGBA" if self.transparent else "RGB"  # that `transform` takes
        self.transform: Any = None  # from the colours of a profile
        if profile := image.info.get("icc_profile"):
            self.mode, self.transform = colour_transform(profile, image.mode, self.mode)

    def __call__(self, strip: Image.Image) -> Image.Image:
        if strip.mode.startswith("I;16"):
            strip = eight_bits(strip)
        elif self.transparent and self.mode == "L":  # of a profile of greys
            strip = on_white(strip.convert("RGBA"))
        strip = strip.convert(self.mode)
        if self.transform is not None:
            strip = ImageCms.applyTransform(strip, self.transform) or strip
        return on_white(strip) if strip.mode == "RGBA" else strip.convert("RGB")


def on_white(strip: Image.Image) -> Image.Image:
    if strip.getchannel("A").getextrema()[0] == 255:
        return strip.convert("RGB")
    white = Image.new("RGBA", strip.size, WHITE)
    return Image.alpha_composite(white, strip).convert("RGB")


def eight_bits(strip: Image.Image) -> Image.Image:
    """16 bits of grey as 8; a value that is declared transparent is white."""
    values = np.asarray(strip)  # [h, w] uint16
    grey = (values >> 8).astype(np.uint8)
    grey[values == strip.info.get("transparency", -1)] = 255
    return Image.fromarray(grey)


def colour_transform(profile: bytes, mode: str, usual: str) -> tuple[str, Any]:
    """From the colours of an ICC profile to sRGB, behind the mode that it takes.

    Where colours stay it is None, behind the `usual` mode, RGB or RGBA: the profile is damaged, of other colours than
    the picture's mode, or sRGB itself.
    """
    try:
        source = ImageCms.ImageCmsProfile(io.BytesIO(profile))
        space = source.profile.xcolor_space.strip()
        if mode not in PROFILED.get(space, ()):
            return usual, None
        taken = {"RGB": usual, "GRAY": "L", "CMYK": "CMYK"}[space]
        goal = usual if space == "RGB" else "RGB"
        transform = ImageCms.buildTransform(source, ImageCms.createProfile("sRGB"), taken, goal)
    except (ImageCms.PyCMSError, OSError):
        return usual, None
    if space == "RGB":
        colours = 31 * np.indices((9, 9, 9)).reshape(3, 729).T  # [729, 3], each 0 to 248
        probe = Image.fromarray(colours[None].astype(np.uint8)).convert(usual)
        shown = np.asarray(ImageCms.applyTransform(probe, transform)).astype(int)
        if np.abs(shown - np.asarray(probe)).max() <= 1:
            return usual, None
    return taken, transform


def check_size(image: Image.Image, name: str) -> None:
    """Raise an OptionError for a size that no source may have; a header knows it."""
    short, long = sorted(image.size)
    size = f"it is {image.width} x {image.height}"
    if short * long > MOST_PIXELS:
        raise refused(name, *TOO_LARGE)
    if short < LEAST_SIDE:
        raise refused(name, size, f"sides of {LEAST_SIDE} pixels or more")
    if long > MOST_ASPECT * short:
        raise refused(name, size, f"a side of at most {MOST_ASPECT} times the other")


def damaged(name: str, error: Exception) -> OptionError:
    what = "its header" if isinstance(error, UnidentifiedImageError) else str(error)
    why = f"it is damaged or cut off: {what or type(error).__name__}"
    return refused(name, why, "another copy of it")


def refused(name: str, why: str, hint: str = "") -> OptionError:
    return OptionError(words(Arg("image"), f"{name} cannot be read".lstrip()), why, hint)


def sources_of(image: Any, prompts: int) -> list[tuple[SourcePicture, ...]]:
    """Sources of each prompt: of one picture, of a list that all prompts share, or of a list of lists, one a prompt.

    Raises:
        OptionError: as from `read_picture`, or a list of lists has not one for each prompt, or lists of unequal length.
    """
    if image is None:
        return [()] * prompts
    given = list(image) if isinstance(image, list | tuple) else [image]
    nested = [one for one in given if isinstance(one, list | tuple)]
    if not nested:
        return [tuple(map(read_picture, given))] * prompts
    check_count("image", given, prompts)
    if len(nested) < len(given) or len({len(one) for one in nested}) > 1:
        what = words(Arg("image"), "has lists of unequal length")
        raise OptionError(what, "all pictures of a call have as many sources", "a call for each")
    return [tuple(map(read_picture, one)) for one in nested]


# ----------------------------------------------------------------------------------- parts of files


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
