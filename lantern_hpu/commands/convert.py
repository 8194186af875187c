"""Turn published checkpoints into one model folder, or a drafter into the speculators layout.

    lantern-hpu convert llamagen-t2i-256 models/t2i
    lantern-hpu generate --model models/t2i --prompt "a red apple" --output apple.png
    lantern-hpu convert llamagen-t2i-256 drafter --to speculators

The folder holds safetensors files with our names, sizes, default sampling, checksums and the target's fingerprint
(`lantern_hpu/models/files/folder.py`). It is memory-mapped, and every file is checked each time it is loaded. A text
encoder is not copied: the folder notes where it lies. The speculators layout is `models/families/speculators.py`;
`--drafter` reads it. Both get a model card, README.md.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lantern_hpu.commands.options import add_fields, add_part_options, filled, given_parts
from lantern_hpu.errors import OptionError, OutputError, choices, exit_code, option
from lantern_hpu.models.files.names import Given

if TYPE_CHECKING:
    from lantern_hpu.models.model import ImageModel

DTYPES = ("auto", "float32", "bfloat16", "float16")
LAYOUTS = ("folder", "speculators")


@dataclass(frozen=True)
class ConvertRequest:
    """What is converted, and where it goes."""

    source: str = option(MISSING, "model name, Hub id, folder or weights file", positional=True)
    output: Path = option(MISSING, "folder to write; must not exist", positional=True)
    dtype: str = option("auto", f"{choices(DTYPES)}; auto: as stored")
    to: str = option(
        "folder",
        "folder: all parts; speculators: the drafter alone, in the layout of vllm-project/speculators",
    )
    given: Given = Given()


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "lantern-hpu convert",
        description="Convert published checkpoints to a model folder, or a drafter to the speculators layout.",
    )
    add_fields(parser, ConvertRequest)
    add_part_options(parser.add_argument_group("parts"))
    return parser


def convert(asked: ConvertRequest) -> str:
    """Write the folder. -> what it holds"""
    output, dtype = asked.output, asked.dtype
    if dtype not in DTYPES:
        raise OptionError(f"--dtype is {dtype}", hint=choices(DTYPES))
    if asked.to not in LAYOUTS:
        raise OptionError(f"--to is {asked.to}", hint=choices(LAYOUTS))
    if output.exists():
        raise OutputError(f"{output} exists", hint="another name, or remove it")
    import torch
    from tqdm import tqdm

    from lantern_hpu.models.files.folder import staged
    from lantern_hpu.models.files.load import open_model
    from lantern_hpu.models.model import Placement
    from lantern_hpu.zoo.find import find_parts

    opened = open_model(find_parts(asked.source, asked.given))
    number = None if dtype == "auto" else getattr(torch, dtype)
    parts = 3 + (opened.config.drafter is not None) if asked.to == "folder" else 2
    with tqdm(total=parts, unit="part", file=sys.stderr) as progress:
        progress.set_description_str("loading")
        model = opened.load(Placement(number))
        progress.update()
        with staged(output) as folder:
            write = write_speculators if asked.to == "speculators" else write_folder
            write(model, folder, asked, progress)
    size = sum(file.stat().st_size for file in output.iterdir())
    what = "drafter in the speculators layout"
    if asked.to == "folder":
        height, width = model.config.image_size
        what = f"{width} x {height} pixels"
    return f"{output}: {what}, {size / 1e6:.1f} MB, target {model.fingerprint[:12]}"


def write_folder(model: ImageModel, folder: Path, asked: ConvertRequest, progress: Any) -> None:
    """All parts, and a card."""
    from lantern_hpu.models.files.folder import write_model
    from lantern_hpu.zoo.fetch import Subject, folder_card, write_card

    write_model(model, folder, progress)
    subject = Subject(model.name, model.config, model.fingerprint)
    write_card(folder, folder_card, subject, asked.output.name)


def write_speculators(
    model: ImageModel, folder: Path, asked: ConvertRequest, progress: Any
) -> None:
    """The drafter, and a card, with the figures of its training if it comes from a folder that has them."""
    from lantern_hpu.models.families.speculators import write_drafter
    from lantern_hpu.zoo.fetch import Subject, drafter_card, report_of, write_card

    write_drafter(model, folder)
    progress.update()
    given = asked.given.drafter
    report = report_of(Path(given)) if given else None
    part = "target" if given else "drafter"
    subject = Subject(model.name, model.config, model.fingerprint, part)
    write_card(folder, drafter_card, subject, asked.output.name, report, "speculators")


def main(argv: Sequence[str] | None = None) -> int:
    """The `convert` command; returns the exit code."""
    args = make_parser().parse_args(argv)

    def command() -> None:
        given = given_parts(args)
        print(convert(filled(ConvertRequest, args, given=given)))

    return exit_code(command)
