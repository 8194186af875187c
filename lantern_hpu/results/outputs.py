"""The files of a run: their names, checked before anything is drawn, when each is written; files of image tokens."""

from __future__ import annotations

import io
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lantern_hpu.core import check_text
from lantern_hpu.errors import Arg, OptionError, OutputError, words
from lantern_hpu.files import (
    check_content,
    check_free,
    check_regular,
    parse_json,
    some_of,
    write_file,
)
from lantern_hpu.results.images import (
    CONFIG_KINDS,
    KINDS,
    Drawn,
    GenerationResult,
    check_kinds,
    drawn_otherwise,
    encode,
    grid,
    read_png,
)

PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".avif", ".gif", ".bmp", ".tif", ".tiff")
NUMBERED = re.compile(r"\d{3,}-[a-z0-9-]+\.png")  # pictures of a folder: see `image_files`


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
            what = words(Arg("grid"), "and", Arg("preview_every"), "need pictures")
            hint = words("leave them out, or", Arg("vq", "FILE"), "where its authors publish one")
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
            raise OutputError(
                f"{file} is another image", why, words("another", Arg("output"))
            ) from None


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

    A `.png` output is the image, or with `as_grid` the sheet; anything else is a folder.
    """
    folder = folder_named(output)
    if folder is None:
        if as_grid:
            return [], Path(output)
        if len(prompts) > 1:
            why = f"there are {len(prompts)} images"
            hint = words("a folder, or", Arg("grid", True))
            raise OptionError(words(Arg("output", str(output)), "names one file"), why, hint)
        return [Path(output)], None
    numbered = prompts.items() if isinstance(prompts, Mapping) else enumerate(prompts)
    files = [folder / f"{number:03d}-{slug(text)}.png" for number, text in numbered]
    return files, folder / "grid.png" if as_grid else None


def check_strangers(output: str | Path, files: Sequence[Path]) -> None:
    """Raise an OutputError if a folder has numbered pictures of another run, which would pass for this one's."""
    folder = folder_named(output)
    if folder is None or not folder.is_dir():
        return
    known = {file.name for file in files}
    there = sorted(path for path in folder.iterdir() if NUMBERED.fullmatch(path.name))
    if others := [path for path in there if path.name not in known]:
        number = Arg("num_images")
        why = words("the run that drew it had other prompts, in another order, or another", number)
        hint = words("another", Arg("output"), ", or move them away")
        raise OutputError(f"{some_of(others)} is not of this run", why, hint)


# ------------------------------------------------------------------------------------ saved tokens


def tokens_file(result: GenerationResult) -> bytes:
    """Arrays tokens [images, N] int32, without those of a preview, grid [2], seeds [images] int64,
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
    """What `tokens_file` wrote, or another program: tokens [images, N], and for each image what it carries.

    Attributes:
        metadata: what draws each image again; empty where the file does not say it.
        tokenizer: fingerprint of the VQ tokenizer of the model that drew them; empty where the file does not say it.
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
    except Exception as error:  # damaged zip files and headers raise many kinds
        raise OptionError(f"cannot read tokens from {path}", str(error) or repr(error)) from error


def read_saved_tokens(path: Path, held: Mapping[str, NDArray[Any]] | None = None) -> SavedTokens:
    """A .npz with `tokens` [images, N], `prompts` and `metadata` if it has them; or a .npy of tokens alone.

    Args:
        held: its arrays, if they were read.
    """
    held = read_arrays(path) if held is None else held
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
