"""What a run leaves behind: images with metadata, tokens, reports."""

from __future__ import annotations

import io
import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import UnionType
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw
from PIL.PngImagePlugin import PngInfo

from lantern_hpu.core import ImageRecord, Request, RunStats, check_text
from lantern_hpu.errors import OptionError, OutputError
from lantern_hpu.files import (
    check_content,
    check_free,
    check_regular,
    parse_json,
    some_of,
    write_file,
)

CAPTION = 14  # pixels of a line under a picture of a sheet
REPLAYED = ("model", "weights", "method", "tree", "tree_paths", "sampling", "relaxation", "dtype")
# Types of what is stored, where it is there
KINDS = {"prompt": str, "seed": int, "config": dict, "environment": dict}
CONFIG_KINDS: dict[str, type | UnionType] = {
    **dict.fromkeys(("model", "method", "tree", "dtype", "layout", "kernels", "device"), str),
    **dict.fromkeys(("weights", "parts", "sampling", "relaxation"), dict),
    **dict.fromkeys(("quantize", "negative", "stretch"), str | None),
    "tree_paths": list,
    "size": list | None,
}
# Of the environment: what another run measures otherwise
MEASURED = ("decided", "peak_memory_bytes")
PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".avif", ".gif", ".bmp", ".tif", ".tiff")
NUMBERED = re.compile(r"\d{3,}-[a-z0-9-]+\.png")  # pictures of a folder: see `image_files`
SIGNATURE, END = b"\x89PNG\r\n\x1a\n", b"IEND\xaeB`\x82"  # of a PNG
METADATA = "lantern_hpu"  # key of the PNG text chunk with everything needed to draw the image again


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
        """What `--from-png` needs; nothing that was measured, so that drawing it again makes the same file."""
        lasting = {k: v for k, v in self.environment.items() if k not in MEASURED}
        return {
            "prompt": self.record.prompt,
            "seed": self.record.seed,
            "tv": self.record.tv,
            "config": self.settings,
            "environment": lasting,
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
        """The JSON contract of `--report`."""
        return {
            "images": [record.as_json() for record in self.records],
            "warnings": self.notes,
            "timing": self.timing.as_json(),
            "graph": self.graph,
            "config": self.drawn[0].settings,  # of the first image
            "environment": self.environment,
        }

    def metadata(self, index: int) -> dict[str, Any]:
        """What `--from-png` needs to draw one image again."""
        return self.drawn[index].metadata()

    def png(self, index: int) -> bytes:
        """One image as a PNG file with its metadata."""
        return self.drawn[index].png()


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
    names = (*REPLAYED, "stretch", "negative", "size")
    others = [name for name in names if there["config"].get(name) != settings.get(name)]
    return others + [name for name in ("prompt", "seed") if there[name] != getattr(request, name)]


def check_strangers(output: str | Path, files: Sequence[Path]) -> None:
    """Raise an OutputError if a folder has numbered pictures beside those of a run, for whose own they would pass."""
    folder = folder_named(output)
    if folder is None or not folder.is_dir():
        return
    known = {file.name for file in files}
    there = sorted(path for path in folder.iterdir() if NUMBERED.fullmatch(path.name))
    if others := [path for path in there if path.name not in known]:
        why = "the run that drew it had other prompts, in another order, or another --num-images"
        hint = "another --output, or move them away"
        raise OutputError(f"{some_of(others)} is not of this run", why, hint)


def grid(
    images: Sequence[Image.Image],
    columns: int | None = None,
    gap: int = 4,
    captions: Sequence[str] = (),
    together: int = 1,
) -> Image.Image:
    """All images on one sheet as square as can be, row by row, each with its caption under it, cut to its width.

    So many images `together`, of one prompt, stay in one row.
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


def slug(prompt: str, length: int = 40) -> str:
    """A prompt as part of a file name."""
    return re.sub(r"[^a-z0-9]+", "-", prompt.lower()).strip("-")[:length].strip("-") or "image"


def folder_named(output: str | Path) -> Path | None:
    """The folder that an output means, with a slash at its end or no picture's ending; None for a .png file."""
    path = Path(output)
    if str(output).endswith(("/", os.sep)) or path.suffix.lower() not in PICTURES or path.is_dir():
        return path
    if path.suffix.lower() != ".png":
        hint = "a name ending in .png, or a folder"
        raise OptionError(f"cannot write {output}", "images are PNG files", hint)
    return None


def image_files(
    output: str | Path, prompts: Sequence[str] | Mapping[int, str], as_grid: bool
) -> tuple[list[Path], Path | None]:
    """Where each image goes, and the sheet.

    A `.png` output is the image, or with `--grid` the sheet; anything else is a folder.
    """
    folder = folder_named(output)
    if folder is None:
        if as_grid:
            return [], Path(output)
        if len(prompts) > 1:
            why = f"there are {len(prompts)} images"
            raise OptionError(f"--output {output} names one file", why, "a folder, or --grid")
        return [Path(output)], None
    numbered = prompts.items() if isinstance(prompts, Mapping) else enumerate(prompts)
    files = [folder / f"{number:03d}-{slug(text)}.png" for number, text in numbered]
    return files, folder / "grid.png" if as_grid else None


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


def tokens_file(result: GenerationResult) -> bytes:
    """`--save-tokens`: arrays tokens [images, N] int32, without those of a preview, grid [2], seeds [images] int64,
    prompts and metadata [images] str.
    """
    records, buffer = result.records, io.BytesIO()
    np.savez_compressed(
        buffer,
        tokens=result.tokens[:, result.preview_tokens :].astype(np.int32),
        grid=np.asarray(result.code_grid, dtype=np.int32),
        tokenizer=np.asarray(result.tokenizer),
        seeds=np.asarray([record.seed for record in records], dtype=np.int64),
        prompts=np.asarray([record.prompt for record in records]),
        metadata=np.asarray([json.dumps(one.metadata()) for one in result.drawn]),
    )
    return buffer.getvalue()


@dataclass(frozen=True)
class SavedTokens:
    """What `--save-tokens` wrote, or another program: tokens [images, N], and for each image what it carries.

    Attributes:
        metadata: what draws each image again; empty where the file does not say it.
        tokenizer: fingerprint of the VQ tokenizer that they were drawn beside; empty where the file does not say it.
        grid: rows and columns of a picture's codes; empty where the file does not say it.
        seeds: of the images; empty where the file does not say it.
    """

    tokens: NDArray[np.int64]
    prompts: list[str]
    metadata: list[dict[str, Any]]
    tokenizer: str = ""
    grid: tuple[int, ...] = ()
    seeds: tuple[int, ...] = ()


def read_arrays(path: Path) -> dict[str, NDArray[Any]]:
    """The arrays of a .npz by name, or the one of a .npy as `tokens`.

    Raises:
        OptionError, WeightsError: it cannot be read.
    """
    check_regular(path)
    check_content(path)
    try:
        with open(path, "rb") as file:
            loaded = np.load(file, allow_pickle=False)
            return {"tokens": loaded} if isinstance(loaded, np.ndarray) else dict(loaded)
    except Exception as error:  # whatever damaged parts make of zip files and headers
        raise OptionError(f"cannot read tokens from {path}", str(error) or repr(error)) from error


def read_saved_tokens(path: Path) -> SavedTokens:
    """A .npz with `tokens` [images, N], `prompts` and `metadata` if it has them; or a .npy of tokens alone."""
    held = read_arrays(path)
    try:
        tokens = np.atleast_2d(held["tokens"])
        prompts = [str(text) for text in held.get("prompts", [""] * len(tokens))]
        metadata = [parse_json(str(text)) for text in held.get("metadata", ["{}"] * len(tokens))]
        tokenizer = str(held.get("tokenizer", ""))
        grid, seeds = (tuple(int(n) for n in held.get(name, ())) for name in ("grid", "seeds"))
        for one in metadata:
            if not isinstance(one, dict) or (one and not {"prompt", "seed"} <= one.keys()):
                raise ValueError("its metadata are no objects with a prompt and a seed")
            check_kinds(one, KINDS)
            check_kinds(one.get("config", {}), CONFIG_KINDS)
            check_text(f"cannot read tokens from {path}: a prompt", one.get("prompt", ""))
    except KeyError as error:
        raise OptionError(f"cannot read tokens from {path}", "it holds no `tokens`") from error
    except (ValueError, TypeError, ArithmeticError) as error:
        raise OptionError(f"cannot read tokens from {path}", str(error)) from error
    if tokens.ndim != 2 or tokens.dtype.kind not in "iu" or not tokens.size:
        why = f"they are {list(tokens.shape)} of {tokens.dtype}, expected a row of whole numbers an image"
        raise OptionError(f"cannot use the tokens in {path}", why)
    if not len(tokens) == len(prompts) == len(metadata):
        raise OptionError(f"cannot use the tokens in {path}", "not each image has a prompt")
    return SavedTokens(tokens.astype(np.int64), prompts, metadata, tokenizer, grid, seeds)


@dataclass(frozen=True)
class Outputs:
    """The files of a run, checked before anything is drawn and written as soon as there is something to write.

    Of `images` there is one an image, or none if there is only a sheet.
    """

    images: list[Path]
    sheet: Path | None
    preview: Path | None
    report: Path | None
    tokens: Path | None
    states: Path | None = None

    def of_tokens(self, name: str) -> Outputs:
        """Without pictures, for a model that has nothing to decode them with."""
        if self.sheet or self.preview:
            what = "--grid and --preview-every need pictures"
            hint = "leave them out, or --vq FILE where its authors publish one"
            raise OptionError(what, f"{name} has no VQ tokenizer", hint)
        return replace(self, images=[])

    @classmethod
    def of(
        cls,
        output: str | Path,
        prompts: Sequence[str] | Mapping[int, str],
        *,
        sheet: bool = False,
        previews: bool = False,
        report: Path | None = None,
        tokens: Path | None = None,
        states: Path | None = None,
        resume: bool = False,
        force: bool = False,
    ) -> Outputs:
        """`output` is a .png file or a folder; there is one prompt an image, perhaps by its number.

        With `resume` images that are there are kept; with `force` files that are there are replaced.
        """
        images, whole = image_files(output, prompts, sheet)
        folder = folder_named(output) if previews else None
        name = folder / "preview.png" if folder else Path(output).with_suffix(".preview.png")
        shown = name if previews else None
        others = [path for path in (whole, shown, report, tokens, states) if path is not None]
        if resume:
            check_strangers(output, images)
        check_free([*images, *others], force, {*images, shown} if resume else ())
        return cls(images, whole, shown, report, tokens, states)


def keep_image(files: Sequence[Path], force: bool, resume: bool, index: int, drawn: Drawn) -> None:
    """Write an image of a run to its file as soon as it is there, so that an interrupted run keeps what it drew.

    With `resume`, one that another run has drawn meanwhile stays.
    """
    file = files[index]
    drawn.record.file = str(file)
    try:
        write_file(file, drawn.png(), force)
    except OutputError:
        if not (resume and file.is_file()):
            raise
        if drawn_otherwise(read_png(file), drawn.settings, drawn.record.request):
            why = "another run drew it meanwhile, with other settings"
            raise OutputError(f"{file} is another image", why, "another --output") from None


def save_outputs(result: GenerationResult, outputs: Outputs, together: int, force: bool) -> None:
    """Write sheet, tokens and report, in this order."""
    if outputs.sheet:
        captions = [f"{record.seed}: {record.prompt}" for record in result.records]
        sheet = grid(result.images, captions=captions, together=together)
        write_file(outputs.sheet, encode(sheet), force)
    if outputs.tokens:
        write_file(outputs.tokens, tokens_file(result), force)
    if outputs.report:
        write_file(outputs.report, json.dumps(result.report(), indent=2).encode(), force)
