"""The files of a run: their names, checked before anything is drawn, and when each is written."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lantern_hpu.errors import Arg, OptionError, OutputError, words
from lantern_hpu.files import check_free, some_of, write_file
from lantern_hpu.results.images import Drawn, GenerationResult, grid
from lantern_hpu.results.png import drawn_otherwise, encode, read_png
from lantern_hpu.results.saved_tokens import tokens_file

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
