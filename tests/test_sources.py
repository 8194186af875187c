"""Pictures that a request is drawn from: what is read, and what is refused before any weight is."""

from __future__ import annotations

import hashlib
import io
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageCms, ImageOps, PngImagePlugin, features

from lantern_hpu import LanternPipeline, Request
from lantern_hpu.core import SourcePicture
from lantern_hpu.errors import OptionError
from lantern_hpu.models.text.frames import reads_pictures
from lantern_hpu.results import sources
from lantern_hpu.results.sources import (
    MOST_PARTS,
    MOST_SCANS,
    read_picture,
    sources_of,
)


def picture(height: int = 32, width: int = 48, mode: str = "RGB") -> Image.Image:
    bands = len(Image.new(mode, (1, 1)).getbands())
    noise = np.random.default_rng(height * width).integers(0, 255, (height, width, bands))
    return Image.fromarray(noise.astype(np.uint8).squeeze(), mode)


def painted(height: int, width: int, seed: int = 0) -> SourcePicture:
    """Patches of a few colours, so that codes differ within a picture."""
    rng = np.random.default_rng([seed, height, width])
    small = rng.integers(0, 255, (max(height // 12, 1), max(width // 12, 1), 3), dtype=np.uint8)
    nearest = Image.Resampling.NEAREST
    return read_picture(Image.fromarray(small).resize((width, height), nearest))


def encoded(image: Image.Image, kind: str, **how: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **how)
    return buffer.getvalue()


def chunk(kind: bytes, data: bytes, crc: int | None = None) -> bytes:
    """Of a PNG; with a wrong checksum, if one is given."""
    crc = zlib.crc32(kind + data) if crc is None else crc
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", crc)


def png(
    width: int, height: int, rows: bytes, *extra: bytes, depth: int = 8, colours: int = 2
) -> bytes:
    """A PNG of these raw rows; `extra` chunks stand before its pixels."""
    size = struct.pack(">IIBBBBB", width, height, depth, colours, 0, 0, 0)
    data = chunk(b"IDAT", zlib.compress(rows))
    start = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", size)
    return start + b"".join(extra) + data + chunk(b"IEND", b"")


def header(width: int, height: int) -> bytes:
    """A PNG that says of itself that it is of this size, and holds next to nothing."""
    return png(width, height, b"\0")


def test_a_digest_is_of_size_and_pixels(tmp_path: Path) -> None:
    one = picture()
    sources = [read_picture(one), read_picture(encoded(one, "PNG"))]
    file = tmp_path / "one.webp"
    one.save(file, lossless=True)
    sources += [read_picture(file), read_picture(str(file))]
    want = hashlib.sha256(b"48x32:" + one.tobytes()).hexdigest()
    assert [source.digest for source in sources] == [want] * 4
    assert sources[0] == sources[3] and sources[0].size == (32, 48)
    turned = Image.frombytes("RGB", (32, 48), one.tobytes())  # the same bytes in another shape
    assert read_picture(turned).digest != want


def tagged(*entries: tuple[int, int, int, bytes]) -> bytes:
    """An EXIF whose first directory has these tags, kinds, counts and values of four bytes."""
    rows = b"".join(struct.pack("<HHI", *tag) + value for *tag, value in entries)
    return b"II*\0\x08\0\0\0" + struct.pack("<H", len(entries)) + rows + bytes(4)


def with_exif(kind: str, tiff: bytes) -> bytes:
    how = {} if kind == "JPEG" else {"lossless": True}
    return encoded(picture(), kind, exif=b"Exif\0\0" + tiff, **how)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
@pytest.mark.parametrize("turn", range(1, 9))
def test_turns_are_those_of_pillow(kind: str, turn: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In strips of any height; of a file and of a picture of PIL."""
    monkeypatch.setattr(sources, "STRIP", 7 * 48)
    data = with_exif(kind, tagged((0x0112, 3, 1, struct.pack("<HH", turn, 0))))
    with Image.open(io.BytesIO(data)) as image:
        want = ImageOps.exif_transpose(image)
        assert read_picture(data).picture.tobytes() == want.tobytes()
        assert read_picture(image) == read_picture(data)


ODD_EXIFS = {
    "no TIFF": b"nonsense",
    "a directory past its end": b"II*\0\xff\xff\xff\x7f",
    "more entries than bytes": b"MM\0*\0\0\0\x08\xff\xff",
    "a turn that is none": tagged((0x0112, 3, 1, b"\x09\0\0\0")),
    "a width below 0": tagged((256, 9, 1, struct.pack("<i", -5)), (0x0112, 3, 1, b"\1\0\0\0")),
    "a height of fractions": tagged((257, 12, 1, struct.pack("<I", 8))),
}


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
@pytest.mark.parametrize("odd", ODD_EXIFS)
def test_an_odd_exif_is_no_reason_to_refuse(odd: str, kind: str) -> None:
    assert read_picture(with_exif(kind, ODD_EXIFS[odd])).size == (32, 48)


def test_what_is_transparent_is_white() -> None:
    for mode in ("RGBA", "LA"):
        image = picture(mode=mode)
        image.putalpha(0)
        source = read_picture(encoded(image, "PNG"))
        assert source.picture.getextrema() == ((255, 255),) * 3
    image = Image.new("P", (20, 20), 1)
    image.putpalette([0, 0, 0, 9, 8, 7])
    assert read_picture(image).picture.getpixel((3, 3)) == (9, 8, 7)
    clear = encoded(image, "PNG", transparency=1)
    assert read_picture(clear).picture.getpixel((3, 3)) == (255, 255, 255)


def test_sixteen_bits_of_grey_keep_their_brightness() -> None:
    grey = Image.fromarray(np.full((20, 20), 0x80FF, np.uint16))
    assert read_picture(encoded(grey, "PNG")).picture.getpixel((1, 1)) == (128, 128, 128)


WIDE = struct.pack(">HHH", 65535, 1, 300)
CLEAR: dict[str, tuple[int, int, bytes, bytes]] = {
    "16 bits of grey": (16, 0, struct.pack(">H", 300), struct.pack(">H", 300)),
    "4 bits of grey": (4, 0, b"\x55", struct.pack(">H", 5)),
    "2 bits of grey": (2, 0, b"\x55", struct.pack(">H", 1)),
    "8 bits of grey": (8, 0, b"\x07", struct.pack(">H", 7)),
    "16 bits of colour": (16, 2, WIDE, WIDE),
    "8 bits of colour": (8, 2, b"\x01\x02\x03", struct.pack(">HHH", 1, 2, 3)),
}


@pytest.mark.parametrize("kind", CLEAR)
def test_a_colour_that_is_declared_transparent_is_white(kind: str) -> None:
    depth, colours, value, clear = CLEAR[kind]
    rows = (b"\0" + value * (20 * min(depth, 8) // 8)) * 20
    plain = png(20, 20, rows, depth=depth, colours=colours)
    assert read_picture(plain).picture.getpixel((3, 3)) != (255, 255, 255)
    declared = png(20, 20, rows, chunk(b"tRNS", clear), depth=depth, colours=colours)
    assert read_picture(declared).picture.getpixel((3, 3)) == (255, 255, 255)


@pytest.mark.parametrize(("mode", "kind"), [("I", np.int32), ("F", np.float32)])
def test_numbers_of_no_known_range_are_refused_by_their_mode(mode: str, kind: Any) -> None:
    image = Image.fromarray(np.full((20, 20), 1, kind))
    assert image.mode == mode
    with pytest.raises(OptionError, match=f"mode {mode}, whose range is not known"):
        read_picture(image)


# Primaries of Display P3 for D50, as profiles have them
P3 = ((0.51512, 0.2412, -0.00105), (0.29198, 0.69225, 0.04189), (0.1571, 0.06657, 0.78407))


def profile(space: bytes = b"RGB ", gamma: float = 2.2) -> bytes:
    """An ICC profile of Display P3's primaries, or of greys, and one gamma: ICC.1:2001-04."""

    def fixed(*values: float) -> bytes:
        return b"".join(struct.pack(">i", round(value * 65536)) for value in values)

    curve = b"curv\0\0\0\0" + struct.pack(">IH", 1, int(gamma * 256)) + b"\0\0"
    words = b"desc\0\0\0\0" + struct.pack(">I", 2) + b"x\0" + bytes(78)
    tags = [(b"desc", words + bytes(-len(words) % 4)), (b"cprt", b"text\0\0\0\0none\0\0\0\0")]
    tags.append((b"wtpt", b"XYZ \0\0\0\0" + fixed(0.9642, 1, 0.8249)))
    if space == b"RGB ":
        names = (b"rXYZ", b"gXYZ", b"bXYZ")
        tags += [(n, b"XYZ \0\0\0\0" + fixed(*v)) for n, v in zip(names, P3, strict=True)]
        tags += [(name, curve) for name in (b"rTRC", b"gTRC", b"bTRC")]
    else:
        tags.append((b"kTRC", curve))
    at, table, body = 132 + 12 * len(tags), struct.pack(">I", len(tags)), b""
    for name, data in tags:
        table += name + struct.pack(">II", at + len(body), len(data))
        body += data
    head = struct.pack(">I", at + len(body)) + bytes(4) + struct.pack(">I", 0x02400000)
    head += b"mntr" + space + b"XYZ " + bytes(12) + b"acsp" + bytes(28)
    return (head + fixed(0.9642, 1, 0.8249)).ljust(128, b"\0") + table + body


LITTLE_LOSS: dict[str, dict[str, Any]] = {
    "JPEG": {"quality": 100, "subsampling": 0},
    "AVIF": {"quality": 100},
    "WEBP": {"lossless": True},
}
NO_SUCH_FILES = (("RGBA", "JPEG"), ("P", "JPEG"), ("P", "WEBP"), ("P", "AVIF"))


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "AVIF", "PIL"])
@pytest.mark.parametrize("mode", ["RGB", "RGBA", "P"])
def test_colours_are_converted_to_srgb(mode: str, kind: str) -> None:
    """Display P3, which telephones photograph in: of files and of pictures of PIL, with transparency and without."""
    if (mode, kind) in NO_SUCH_FILES or (kind == "AVIF" and not features.check("avif")):
        pytest.skip("there are no such files, or Pillow reads none here")
    image = Image.new("RGB", (48, 32), (200, 60, 30))
    image = image.quantize(4) if mode == "P" else image.convert(mode)
    if kind == "PIL":
        image.info["icc_profile"] = profile()
        source = read_picture(image)
    else:
        how = LITTLE_LOSS.get(kind, {})
        source = read_picture(encoded(image, kind, icc_profile=profile(), **how))
    found = np.asarray(source.picture)[5, 5].astype(int)
    assert np.abs(found - (219, 37, 0)).max() <= 4


def test_profiles_that_change_nothing_leave_the_numbers() -> None:
    """sRGB's own, one that is damaged, one of other colours, and one that is too large to be one."""
    want, image = read_picture(picture()), picture()
    srgb = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    for kept in (srgb, b"no profile", profile(space=b"GRAY"), b""):
        assert read_picture(encoded(image, "PNG", icc_profile=kept)) == want
    large = b"x\0\0" + zlib.compress(bytes(sources.MOST_PROFILE + 1))
    assert read_picture(whole_rows(chunk(b"iCCP", large))) == want
    second = chunk(b"iCCP", b"x\0\0" + zlib.compress(profile()))  # there may be one alone
    assert read_picture(whole_rows(chunk(b"iCCP", large), second)) == want


def test_greys_have_profiles_too() -> None:
    grey = Image.new("L", (20, 20), 100)
    darker = read_picture(encoded(grey, "PNG", icc_profile=profile(space=b"GRAY", gamma=3.0)))
    value = darker.picture.getpixel((3, 3))
    assert isinstance(value, tuple) and value[0] < 80 and len(set(value)) == 1
    clear = grey.convert("LA")
    clear.putalpha(0)
    white = read_picture(encoded(clear, "PNG", icc_profile=profile(space=b"GRAY", gamma=3.0)))
    assert white.picture.getpixel((3, 3)) == (255, 255, 255)


def text_of(size: int, **how: Any) -> bytes:
    info = PngImagePlugin.PngInfo()
    info.add_text("workflow", "x" * size, **how)
    return encoded(picture(), "PNG", pnginfo=info)


def whole_rows(*extra: bytes) -> bytes:
    """The same picture, behind other chunks."""
    rows = b"".join(b"\0" + row.tobytes() for row in np.asarray(picture()))
    return png(48, 32, rows, *extra)


READABLE = {
    "2 MiB of compressed text": text_of(2 << 20, zip=True),
    "2 MiB of plain text": text_of(2 << 20),
    "a wrong checksum beside the pixels": whole_rows(chunk(b"tEXt", b"a\0b", crc=0)),
    "an unknown chunk": whole_rows(chunk(b"zzZz", bytes(99))),
}


def test_what_viewers_show_is_read() -> None:
    for name, data in READABLE.items():
        assert read_picture(data) == read_picture(picture()), name


def test_the_first_frame_is_read_and_nothing_behind_it() -> None:
    frames = [Image.new("RGB", (20, 20), colour) for colour in ("red", "blue")]
    moving = encoded(frames[0], "WEBP", save_all=True, append_images=frames[1:], lossless=True)
    assert read_picture(moving + bytes(1 << 20)).picture.getpixel((1, 1)) == (255, 0, 0)


WHOLE = encoded(picture(200, 200), "PNG")
REFUSED: dict[str, tuple[Any, str]] = {
    "a bomb": (header(9000, 9000), "too many pixels"),
    "a larger bomb": (header(60000, 60000), "too many pixels"),
    "cut off": (WHOLE[: len(WHOLE) // 2], "damaged or cut off"),
    "cut off jpeg": (encoded(picture(200, 200), "JPEG")[:3000], "damaged or cut off"),
    "text": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "it is SVG, not PNG"),
    "words": (b"a red apple", "it is not PNG, JPEG, WebP"),
    "a signature alone": (b"\x89PNG\r\n\x1a\n", "damaged or cut off: its header"),
    "nothing": (b"", "it is not PNG"),
    "another kind": (encoded(picture(), "GIF"), "it is GIF, not PNG, JPEG, WebP"),
    "a TIFF": (encoded(picture(), "TIFF"), "it is TIFF"),
    "a BMP": (encoded(picture(), "BMP"), "it is BMP"),
    "a HEIC": (b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(99), "it is HEIC"),
    "a small side": (picture(15, 40), "it is 40 x 15"),
    "a long side": (picture(20, 81), "it is 81 x 20"),
    "no file": ("/nowhere/cat.png", "No such file"),
    "a folder": ("/", "a folder"),
    "an address": ("https://example.com/cat.png", "No such file"),
    "a name with a zero": ("a\0b", "null"),
    "an array": (np.zeros((20, 20, 3), np.uint8), "of type ndarray"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_source_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is too large, before it is decoded."""
    given, why = REFUSED[name]
    if name.endswith("bomb"):
        monkeypatch.setattr(Image.Image, "load", lambda self: pytest.fail("decoded"))
    with pytest.raises(OptionError, match=why) as caught:
        read_picture(given)
    assert caught.value.field == "image"


def test_damaged_files_are_refused_and_nothing_else_happens() -> None:
    """Bytes changed anywhere, or cut anywhere: a source, or an OptionError."""
    rng = np.random.default_rng(0)
    kinds = [encoded(picture(), kind) for kind in ("PNG", "JPEG", "WEBP")]
    outcomes = set[type]()
    for number in range(300):
        data = bytearray(kinds[number % 3])
        for _ in range(int(rng.integers(1, 6))):
            data[int(rng.integers(len(data)))] = int(rng.integers(256))
        if number % 2:
            del data[int(rng.integers(len(data))) :]
        try:
            outcomes.add(type(read_picture(bytes(data))))
        except OptionError as error:
            outcomes.add(type(error))
    assert outcomes == {SourcePicture, OptionError}


JPEG = encoded(picture(64, 64), "JPEG")


def repeated(part: bytes, count: int) -> bytes:
    """A JPEG with a part of so many copies behind its first marker."""
    return JPEG[:2] + part * count + JPEG[2:]


def scans(count: int) -> bytes:
    """A progressive JPEG of 800 x 800 greys, whose scans say that nothing changes."""

    def segment(marker: int, data: bytes) -> bytes:
        return b"\xff" + bytes([marker]) + struct.pack(">H", len(data) + 2) + data

    def bits(text: str) -> bytes:
        text += "1" * (-len(text) % 8)
        return int(text, 2).to_bytes(len(text) // 8, "big").replace(b"\xff", b"\xff\0")

    head = segment(0xDB, b"\0" + bytes([1] * 64))
    head += segment(0xC2, struct.pack(">BHHB", 8, 800, 800, 1) + bytes([1, 0x11, 0]))
    head += segment(0xC4, b"\0" + bytes([1, *[0] * 15]) + b"\0")
    head += segment(0xC4, b"\x10" + bytes([1, *[0] * 15]) + b"\xd0")
    first = segment(0xDA, bytes([1, 1, 0, 0, 0, 0])) + bits("0" * 10_000)
    run = segment(0xDA, bytes([1, 1, 0, 1, 63, 0])) + bits("0" + format(10_000 - 8192, "013b"))
    return b"\xff\xd8" + head + first + run * count + b"\xff\xd9"


def shared_entries(count: int = 60_000) -> bytes:
    """A PNG whose EXIF has entries of the same 8 MB: 480 GB, for who reads all of them."""
    size = 8_000_000
    at = struct.pack("<I", 8 + 2 + 12 * count + 4)
    entries = [(kind, 7, size, at) for kind in range(1000, 1000 + count - 1)]
    return whole_rows(chunk(b"eXIf", tagged((0x0112, 3, 1, b"\6\0\0\0"), *entries) + bytes(size)))


# Files of many parts that are no pixels; of a hundred times as many, the first five took seconds to read
LABORIOUS: dict[str, tuple[bytes, str]] = {
    "segments": (repeated(b"\xff\xe5\0\x02", MOST_PARTS + 1), "more than 100000 segments"),
    "comments": (repeated(b"\xff\xfe\0\x02", MOST_PARTS + 1), "more than 100000 segments"),
    "tables": (repeated(b"\xff\xdb\0\x02", MOST_PARTS + 1), "more than 100000 segments"),
    "fill bytes": (repeated(b"\xff", 1 << 22), ""),
    "fill bytes that end in none": (repeated(b"\xff", 1 << 21)[: 1 << 20] + b"\0", "cut off"),
    "junk between segments": (JPEG[:20] + bytes(1 << 22) + JPEG[20:], ""),
    "nothing but a marker": (JPEG[:4] + bytes(1 << 22), "cut off"),
    "scans": (scans(MOST_SCANS), f"more than {MOST_SCANS} scans"),
    "some scans": (scans(20), ""),
    "entries of an EXIF": (shared_entries(), ""),
    "chunks": (whole_rows(chunk(b"abCd", b"") * (MOST_PARTS + 1)), "more than 100000 chunks"),
    "empty pixels": (whole_rows(chunk(b"IDAT", b"") * (MOST_PARTS + 1)), "more than 100000 chunks"),
    "chunks of WebP": (
        b"RIFF\xff\xff\xff\0" + encoded(picture(), "WEBP")[8:] + b"junk\0\0\0\0" * (MOST_PARTS + 1),
        "more than 100000 chunks",
    ),
}


@pytest.mark.parametrize("name", LABORIOUS)
def test_promise_a_decoder_sees_no_more_than_pixels_need(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a large file either little is handed to the decoder, or it is refused before."""
    given, why = LABORIOUS[name]
    real, seen = Image.open, list[int]()

    def opened(file: io.BytesIO, **how: Any) -> Any:
        seen.append(len(file.getvalue()))
        return real(file, **how)

    monkeypatch.setattr(Image, "open", opened)
    if not why:
        assert read_picture(given).picture.mode == "RGB"
    else:
        with pytest.raises(OptionError, match=why):
            read_picture(given)
    assert sum(seen) < 200_000


@pytest.mark.parametrize("progressive", [False, True])
@pytest.mark.parametrize(("subsampling", "samples"), [(0, 3.0), (2, 1.5)])
def test_coefficients_are_counted(progressive: bool, subsampling: int, samples: float) -> None:
    data = encoded(picture(64, 64), "JPEG", progressive=progressive, subsampling=subsampling)
    counted = sources.open_parts(data).coefficients
    assert counted == 2 * 64 * 64 * samples * progressive


def test_parts_of_a_jpeg_are_enough_for_its_pixels() -> None:
    """Of every kind that Pillow writes, and with what cameras put beside the pixels."""
    for how in ({}, {"progressive": True}, {"quality": 5}, {"restart_marker_rows": 1}):
        for mode in ("RGB", "L", "CMYK"):
            beside: dict[str, Any] = {"comment": b"x" * 500, "exif": b"Exif\0\0" + tagged()}
            data = encoded(picture(80, 100, mode), "JPEG", **how, **beside)
            stripped = sources.open_parts(data).data
            assert len(stripped) < len(data)
            with Image.open(io.BytesIO(data)) as whole, Image.open(io.BytesIO(stripped)) as some:
                assert whole.tobytes() == some.tobytes() and whole.mode == some.mode


def test_sources_of_a_call() -> None:
    a, b = picture(), picture(20, 20)
    one, two = read_picture(a), read_picture(b)
    assert sources_of(None, 2) == [(), ()]
    assert sources_of(a, 2) == [(one,), (one,)]
    assert sources_of([a, b], 2) == [(one, two), (one, two)]
    assert sources_of([[a], [b]], 2) == [(one,), (two,)]
    for wrong in ([[a], [b], [a]], [[a], [a, b]], [[a], b]):
        with pytest.raises(OptionError) as caught:
            sources_of(wrong, 2)
        assert caught.value.field == "image"


def test_metadata_have_the_digests() -> None:
    source = read_picture(picture())
    request = Request("red", sources=(source,))
    assert request.settings["sources"] == [{"digest": source.digest, "size": [32, 48]}]
    assert "sources" not in Request("red").settings


def test_a_model_that_reads_none_refuses(pipeline: LanternPipeline) -> None:
    assert reads_pictures(pipeline.model.config) == 0
    with pytest.raises(OptionError, match="reads no pictures") as caught:
        pipeline("red", image=picture())
    assert caught.value.field == "image"
