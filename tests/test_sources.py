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
from PIL import Image

from lantern_hpu import LanternPipeline, Request
from lantern_hpu.core import SourcePicture
from lantern_hpu.errors import OptionError
from lantern_hpu.models.text.frames import reads_pictures
from lantern_hpu.results.sources import MOST_PIXELS, read_picture, sources_of


def picture(height: int = 32, width: int = 48, mode: str = "RGB") -> Image.Image:
    bands = len(Image.new(mode, (1, 1)).getbands())
    noise = np.random.default_rng(height * width).integers(0, 255, (height, width, bands))
    return Image.fromarray(noise.astype(np.uint8).squeeze(), mode)


def encoded(image: Image.Image, kind: str, **how: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **how)
    return buffer.getvalue()


def header(width: int, height: int) -> bytes:
    """A PNG that says of itself that it is of this size, and holds next to nothing."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    size = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", size)
        + chunk(b"IDAT", zlib.compress(b"\0"))
        + chunk(b"IEND", b"")
    )


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


def test_a_photograph_is_turned_as_its_camera_says() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # a quarter to the right
    source = read_picture(encoded(picture(), "PNG", exif=exif))
    assert source.size == (48, 32)
    assert source.picture.tobytes() == picture().rotate(-90, expand=True).tobytes()


@pytest.mark.parametrize("mode", ["RGBA", "LA"])
def test_what_is_transparent_is_white(mode: str) -> None:
    image = picture(mode=mode)
    image.putalpha(0)
    source = read_picture(encoded(image, "PNG"))
    assert source.picture.getextrema() == ((255, 255),) * 3


def test_a_transparent_colour_of_a_palette_is_white() -> None:
    image = Image.new("P", (20, 20), 1)
    image.putpalette([0, 0, 0, 9, 8, 7])
    assert read_picture(image).picture.getpixel((3, 3)) == (9, 8, 7)
    clear = encoded(image, "PNG", transparency=1)
    assert read_picture(clear).picture.getpixel((3, 3)) == (255, 255, 255)


def test_sixteen_bits_of_grey_keep_their_brightness() -> None:
    grey = Image.fromarray(np.full((20, 20), 0x80FF, np.uint16))
    assert read_picture(encoded(grey, "PNG")).picture.getpixel((1, 1)) == (128, 128, 128)


def test_the_first_frame_is_read() -> None:
    frames = [Image.new("RGB", (20, 20), colour) for colour in ("red", "blue")]
    moving = encoded(frames[0], "WEBP", save_all=True, append_images=frames[1:], lossless=True)
    assert read_picture(moving).picture.getpixel((1, 1)) == (255, 0, 0)


WHOLE = encoded(picture(200, 200), "PNG")
REFUSED: dict[str, tuple[Any, str]] = {
    "a bomb": (header(9000, 9000), "too many pixels"),
    "a larger bomb": (header(60000, 60000), "too many pixels"),
    "cut off": (WHOLE[: len(WHOLE) // 2], "damaged or cut off"),
    "cut off jpeg": (encoded(picture(200, 200), "JPEG")[:3000], "damaged or cut off"),
    "text": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "not PNG, JPEG, WebP"),
    "nothing": (b"", "not PNG, JPEG, WebP"),
    "another kind": (encoded(picture(), "GIF"), "not PNG, JPEG, WebP"),
    "a small side": (picture(15, 40), "it is 40 x 15"),
    "a long side": (picture(20, 81), "it is 81 x 20"),
    "no file": ("/nowhere/cat.png", "No such file"),
    "a folder": ("/", "a folder"),
    "an address": ("https://example.com/cat.png", "No such file"),
    "a name with a zero": ("a\0b", "null"),
    "an array": (np.zeros((20, 20, 3), np.uint8), "of type ndarray"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_source_is_refused(name: str) -> None:
    given, why = REFUSED[name]
    with pytest.raises(OptionError, match=why) as caught:
        read_picture(given)
    assert caught.value.field == "image"


def test_a_bomb_is_refused_before_it_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    assert MOST_PIXELS < 9000 * 9000
    monkeypatch.setattr(Image.Image, "load", lambda self: pytest.fail("decoded"))
    with pytest.raises(OptionError):
        read_picture(header(9000, 9000))


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
