"""What a run leaves behind: images with metadata, tokens, reports. No half file, no silent overwrite."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from lantern_hpu.errors import OptionError, OutputError

REPLAYED = ("model", "weights", "method", "tree", "tree_paths", "sampling", "relaxation", "dtype")
METADATA = "lantern_hpu"  # key of the PNG text chunk with everything needed to draw the image again


@dataclass
class ImageRecord:
    """One image's line in the report.

    Attributes:
        tokens_per_step: bonus token included; prefill and what lies past the image excluded.
        accepted_by_depth: entry d counts steps that accepted a draft at depth d + 1.
    """

    file: str | None
    prompt: str
    seed: int
    tokens: int
    steps: int
    tokens_per_step: float
    accepted_by_depth: list[int]
    relaxed_accepts: int


@dataclass
class GenerationResult:
    """Images and how they came about."""

    images: list[Image.Image]
    records: list[ImageRecord]
    tokens: NDArray[np.int64]  # [images, N]
    timing: dict[str, float]
    graph: dict[str, Any]
    settings: list[dict[str, Any]]  # sampling and relaxation of each image
    config: dict[str, Any]
    environment: dict[str, Any]
    notes: list[str]

    def report(self) -> dict[str, Any]:
        """The JSON contract of `--report`."""
        return {
            "images": [asdict(record) for record in self.records],
            "timing": self.timing,
            "graph": self.graph,
            "config": self.config | self.settings[0],  # of the first image
            "environment": self.environment,
        }

    def metadata(self, index: int) -> dict[str, Any]:
        """What `--from-png` needs to draw one image again."""
        record = self.records[index]
        return {
            "prompt": record.prompt,
            "seed": record.seed,
            "config": self.config | self.settings[index],
            "environment": self.environment,
        }

    def png(self, index: int) -> bytes:
        """One image as a PNG file with its metadata."""
        info = PngInfo()
        info.add_itxt("prompt", self.records[index].prompt)
        info.add_text("seed", str(self.records[index].seed))
        info.add_itxt(METADATA, json.dumps(self.metadata(index), ensure_ascii=False))
        return encode(self.images[index], info)


def encode(image: Image.Image, info: PngInfo | None = None) -> bytes:
    """PNG bytes."""
    buffer = io.BytesIO()
    image.save(buffer, "PNG", pnginfo=info)
    return buffer.getvalue()


def read_png(path: Path) -> dict[str, Any]:
    """Metadata of an image that this package drew.

    Raises:
        OptionError: not readable, or not ours.
    """
    try:
        with Image.open(path) as image:
            text = dict(getattr(image, "text", {}))
            data: dict[str, Any] = json.loads(text[METADATA])
            config = dict(data["config"])
            missing = [name for name in REPLAYED if name not in config]
            if missing:
                raise OptionError(f"{path} cannot be drawn again", f"it lacks {', '.join(missing)}")
            return {"prompt": data["prompt"], "seed": int(data["seed"]), "config": config}
    except KeyError as error:
        why = "it carries no settings: a sheet, drawn elsewhere, or stripped by an editor"
        raise OptionError(f"{path} cannot be drawn again", why) from error
    except (OSError, ValueError, TypeError) as error:
        raise OptionError(f"cannot read {path}", str(error)) from error


def grid(images: Sequence[Image.Image], columns: int | None = None, gap: int = 4) -> Image.Image:
    """All images on one sheet, row by row."""
    columns = columns or min(len(images), 8)
    rows = -(-len(images) // columns)
    width, height = images[0].size
    sheet = Image.new("RGB", (columns * (width + gap) + gap, rows * (height + gap) + gap), "white")
    for index, image in enumerate(images):
        row, column = divmod(index, columns)
        sheet.paste(image, (gap + column * (width + gap), gap + row * (height + gap)))
    return sheet


def slug(prompt: str, length: int = 40) -> str:
    """A prompt as part of a file name."""
    return re.sub(r"[^a-z0-9]+", "-", prompt.lower()).strip("-")[:length].strip("-") or "image"


def tokens_per_step(records: Sequence[ImageRecord]) -> float:
    """Mean over images: tokens after the first, which prefill draws, for each step."""
    return sum(r.tokens - 1 for r in records) / max(sum(r.steps for r in records), 1)


def check_free(paths: Iterable[Path], force: bool) -> None:
    """Refuse to go on if a result could not be written later.

    Raises:
        OutputError: two results would go to one file, a file exists (unless forced), or its folder cannot be
            written.
    """
    paths = list(paths)
    twice = [str(path) for path in paths if paths.count(path) > 1]
    if twice:
        raise OutputError(f"{twice[0]} is to hold two results", "each needs a file of its own")
    taken = [str(path) for path in paths if path.exists()]
    folders = [path for path in paths if path.is_dir()]
    if folders:
        raise OutputError(f"{folders[0]} is a folder", "a file was to be written there")
    if taken and not force:
        some = ", ".join(taken[:3]) + (f" and {len(taken) - 3} more" if len(taken) > 3 else "")
        raise OutputError(
            f"{some} exists", "nothing is overwritten unasked", "--force or another --output"
        )
    for folder in {path.parent for path in paths}:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            raise OutputError(
                f"cannot write into {folder}", error.strerror or str(error)
            ) from error


def write_file(path: Path, data: bytes, force: bool = False) -> None:
    """Write a whole file or none: first beside its place, then moved over.

    Raises:
        OutputError: it exists and `force` is off, no permission, disk full.
    """
    if path.exists() and not force:
        raise OutputError(
            f"{path} exists", "nothing is overwritten unasked", "--force or another name"
        )
    part = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(part, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        place(part, path, force)
    except OSError as error:
        raise OutputError(f"cannot write {path}", error.strerror or str(error)) from error
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)


def place(part: Path, path: Path, force: bool) -> None:
    """Give a finished file its name; unlike a move, a link fails if the name was taken meanwhile."""
    if not force:
        try:
            os.link(part, path)
            return
        except FileExistsError:
            raise
        except OSError:  # a file system without links
            pass
    os.replace(part, path)


def tokens_file(result: GenerationResult) -> bytes:
    """`--save-tokens`: arrays tokens [images, N] int32, seeds [images] int64, prompts [images] str."""
    buffer = io.BytesIO()
    np.savez_compressed(
        buffer,
        tokens=result.tokens.astype(np.int32),
        seeds=np.asarray([record.seed for record in result.records], dtype=np.int64),
        prompts=np.asarray([record.prompt for record in result.records]),
    )
    return buffer.getvalue()
