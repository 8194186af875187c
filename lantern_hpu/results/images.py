"""Images, how they came about, and PNG files that carry what draws their image again."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw
from PIL.PngImagePlugin import PngInfo

from lantern_hpu.core import ImageRecord, Request, RunStats
from lantern_hpu.errors import OptionError
from lantern_hpu.files import parse_json

METADATA = "lantern_hpu"  # key of the text chunk with everything needed to draw the image again
SIGNATURE = b"\x89PNG\r\n\x1a\n"
END = b"IEND\xaeB`\x82"
REPLAYED = ("model", "weights", "method", "tree", "tree_paths", "sampling", "relaxation", "dtype")
# Types of what is stored, where it is there
KINDS = {"prompt": str, "seed": int, "config": dict, "environment": dict}
CONFIG_KINDS: dict[str, type | UnionType] = {
    **dict.fromkeys(("model", "method", "tree", "dtype", "layout", "kernels", "device"), str),
    **dict.fromkeys(("weights", "parts", "sampling", "relaxation"), dict),
    **dict.fromkeys(("quantize", "negative", "stretch"), str | None),
    **dict.fromkeys(("tree_paths", "sources"), list),
    "size": list | None,
}


def with_metadata(image: Image.Image, metadata: Mapping[str, Any]) -> bytes:
    """A PNG file that carries what draws it again."""
    info = PngInfo()
    info.add_itxt("prompt", metadata["prompt"])
    info.add_text("seed", str(metadata["seed"]))
    info.add_itxt(METADATA, json.dumps(metadata))  # ASCII: paths in it may not be UTF-8
    return encode(image, pnginfo=info)


def encode(image: Image.Image, kind: str = "png", **how: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **how)
    return buffer.getvalue()


def check_kinds(values: Mapping[str, Any], kinds: Mapping[str, type | UnionType]) -> None:
    """Raise a ValueError for a value of stored metadata that is of another type."""
    for name, kind in kinds.items():
        if name in values and not isinstance(values[name], kind):
            raise ValueError(f"{name} is {str(values[name])[:60]!r}")


def read_png(path: Path) -> dict[str, Any]:
    """Metadata of an image that this package drew."""
    try:
        with Image.open(path) as image:
            text = dict(getattr(image, "text", {}))
            data: dict[str, Any] = parse_json(text[METADATA])
            config = dict(data["config"])
            check_kinds(data, KINDS)
            check_kinds(config, CONFIG_KINDS)
            missing = [name for name in REPLAYED if name not in config]
            if missing:
                raise OptionError(f"{path} cannot be drawn again", f"it lacks {', '.join(missing)}")
            environment = data.get("environment", {})
            check_kinds(environment, {"threads": int})
            return {
                "prompt": data["prompt"],
                "seed": data["seed"],
                "config": config,
                "size": image.size,
                "version": environment.get("lantern_hpu", "another version"),
                "threads": environment.get("threads", 0),
            }
    except KeyError as error:
        why = "it carries no settings: a sheet, drawn elsewhere, or stripped by an editor"
        raise OptionError(f"{path} cannot be drawn again", why) from error
    except (OSError, ValueError, TypeError, Image.DecompressionBombError) as error:
        raise OptionError(f"cannot read {path}", str(error)) from error


def is_cut_off(path: Path) -> bool:
    """Whether it is a PNG that is not whole, as of a copy that broke off; not whether it is one of ours."""
    data = path.read_bytes()
    if not SIGNATURE.startswith(data[: len(SIGNATURE)]):
        return False
    try:
        with Image.open(io.BytesIO(data)) as image:
            image.load()
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return True
    return not data.endswith(END)


def drawn_otherwise(
    there: Mapping[str, Any], settings: Mapping[str, Any], request: Request
) -> list[str]:
    """In what an image that is there, as `read_png` reads it, is not the one of a request with these settings."""
    names = (*REPLAYED, "stretch", "negative", "size", "sources")
    others = [name for name in names if there["config"].get(name) != settings.get(name)]
    return others + [name for name in ("prompt", "seed") if there[name] != getattr(request, name)]


CAPTION = 14  # pixels of a line under a picture of a sheet
# Of the environment: what another run measures otherwise
MEASURED = ("decided", "peak_memory_bytes")


@dataclass
class Drawn:
    """One image, None where nothing decodes the model's tokens, with all that is needed to draw it again.

    The settings are those of the run and the image's own.
    """

    image: Image.Image | None
    record: ImageRecord
    settings: dict[str, Any]
    environment: dict[str, Any]

    def metadata(self) -> dict[str, Any]:
        """What draws it again; nothing that was measured, so that drawing it again makes the same file."""
        lasting = {k: v for k, v in self.environment.items() if k not in MEASURED}
        return {
            "prompt": self.record.prompt,
            "seed": self.record.seed,
            "tv": self.record.tv,
            "config": self.settings,
            "environment": lasting,
            **({"invalid": self.record.invalid} if self.record.invalid else {}),
        }

    def png(self) -> bytes:
        """A PNG file with the metadata."""
        assert self.image is not None, "nothing decodes this model's tokens"
        return with_metadata(self.image, self.metadata())


OutputType = Literal["pil", "np", "pt", "tokens"]


@dataclass(kw_only=True)
class GenerationResult:
    """Images and how they came about.

    Attributes:
        drawn: the images, each with what draws it again.
        notes: what the model cannot do with the prompts; `warnings` is the same.
        tokenizer: fingerprint of the VQ tokenizer, the same in any container; empty where there is none.
        preview_tokens: how many of an image's tokens are of a preview that is drawn first.
        code_grid: rows and columns of the picture's codes.
        output_type: what `images` are.
    """

    drawn: list[Drawn]
    timing: RunStats
    graph: dict[str, Any]
    config: dict[str, Any]
    environment: dict[str, Any]
    notes: list[str]
    tokenizer: str
    preview_tokens: int
    code_grid: tuple[int, int]
    output_type: OutputType = "pil"

    @property
    def pictures(self) -> list[Image.Image]:
        """None where the model has nothing that decodes tokens, or pixels were not wanted."""
        return [one.image for one in self.drawn if one.image is not None]

    @property
    def warnings(self) -> list[str]:
        return self.notes

    @property
    def records(self) -> list[ImageRecord]:
        return [one.record for one in self.drawn]

    @property
    def tokens(self) -> NDArray[np.int64]:
        """[images, N]"""
        return np.array([one.record.token_ids for one in self.drawn], np.int64)

    @property
    def logprobs(self) -> NDArray[np.float32] | None:
        """[images, N] of the tokens as they were drawn, see `ImageRecord`; None where they were not asked for."""
        return stacked([record.logprobs for record in self.records])

    @property
    def model_logprobs(self) -> NDArray[np.float32] | None:
        """[images, N] of the tokens by the model alone, the same."""
        return stacked([record.model_logprobs for record in self.records])

    @property
    def settings(self) -> list[dict[str, Any]]:
        """Sampling and relaxation of each image."""
        return [one.record.settings for one in self.drawn]

    @property
    def images(self) -> Any:
        """A list of PIL images, [B, H, W, 3] or [B, 3, H, W] float32 in 0 to 1, or tokens: see `output_type`."""
        if self.output_type == "pil":
            return self.pictures
        if self.output_type == "tokens":
            return self.tokens
        pixels = np.stack([np.asarray(image, np.float32) / 255 for image in self.pictures])
        if self.output_type == "np":
            return pixels
        import torch

        return torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous()

    def __getitem__(self, index: int) -> Any:
        """`result[0]` is `images`, as of the tuple that diffusers returns."""
        return (self.images,)[index]

    def __iter__(self) -> Iterator[Any]:
        return iter((self.images,))

    def grid(self, cols: int | None = None, scale: int = 1) -> Image.Image:
        """All images on one sheet, `cols` a row or as square as can be; `scale` times as large, by Lanczos."""
        pictures = self.pictures
        size = scale * pictures[0].width, scale * pictures[0].height
        return grid([one.resize(size, Image.Resampling.LANCZOS) for one in pictures], cols)

    def report(self) -> dict[str, Any]:
        """The contents of a report."""
        return {
            "images": [record.as_json() for record in self.records],
            "warnings": self.notes,
            "timing": self.timing.as_json(),
            "graph": self.graph,
            "config": self.drawn[0].settings if self.drawn else self.config,  # of the first image
            "environment": self.environment,
        }

    def metadata(self, index: int) -> dict[str, Any]:
        """What draws one image again."""
        return self.drawn[index].metadata()

    def png(self, index: int) -> bytes:
        """One image as a PNG file with its metadata."""
        return self.drawn[index].png()


def grid(
    images: Sequence[Image.Image],
    columns: int | None = None,
    gap: int = 4,
    captions: Sequence[str] = (),
    together: int = 1,
) -> Image.Image:
    """All images on one sheet as square as can be, row by row, each with its caption under it, cut to its width.

    `together`: images of one prompt, which stay in one row.
    """
    columns = columns or together * max(1, math.ceil(math.sqrt(len(images)) / together))
    rows = -(-len(images) // columns)
    width, height = images[0].size
    deep = height + gap + (CAPTION if captions else 0)  # pixels of a row
    sheet = Image.new("RGB", (columns * (width + gap) + gap, rows * deep + gap), "white")
    draw = ImageDraw.Draw(sheet)
    for index, image in enumerate(images):
        row, column = divmod(index, columns)
        left, top = gap + column * (width + gap), gap + row * deep
        sheet.paste(image, (left, top))
        if captions:
            # In the letters of the font that Pillow has
            text = whole = captions[index].encode("ascii", "replace").decode()
            while draw.textlength(text) > width and whole:
                whole = whole[:-1]
                text = whole.rstrip() + "..."
            draw.text((left, top + height + 1), text, fill="black")
    return sheet


def stacked(rows: Sequence[NDArray[np.float32] | None]) -> NDArray[np.float32] | None:
    """[n, N] of n rows; None where there is none, or one is missing."""
    there = [row for row in rows if row is not None]
    return np.stack(there) if there and len(there) == len(rows) else None


def tokens_per_step(records: Sequence[ImageRecord]) -> float:
    """Mean over images: tokens after the first, which prefill draws, for each step."""
    return sum(r.tokens - 1 for r in records) / max(sum(r.steps for r in records), 1)


def mean_tv(records: Sequence[ImageRecord]) -> float | None:
    """Of a token after the first of its image; None where it was not metered."""
    sums = [record.tv_sum for record in records]
    known = [value for value in sums if value is not None]
    if len(known) < len(sums):
        return None
    return sum(known) / max(sum(record.tokens - 1 for record in records), 1)
