"""Pictures that a request is drawn from, read from files and bytes of any origin."""

from __future__ import annotations

import hashlib
import io
import os
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps

from lantern_hpu.core import MOST_ASPECT, SourcePicture
from lantern_hpu.errors import Arg, LanternError, OptionError, words
from lantern_hpu.files import check_regular
from lantern_hpu.methods.request import check_count

FORMATS = ("PNG", "JPEG", "WEBP")
MOST_PIXELS = 64_000_000  # of a source, known from its header before it is decoded
TOO_LARGE = "it has too many pixels", f"at most {MOST_PIXELS // 10**6} million"
LEAST_SIDE = 16  # in pixels
WHITE = (255, 255, 255, 255)


def read_picture(given: Any, name: str = "") -> SourcePicture:
    """A source from a picture of PIL, a path, or the bytes of a file: PNG, JPEG or WebP, of which the first frame.

    It is turned as its EXIF says, laid on white where it is transparent, and RGB from then on.

    Args:
        name: what errors call it; its path, if it has one.

    Raises:
        OptionError: it is no such picture, cut off, of too many pixels, too small, or too long for its height.
    """
    if isinstance(given, Image.Image):
        return source_of(given, name)
    if isinstance(given, str | os.PathLike):
        name = name or str(given)
        given = bytes_of(Path(given), name)
    if not isinstance(given, bytes):
        why = f"it is of type {type(given).__name__}"
        raise refused(name, why, "a picture of PIL, or the path of a file")
    try:
        image = Image.open(io.BytesIO(given), formats=FORMATS)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise refused(name, *TOO_LARGE) from error
    except MemoryError:
        raise
    except Exception as error:  # a damaged header may raise anything
        raise refused(name, "it is not a PNG, JPEG or WebP file") from error
    with image:
        return source_of(image, name)


def bytes_of(path: Path, name: str) -> bytes:
    try:
        check_regular(path)
        return path.read_bytes()
    except LanternError as error:
        raise refused(name, str(error.why)) from error
    except (OSError, ValueError) as error:  # a name may hold a zero
        raise refused(name, getattr(error, "strerror", None) or str(error)) from error


def source_of(image: Image.Image, name: str) -> SourcePicture:
    check_size(image, name)
    try:
        picture = upright_rgb(image)
    except MemoryError:
        raise
    except Exception as error:  # decoders raise anything for a damaged file
        why = f"it is damaged or cut off: {error or type(error).__name__}"
        raise refused(name, why, "another copy of it") from error
    digest = hashlib.sha256(f"{picture.width}x{picture.height}:".encode())
    digest.update(picture.tobytes())
    return SourcePicture(picture, digest.hexdigest())


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


def upright_rgb(image: Image.Image) -> Image.Image:
    """A picture of its own: turned as its EXIF says, on white, RGB."""
    image.load()
    turned = ImageOps.exif_transpose(image)
    if turned.mode.startswith("I"):  # 16 bits of grey
        turned = Image.fromarray((np.asarray(turned).astype(np.uint32) >> 8).astype(np.uint8))
    if turned.has_transparency_data:
        turned = turned.convert("RGBA")
        turned = Image.alpha_composite(Image.new("RGBA", turned.size, WHITE), turned)
    picture = turned.convert("RGB")
    picture.info.clear()
    return picture


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
