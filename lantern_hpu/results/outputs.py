"""The files of a run: planned and checked before anything is drawn, written as soon as there is something to write."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lantern_hpu.errors import OptionError
from lantern_hpu.files import check_free, write_file
from lantern_hpu.results.images import (
    Drawn,
    GenerationResult,
    encode,
    grid,
    image_files,
    tokens_file,
)


@dataclass(frozen=True)
class Outputs:
    """The files of a run.

    Attributes:
        images: one an image, or none if there is only a sheet.
    """

    images: list[Path]
    sheet: Path | None
    preview: Path | None
    report: Path | None
    tokens: Path | None

    def of_tokens(self, name: str) -> Outputs:
        """Without pictures, for a model that has nothing to decode them with.

        Raises:
            OptionError: a sheet or previews are asked for.
        """
        if self.sheet or self.preview:
            what = "--grid and --preview-every need pictures"
            raise OptionError(what, f"{name} has no VQ tokenizer", "--vq FILE")
        return replace(self, images=[])

    @classmethod
    def of(
        cls,
        output: Path,
        prompts: Sequence[str],
        *,
        sheet: bool = False,
        previews: bool = False,
        report: Path | None = None,
        tokens: Path | None = None,
        resume: bool = False,
        force: bool = False,
    ) -> Outputs:
        """
        Args:
            output: a .png file or a folder. prompts: one an image.
            resume: images that are there are kept. force: files that are there are replaced.

        Raises:
            OutputError, OptionError: some could not be written later.
        """
        images, whole = image_files(output, prompts, sheet)
        shown = preview_file(output) if previews else None
        kept = {path for path in images if resume and path.is_file()}
        new = [path for path in images if path not in kept]
        others = [path for path in (whole, shown, report, tokens) if path is not None]
        check_free([*new, *others], force)
        return cls(images, whole, shown, report, tokens)


def preview_file(output: Path) -> Path:
    png = output.suffix.lower() == ".png"
    return output.with_suffix(".preview.png") if png else output / "preview.png"


class Keeper:
    """Writes each image as soon as it is there, so that an interrupted run keeps what it drew."""

    def __init__(self, numbers: Sequence[int], files: Sequence[Path], force: bool) -> None:
        """
        Args:
            numbers: of the images to come, among all. files: of all, or none if they are not kept one by one.
        """
        self.numbers, self.files, self.force = numbers, files, force

    def __call__(self, index: int, drawn: Drawn) -> None:
        if self.files:
            file = self.files[self.numbers[index]]
            write_file(file, drawn.png(), self.force)
            drawn.record.file = str(file)


def save_outputs(
    result: GenerationResult, outputs: Outputs, columns: int | None, force: bool
) -> None:
    """Write sheet, tokens and report, in this order."""
    if outputs.sheet:
        write_file(outputs.sheet, encode(grid(result.images, columns)), force)
    if outputs.tokens:
        write_file(outputs.tokens, tokens_file(result), force)
    if outputs.report:
        write_file(outputs.report, json.dumps(result.report(), indent=2).encode(), force)
